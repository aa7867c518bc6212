"""`treetune train areal`: AReaL's own trainer with our workflow, on a task server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from treetune.tasksets.target import is_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, TrainRequest

CONFIG = Path(__file__).with_name("config.yaml")


def plan(request: TrainRequest) -> Launch:
    """Plan a training on a task server: the given one, or one that `run.py` starts for the tasks."""
    gpus = launch.count_gpus()
    halves = max(1, gpus // 2)  # one for sampling, one for training
    planned: dict[str, Any] = {
        "actor.path": request.model,
        "total_train_steps": request.steps,
        "cluster.n_gpus_per_node": gpus,
        "rollout.backend": f"sglang:d{halves}p1t1",
        "actor.backend": f"fsdp:d{halves}p1t1",
    }
    config = launch.merge(planned, request.overrides)
    number = [] if request.num_tasks is None else [f"--num-tasks={request.num_tasks}"]
    of_target = [f"--{key}={value}" for key, value in request.taskset.items()]
    return Launch(
        trainer="areal",
        package="areal",
        install="install areal 1.0 as its guide says",
        data={"task server" if is_server(request.target) else "tasks": request.target, "num_tasks": request.num_tasks},
        config={"--config": str(CONFIG), **config},
        command=[
            *(sys.executable, "-m", "treetune.trainers.areal", request.target, *number, *of_target),
            *("--config", str(CONFIG), *launch.words(config)),
        ],
    )
