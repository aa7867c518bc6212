"""A training in several processes: run by tests/trainers/test_trl.py with torchrun of TRL's own virtual environment.

torchrun --nproc-per-node 2 trl_processes.py FOLDER writes what each process was given to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from accelerate.utils import gather_object
from real_letters import letters_tokenizer
from trl_side import train

from treetune import Environment, Step, Task, Taskset
from treetune.trainers.trl import TrlTasks


class Counts(Environment):
    """Has as many turns as its task says, so that processes have different ones; each wants an answer of its own."""

    def start(self):
        self.turns, self.number = 0, 10 * int(self.task.ground_truth)
        return f"Say {self.number}."

    def step(self, action):
        said, wanted = action.text, str(self.number)
        self.turns, self.number = self.turns + 1, self.number + 1
        return Step(f"Say {self.number}.", reward=float(said == wanted), done=self.turns == int(self.task.ground_truth))


class Turns(Taskset):
    def load_tasks(self):
        for turns in (1, 4, 2, 3):
            yield Task(prompt="Say.", reward_spec={"ground_truth": str(turns)})

    def environment(self, task):
        return Counts(task)


def generate(prompts, trainer):
    """As TRL samples from a vLLM server: all prompts go there together, and each process takes as many as it sent."""
    texts = tokenizer.batch_decode(gather_object(prompts))
    answers = [tokenizer((re.findall(r"Say (\d+)\.", text) or ["?"])[-1])["input_ids"] for text in texts]
    first = trainer.accelerator.process_index * len(prompts)
    return answers[first : first + len(prompts)], None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    tasks = TrlTasks(Turns(), generate=generate)
    seen, trainer = train(folder, tokenizer, tasks, tasks.dataset(), steps=2)
    rank = trainer.accelerator.process_index
    (folder / f"{rank}.json").write_text(json.dumps({"indices": seen.prompts, "rewards": seen.rewards}))
