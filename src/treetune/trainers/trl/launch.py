"""`treetune train trl`: TRL's GRPOTrainer, or its AsyncGRPOTrainer, on any tasks."""

from __future__ import annotations

import sys
from pathlib import Path

from treetune.errors import UsageError
from treetune.tasksets.target import is_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, Setting, TrainRequest
from treetune.trainers.train_run import PARTS, TrainRun

OURS = ("trainer", "num_tasks", "max_turns")
"""Keys of `python -m treetune.trainers.trl` that are not TRL's."""


def plan(request: TrainRequest, run: TrainRun) -> Launch:
    """Plan a training. TRL plays the tasks themselves, so no rows are built."""
    target = request.target
    if not is_server(target) and ":" not in target and Path(target).exists():
        target = str(Path(target).absolute())
    tenth = "a tenth of the steps, and the end"
    planned: dict[str, Setting] = {
        "num_tasks": Setting(request.num_tasks, "--num-tasks"),
        "max_steps": Setting(request.steps, "--steps"),
        "output_dir": Setting(str(run.checkpoints), "the checkpoints of this training alone"),
        "save_strategy": Setting("steps", "a training that is killed can be resumed"),
        "save_steps": Setting(1 / PARTS, tenth),
        "resume_from_checkpoint": Setting("true" if run.resume else None, "--resume"),
        "logging_steps": Setting(1, "the reward of each step"),
        "report_to": Setting("none", "no account is needed"),
        "run_name": Setting(run.name, "tasks, model and a hash of the plan"),
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
        reasons=launch.reasons(planned, config),
        run=run,
        checkpoints="checkpoints/checkpoint-*/trainer_state.json",
        command=[
            *(sys.executable, "-m", "treetune.trainers.trl", target, *of_target, f"model={request.model}"),
            *launch.words(config),
        ],
    )
