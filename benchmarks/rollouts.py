"""What an evaluation costs per rollout beside a bare loop over the same scorer. Run: python -m benchmarks.rollouts"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks.measure import cost, show
from treetune.evaluation import TRACES, RunFolder, Runner, local_host, read_evaluation
from treetune.policies import load_policy

ROLLOUTS = 5000


def ours() -> None:
    evaluation = read_evaluation(
        {"taskset": {"id": "arithmetic"}, "model": "scripted:gold", "num_tasks": ROLLOUTS, "num_rollouts": 1}
    )
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", TRACES, evaluation)
        with run:
            policy = load_policy("scripted:gold", evaluation.taskset)
            summary = asyncio.run(Runner(evaluation, run).run(local_host(evaluation, policy)))
    assert summary.mean_reward == 1.0
    assert summary.rollouts == ROLLOUTS


def bare_loop() -> None:
    """What a script would do: no concurrency, no timing, no resume."""
    taskset = read_evaluation({"taskset": {"id": "arithmetic"}, "model": "scripted:gold"}).taskset
    with tempfile.TemporaryFile("w") as file:
        for task in taskset.draw(ROLLOUTS):
            answer = taskset.gold(task)
            file.write(json.dumps({"prompt": task.prompt, "reward": taskset.reward(task, answer).reward}) + "\n")


def main() -> None:
    show(
        f"eval: one of {ROLLOUTS:,} single-turn rollouts",
        cost(ours, per=ROLLOUTS),
        "a bare loop over the scorer",
        cost(bare_loop, per=ROLLOUTS),
        target="0.5 ms",
    )


if __name__ == "__main__":
    main()
