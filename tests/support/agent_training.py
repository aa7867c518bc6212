"""Trains an agent on a CPU, as `examples/train_agent` says: in TRL and in verl. Tests take two steps, the curves more.

python agent_training.py FOLDER RESULTS trl=40 verl=20 [seeds=3]
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import venvs
from cpu_training import ROOT, TASK, CpuTraining

EXAMPLE = ROOT / "examples" / "train_agent"
AGENT = "agent=agent.py:solve"
TASKS, GROUP, RATE, MOST_TOKENS = 8, 8, 5e-4, 8
"""Tasks of a step, rollouts of each, the learning rate, and the tokens of one answer."""


class AgentTraining(CpuTraining):
    @cached_property
    def work(self) -> Path:
        return Path(shutil.copytree(EXAMPLE, self.folder / "work"))

    @cached_property
    def model(self) -> Path:
        place = self.folder / "model"
        words = ("parity.py:Notes", "0.54", "Check it.")
        venvs.run(venvs.venv(*venvs.TRL), TASK / "tiny.py", place, *words, cwd=self.work, OMP_NUM_THREADS="1")
        return place

    def in_trl(self, steps: int, seed: int = 0) -> Path:
        """The run folder of a training with GRPOTrainer."""
        run = self.work / f"trl-{seed}"
        words = ("--model", self.model, "--steps", steps, "--val", 0, "--taskset.shuffle.seed", seed, "-o", run)
        keys = {
            "learning_rate": RATE,
            "num_generations": GROUP,
            "per_device_train_batch_size": TASKS * GROUP,
            "gradient_accumulation_steps": 1,
            "max_completion_length": MOST_TOKENS,
            "seed": seed,
        }
        settings = [f"{key}={value}" for key, value in keys.items()]
        python = venvs.venv(*venvs.TRL)
        self._train(python, "trl", "parity.py:Parity", *words, AGENT, *settings, until=None, OMP_NUM_THREADS="1")
        return run

    def in_verl(self, steps: int) -> list[dict[str, Any]]:
        """The figures and rows of the steps of verl's v1 trainer."""
        keys = {
            "data.train_batch_size": TASKS,
            "actor_rollout_ref.actor.ppo_mini_batch_size": TASKS,
            "actor_rollout_ref.rollout.n": GROUP,
            "actor_rollout_ref.actor.optim.lr": RATE,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": TASKS * GROUP,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": TASKS * GROUP,
            "actor_rollout_ref.rollout.max_num_seqs": TASKS * GROUP,
            "actor_rollout_ref.rollout.max_num_batched_tokens": 8192,
        }
        return self.verl("Parity", steps, "-o", "verl", AGENT, file="parity.py", **keys)


def rewards_of(run: Path) -> list[float]:
    """The mean reward of each step."""
    found: dict[str, float] = json.loads((run / "result.json").read_text())["rewards"]
    return list(found.values())


def measure(folder: Path, results: Path, trl: int = 0, verl: int = 0, seeds: int = 3) -> None:
    """Trains with each, and writes the rewards of each training to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    training = AgentTraining(folder)

    def keep(name: str, rewards: list[float]) -> None:
        file = results / f"{name.replace(',', '').replace(' ', '-').lower()}.json"
        found = {"trainer": name, "rewards": [round(reward, 4) for reward in rewards]}
        file.write_text(json.dumps(found) + "\n")

    for seed in range(seeds if trl else 0):
        keep(f"TRL 1.16, seed {seed}", rewards_of(training.in_trl(trl, seed)))
    if verl:
        keep("verl 0.9.1", [step["reward"] for step in training.in_verl(verl)])


if __name__ == "__main__":
    counts = {name: int(count) for name, count in (word.split("=") for word in sys.argv[3:])}
    measure(Path(sys.argv[1]).absolute(), Path(sys.argv[2]), **counts)
