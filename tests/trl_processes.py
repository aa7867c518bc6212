"""A training in several processes: run by tests/test_trl.py with torchrun of TRL's own virtual environment.

torchrun --nproc-per-node 2 trl_processes.py FOLDER writes what each process was given to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from real_letters import letters_tokenizer
from treetune import Environment, Step, Task, Taskset
from treetune.trainers.trl import TrlTasks
from trl_side import train


class Counts(Environment):
    """Has as many turns as its task says, so that processes have different ones."""

    def start(self):
        self.left = int(self.task.ground_truth)
        return "Say."

    def step(self, action):
        self.left -= 1
        return Step("Go on.", reward=1.0, done=not self.left)


class Turns(Taskset):
    def load_tasks(self):
        for turns in (1, 4, 2, 3):
            yield Task(prompt="Say.", reward_spec={"ground_truth": str(turns)})

    def environment(self, task):
        return Counts(task)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    tasks = TrlTasks(Turns())
    seen, trainer = train(folder, tokenizer, tasks, tasks.dataset(), steps=2)
    rank = trainer.accelerator.process_index
    (folder / f"{rank}.json").write_text(json.dumps({"indices": seen.prompts, "rewards": seen.rewards}))
