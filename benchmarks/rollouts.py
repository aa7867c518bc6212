"""What an evaluation costs per rollout beside a bare loop over the same scorer. Run: python -m benchmarks.rollouts"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks.measure import cost, show
from treetune.evaluation import EvalConfig, Runner, read_config
from treetune.models import load_policy
from treetune.play.host import LocalHost, always
from treetune.play.streams import Streams
from treetune.runs.folder import TRACES, RunFolder

ROLLOUTS = 5000


def ours() -> None:
    evaluation = read_config(
        {"taskset": {"id": "arithmetic"}, "model": "scripted:gold", "num_tasks": ROLLOUTS, "num_rollouts": 1},
        EvalConfig,
    )
    with tempfile.TemporaryDirectory() as folder:
        with RunFolder.create(Path(folder) / "run", TRACES, evaluation) as run:
            policy = always(load_policy("scripted:gold", evaluation.taskset))
            host = LocalHost(Streams(evaluation.taskset), policy, capacity=evaluation.config.max_concurrent)
            asyncio.run(Runner(evaluation, run).run(host))
        summary = json.loads((run.path / "summary.json").read_text())
    assert summary["mean_reward"] == 1.0
    assert summary["rollouts"] == ROLLOUTS


def bare_loop() -> None:
    """What a script would do: no concurrency, no timing, no resume."""
    taskset = read_config({"taskset": {"id": "arithmetic"}, "model": "scripted:gold"}, EvalConfig).taskset
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
