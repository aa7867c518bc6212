"""`treetune train slime`: train.py from a checkout of slime, with our data source, rollouts and rewards."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from treetune.errors import UsageError
from treetune.tasksets.target import refuse_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, Setting, TrainRequest
from treetune.trainers.train_run import TrainRun, describe_interval, interval

BATCH, GROUP, STEPS = 32, 8, 100


def plan(request: TrainRequest, run: TrainRun) -> Launch:
    """Plan a training. slime draws the tasks itself, so no rows are built. The user supplies Megatron's model
    description."""
    if request.taskset or request.num_tasks is not None:
        raise UsageError(
            "slime is given the TARGET alone: no keys of it, and no number of tasks",
            remedy="write both into a config.yaml and name that as TARGET",
        )
    refuse_server(request.target, "train slime")
    steps = request.steps or STEPS
    every, tenth = interval(steps), describe_interval(steps)
    plays = "tasks, episodes and rewards are Treetune's"
    planned: dict[str, Setting] = {
        "prompt-data": Setting(request.target, "the tasks"),
        "data-source-path": Setting("treetune.trainers.slime.TreetuneData", plays),
        "custom-generate-function-path": Setting("treetune.trainers.slime.generate", plays),
        "custom-rm-path": Setting("treetune.trainers.slime.reward", plays),
        "hf-checkpoint": Setting(request.model, "the model"),
        "num-rollout": Setting(steps, "--steps" if request.steps else "slime has no default"),
        "rollout-batch-size": Setting(BATCH, "tasks in a step"),
        "n-samples-per-prompt": Setting(GROUP, "rollouts in a group, which GRPO compares"),
        "global-batch-size": Setting(BATCH * GROUP, "one update a step"),
        "rollout-max-response-len": Setting(1024, "the tokens of all answers of an episode"),
        "advantage-estimator": Setting("grpo", "needs no critic"),
        "actor-num-gpus-per-node": Setting(launch.count_gpus(), "the GPUs of this machine"),
        "colocate": Setting(True, "the engine and the trainer share the GPUs"),
        "save": Setting(str(run.checkpoints), "the checkpoints of this training alone"),
        "save-interval": Setting(every, f"{tenth}, and the end"),
        "load": Setting(str(run.checkpoints) if run.resume else None, "--resume"),
    }
    given = [override.replace("_", "-", override.partition("=")[0].count("_")) for override in request.overrides]
    config = launch.merge(planned, given)
    return Launch(
        trainer="slime",
        package="slime",
        install="install slime from a checkout, as its guide says, and run `treetune train` beside its train.py",
        data={"prompt-data": request.target},
        config=config,
        reasons=launch.reasons(planned, config),
        run=run,
        checkpoints="checkpoints/latest_checkpointed_iteration.txt",
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
