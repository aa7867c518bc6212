"""examples/turn_credit by whole runs of verl's v1 trainer, until 90 % of the answers are right.

    python verl_whole_luck.py FOLDER luck [--seeds 10] [--first 0]      # a JSON line for each training

`treetune train verl` starts Ray, vLLM and verl's workers, all on a CPU, and each training in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import venvs
from cpu_training import ROOT, CpuTraining

EXAMPLE = ROOT / "examples" / "turn_credit"
sys.path.insert(0, str(EXAMPLE))
from luck import ANSWERS, TURNS  # noqa: E402

PROMPTS, GROUP, RATE, ENOUGH, MEAN_OF = 8, 8, 2e-3, 0.9, 3
"""As in the example: tasks of a step, episodes of a task, the learning rate, and when a training ends."""
SETTINGS = {
    "data.train_batch_size": PROMPTS,
    "data.max_prompt_length": 4,
    "data.max_response_length": 2 * TURNS,
    "data.shuffle": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": PROMPTS * GROUP,
    "actor_rollout_ref.actor.optim.lr": RATE,
    "actor_rollout_ref.rollout.n": GROUP,
    "actor_rollout_ref.rollout.max_num_seqs": PROMPTS * GROUP,
    "actor_rollout_ref.rollout.max_model_len": 64,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": PROMPTS * GROUP,
    "trainer.v1.sampler.custom_sampler.path": "pkg://verl_quick_buffer",
    "trainer.v1.sampler.custom_sampler.name": "QuickBuffer",
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}

_ADD_TOKENS = """
import sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
tokenizer.add_tokens(["\\n", "<|im_end|>"])
tokenizer.save_pretrained(sys.argv[1])
"""
"""verl looks for these in the tokenizer of a Qwen3. The model cannot sample them."""


class LuckTraining(CpuTraining):
    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder)
        self.seed = seed

    @cached_property
    def work(self) -> Path:
        place = self.folder / "work"
        place.mkdir()
        shutil.copy(EXAMPLE / "luck.py", place)
        return place

    @cached_property
    def model(self) -> Path:
        """The model of the example. Each of its tokens ends an answer: the settings of verl have no such limit."""
        place, python = self.folder / "model", venvs.vllm_verl()
        venvs.run(python, EXAMPLE / "tiny.py", place, str(self.seed))
        venvs.run(python, "-c", _ADD_TOKENS, place)
        words = json.loads((place / "config.json").read_text())["vocab_size"]
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(words))}))
        return place

    def right(self, task: str) -> list[float]:
        """The share of right answers in each step until now."""
        run = self.run("verl", task)
        shares = []
        while run is not None and (file := run / "rollouts" / f"{len(shares) + 1}.jsonl").exists():
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            if len(rows) < PROMPTS * GROUP:  # it is being written
                break
            answers = [(row["output"].split()[-1], int(row["gts"].split()[1])) for row in rows]
            shares.append(round(fmean(said == ANSWERS[asked] for said, asked in answers), 4))
        return shares


def train(folder: Path, task: str, credit: str, seed: int, most: int) -> dict[str, Any]:
    training = LuckTraining(folder, seed)
    folder.mkdir(parents=True)
    name = task.capitalize() + "ByTurn" * (credit == "turn")
    began = time.monotonic()

    def reached() -> bool:
        last = training.right(name)[-MEAN_OF:]
        return len(last) == MEAN_OF and fmean(last) >= ENOUGH

    def ended() -> bool:
        time.sleep(1)
        return reached() or len(training.right(name)) >= most

    settings = {**SETTINGS, "actor_rollout_ref.rollout.seed": seed}
    steps = training.verl(name, most + 2, until=ended, file="luck.py", **settings)
    right = training.right(name)[:most]
    return {
        "trainer": "verl v1",
        "task": task,
        "credit": credit,
        "seed": seed,
        "steps": len(right) if reached() else None,  # None: not within so many
        "seconds": round(time.monotonic() - began),
        "step_seconds": round(fmean(step["timing_s/step"] for step in steps[2:]), 2),
        "right": right,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", choices=["luck", "final", "quiz"])
    parser.add_argument("--credit", choices=["turn", "outcome"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=400)
    args = parser.parse_args()
    for seed in range(args.first, args.first + args.seeds):
        for credit in [args.credit] if args.credit else ["turn", "outcome"]:
            folder = args.folder.absolute() / f"{args.task}-{credit}-{seed}"
            print(json.dumps(train(folder, args.task, credit, seed, args.most)), flush=True)


if __name__ == "__main__":
    main()
