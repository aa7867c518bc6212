"""`treetune train trl`: TRL's GRPOTrainer, or its AsyncGRPOTrainer, on any tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from treetune.errors import MissingExtraError, UsageError
from treetune.tasksets.target import is_server
from treetune.trainers import launch
from treetune.trainers.held_out import NONE
from treetune.trainers.launch import Launch, Setting, TargetTasks, TrainRequest
from treetune.trainers.lengths import measure
from treetune.trainers.train_run import PARTS, TrainRun
from treetune.trainers.trl.rollouts import check_settings

NEWEST = "checkpoint-*/trainer_state.json"
"""The files that complete checkpoints have, in `output_dir`."""
OURS = ("trainer", "num_tasks", "val", *launch.OWN)
"""Keys of `python -m treetune.trainers.trl` that are not TRL's."""


def plan(request: TrainRequest, run: TrainRun, tasks: TargetTasks) -> Launch:
    """Plan a training. TRL plays the tasks themselves, so no rows are built."""
    target = request.target
    if not is_server(target) and ":" not in target and Path(target).exists():
        target = str(Path(target).absolute())
    given = dict(map(launch.split_override, request.overrides))
    if tasks.train is None:
        validation = f"{NONE}a server does not say which tasks are which; name the TARGET that it serves"
    elif given.get("trainer") == "async":
        validation = f"{NONE}AsyncGRPO does not sample for it"
    else:
        validation = tasks.hold_out(request).what
    lengths = measure(tasks.train, request.model, request.num_tasks).what
    validates = not validation.startswith(NONE)
    regular = given.get("eval_strategy", "steps") == "steps"
    logs = request.log_to("wandb", "mlflow", "tensorboard", most=1)
    if not validates and given.get("eval_strategy", "no") != "no":
        problem = f"eval_strategy={given['eval_strategy']}, but there is nothing to validate with"
        raise UsageError(f"{problem} ({validation.removeprefix(NONE)})", remedy="declare val_tasks in a YAML file")
    tenth = "a tenth of the steps, and the end"
    planned: dict[str, Setting] = {
        "num_tasks": Setting(request.num_tasks, "--num-tasks"),
        "max_steps": Setting(request.steps, "--steps"),
        "output_dir": Setting(str(run.checkpoints), "only the checkpoints of this training"),
        "val": Setting(request.val if validates else 0, validation),
        "eval_strategy": Setting("steps" if validates else None, validation),
        "eval_steps": Setting(1 / PARTS if validates and regular else None, tenth),
        "eval_on_start": Setting(True if validates and regular and not run.resume else None, "validate at the start"),
        "num_generations_eval": Setting(1 if validates else None, "one rollout a task"),
        "save_strategy": Setting("steps", "a training that is killed can be resumed"),
        "save_steps": Setting(1 / PARTS, tenth),
        "resume_from_checkpoint": Setting("true" if run.resume else None, "--resume"),
        "logging_steps": Setting(1, "the reward of each step"),
        "report_to": Setting(*((logs[0], "--log") if logs else ("none", "no account is needed"))),
        "run_name": Setting(run.name, "tasks, model and a hash of the plan"),
    }
    config = launch.merge(planned, request.overrides)
    if unknown := [key for key in config if key.startswith(("+", "~"))]:
        raise UsageError(f"{unknown[0]}: TRL has no such key", remedy="write KEY=VALUE with a key of GRPOConfig")
    if request.own.get("max_turns") != 1 and any(one.credit == "turn" and one.turns > 1 for one in tasks.contracts()):
        check_settings(config)
    of_target = [f"--{key}={value}" for key, value in request.taskset.items()]
    return Launch(
        trainer="trl",
        package="trl",
        install="pip install 'treetune[trl]'",
        data={
            "tasks": target,
            "num_tasks": request.num_tasks,
            "validation": validation,
            "lengths": lengths,
        },
        config=config,
        reasons=launch.reasons(planned, config),
        run=run,
        environment=run.environment(logs),
        checkpoints=f"checkpoints/{NEWEST}",
        saved="checkpoints/checkpoint-{step}",
        command=[
            *(sys.executable, "-m", "treetune.trainers.trl", target, *of_target, f"model={request.model}"),
            *launch.words(config),
        ],
    )


def find_trainer(name: str) -> tuple[Any, Any]:
    try:
        if name == "grpo":
            from trl import GRPOConfig

            from treetune.trainers.trl.episode_trainer import EpisodeTrainer

            return GRPOConfig, EpisodeTrainer
        if name == "async":
            from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

            return AsyncGRPOConfig, AsyncGRPOTrainer
    except ImportError as error:
        raise MissingExtraError.of(f"TRL cannot be imported: {error}", "trl") from error
    raise UsageError(f"trainer={name}: there is no such trainer", remedy="use trainer=grpo or trainer=async")


def read_defaults(config: Mapping[str, str]) -> dict[str, Any]:
    args, _ = find_trainer(config.get("trainer", "grpo"))
    own = {field.name: field.default_factory() if callable(field.default_factory) else field.default
           for field in fields(args)}  # fmt: skip
    return own | dict.fromkeys(OURS)
