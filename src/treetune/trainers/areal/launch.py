"""`treetune train areal`: AReaL's own trainer with our workflow, on a task server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.tasksets.target import is_server
from treetune.trainers import launch
from treetune.trainers.held_out import NONE
from treetune.trainers.launch import Launch, Setting, TargetTasks, TrainRequest
from treetune.trainers.lengths import measure
from treetune.trainers.train_run import TrainRun, describe_interval, interval

CONFIG = Path(__file__).with_name("config.yaml")
BATCH = 32
"""The batch size in that file."""


def plan(request: TrainRequest, run: TrainRun, tasks: TargetTasks) -> Launch:
    """Plan a training on a task server: the given one, or one that `run.py` starts for the tasks."""
    gpus = launch.count_gpus()
    halves = max(1, gpus // 2)  # one for sampling, one for training
    batch = request.given("train_dataset.batch_size", BATCH)
    tasks.check_groups()
    held = None if tasks.train is None else tasks.hold_out(request)
    count = request.num_tasks if held is None or held.train is None else len(held.train)
    per_epoch = (count or 0) // batch
    epochs = request.count_epochs("total_train_epochs", 1, per_epoch) if count else 1
    steps = request.steps or epochs * per_epoch
    every = interval(steps, to_the_end=True)
    what = f"{NONE}a server does not say which tasks are which; name the TARGET that it serves"
    validation = what if held is None else held.what
    validates = held is not None and len(held.val) > 0
    tenth = describe_interval(steps) + ("; AReaL does not save the last step by itself" if steps % every else "")
    logs = request.log_to("wandb", "tensorboard")
    board = run.environment(logs)
    planned: dict[str, Setting] = {
        "experiment_name": Setting(run.name, "tasks, model and a hash of the plan"),
        "cluster.fileroot": Setting(str(run.folder), "only the checkpoints and logs of this training"),
        "cluster.name_resolve.nfs_record_root": Setting(str(run.folder / "names"), "the processes of this training"),
        "actor.path": Setting(request.model, "the model"),
        "total_train_epochs": Setting(epochs if epochs > 1 else None, "as many as --steps takes"),
        "total_train_steps": Setting(request.steps, "--steps"),
        "cluster.n_gpus_per_node": Setting(gpus, "the GPUs of this machine"),
        "rollout.backend": Setting(f"sglang:d{halves}p1t1", "half of the GPUs sample"),
        "actor.backend": Setting(f"fsdp:d{halves}p1t1", "half of the GPUs train"),
        "evaluator.freq_steps": Setting(every if validates else None, tenth),
        "evaluator.freq_epochs": Setting(1 if validates else None, "the end of each epoch"),
        "evaluator.eval_before_train": Setting(True if validates else None, "AReaL does so after its first step"),
        "saver.freq_steps": Setting(every, tenth),
        "saver.freq_epochs": Setting(1, "the end of each epoch"),
        "recover.mode": Setting("on", "writes what --resume needs; a new training has its own folder"),
        "stats_logger.wandb.mode": Setting("online" if "wandb" in logs else None, "--log"),
        "stats_logger.tensorboard.path": Setting(board.get("TENSORBOARD_DIR"), "--log"),
        "recover.freq_steps": Setting(every, tenth),
    }
    config = launch.merge(planned, request.overrides)
    number = [] if request.num_tasks is None else [f"--num-tasks={request.num_tasks}"]
    number += [f"--val={request.val}"] if validates else []
    of_target = [f"--{key}={value}" for key, value in request.taskset.items()]
    why = launch.reasons(planned, config)
    return Launch(
        trainer="areal",
        package="areal",
        install="install areal 1.0 as its guide describes",
        data={
            "task server" if is_server(request.target) else "tasks": request.target,
            "num_tasks": request.num_tasks,
            "validation": validation,
            "lengths": measure(tasks.train, request.model, request.num_tasks).what,
        },
        config={"--config": str(CONFIG), **config},
        reasons=why,
        run=run,
        checkpoints="checkpoints/**/recover_info",
        saved="checkpoints/**/*globalstep{before}",
        watched=tasks.train is not None and why["cluster.fileroot"] != launch.AS_SET,
        command=[
            *(sys.executable, "-m", "treetune.trainers.areal", request.target, *number, *of_target),
            *("--config", str(CONFIG), *launch.words(config)),
        ],
    )


def read_defaults(config: Mapping[str, str]) -> dict[str, Any]:
    from areal.api.cli_args import GRPOConfig
    from omegaconf import OmegaConf

    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(GRPOConfig))  # type: ignore[assignment]
    return found | dict.fromkeys(launch.OWN)
