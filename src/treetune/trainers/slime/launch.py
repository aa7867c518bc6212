"""`treetune train slime`: train.py from a checkout of slime, with our data source, rollouts and rewards."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treetune.errors import UsageError
from treetune.tasksets.target import refuse_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, TrainRequest

BATCH, GROUP = 32, 8


def plan(request: TrainRequest) -> Launch:
    """Plan a training. slime draws the tasks itself, so no rows are built. The user supplies Megatron's model
    description."""
    if request.taskset or request.num_tasks is not None:
        raise UsageError(
            "slime is given the TARGET alone: no keys of it, and no number of tasks",
            remedy="write both into a config.yaml and name that as TARGET",
        )
    refuse_server(request.target, "train slime")
    planned: dict[str, Any] = {
        "prompt-data": request.target,
        "data-source-path": "treetune.trainers.slime.TreetuneData",
        "custom-generate-function-path": "treetune.trainers.slime.generate",
        "custom-rm-path": "treetune.trainers.slime.reward",
        "hf-checkpoint": request.model,
        "num-rollout": request.steps or 100,
        "rollout-batch-size": BATCH,
        "n-samples-per-prompt": GROUP,
        "global-batch-size": BATCH * GROUP,
        "rollout-max-response-len": 1024,
        "advantage-estimator": "grpo",
        "actor-num-gpus-per-node": launch.count_gpus(),
        "colocate": True,
    }
    given = [override.replace("_", "-", override.partition("=")[0].count("_")) for override in request.overrides]
    config = launch.merge(planned, given)
    return Launch(
        trainer="slime",
        package="slime",
        install="install slime from a checkout, as its guide says, and run `treetune train` beside its train.py",
        data={"prompt-data": request.target},
        config=config,
        command=[sys.executable, str(find_script()), *options(config)],
    )


def find_script() -> Path:
    """Find slime's train.py: here, or next to its installed package, which is a checkout."""
    if not Path("train.py").exists() and (found := find_spec("slime")) is not None and found.origin is not None:
        return Path(found.origin).parents[1] / "train.py"
    return Path("train.py")


def options(config: dict[str, str]) -> list[str]:
    """Return keys as slime's options: a `true` one stands alone, a `false` one is left out."""
    words = []
    for key, value in config.items():
        if value != "false":
            words += [f"--{key}"] if value == "true" else [f"--{key}", value]
    return words
