"""`treetune train trl`: TRL's GRPOTrainer, or its AsyncGRPOTrainer, on any tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from treetune.errors import UsageError
from treetune.tasksets.target import is_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, TrainRequest

OURS = ("trainer", "num_tasks", "max_turns")
"""Keys of `python -m treetune.trainers.trl` that are not TRL's."""


def plan(request: TrainRequest) -> Launch:
    """Plan a training. TRL plays the tasks themselves, so no rows are built."""
    target = request.target
    if not is_server(target) and ":" not in target and Path(target).exists():
        target = str(Path(target).absolute())
    planned: dict[str, Any] = {
        "num_tasks": request.num_tasks,
        "max_steps": request.steps,
        "output_dir": "trained",
        "logging_steps": 1,
        "report_to": "none",
    }
    config = launch.merge(planned, request.overrides)
    if unknown := [key for key in config if key.startswith(("+", "~"))]:
        raise UsageError(f"{unknown[0]}: TRL has no such spelling", remedy="write KEY=VALUE with a key of GRPOConfig")
    of_target = [f"--{key}={value}" for key, value in request.taskset.items()]
    return Launch(
        trainer="trl",
        package="trl",
        install="pip install 'treetune[trl]'",
        data={"tasks": target, "num_tasks": request.num_tasks},
        config=config,
        command=[
            *(sys.executable, "-m", "treetune.trainers.trl", target, *of_target, f"model={request.model}"),
            *launch.words(config),
        ],
    )
