"""`treetune train slime`: train.py from a checkout of slime, with our data source, rollouts and rewards."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from treetune.config.structs import load_yaml
from treetune.errors import UsageError
from treetune.system.digest import digest
from treetune.system.folders import write_atomically
from treetune.tasksets.target import refuse_server
from treetune.trainers import launch
from treetune.trainers.launch import Launch, Setting, TargetTasks, TrainRequest
from treetune.trainers.lengths import measure
from treetune.trainers.slime.data import HELD_OUT, cache_folder, write_rows
from treetune.trainers.train_run import TrainRun, describe_interval, interval

BATCH, GROUP, STEPS = 32, 8, 100
SETTINGS = "custom-config-path"
"""slime's key for the YAML file with our settings."""


def plan(request: TrainRequest, run: TrainRun, tasks: TargetTasks) -> Launch:
    """Plan a training. slime draws the tasks itself, so no rows are built. The user supplies Megatron's model
    description."""
    if request.taskset or request.num_tasks is not None:
        raise UsageError(
            "slime gets only the TARGET: no keys of it, and no number of tasks",
            remedy="write both into a config.yaml and name that as TARGET",
        )
    refuse_server(request.target, "train slime")
    steps = request.steps or STEPS
    every, tenth = interval(steps, to_the_end=True), describe_interval(steps)
    if steps % every:
        tenth += "; slime does not add the last step"
    assert tasks.train is not None  # a server is refused above
    tasks.check_groups()
    held = tasks.hold_out(request)
    lengths = measure(tasks.train, request.model)
    name = HELD_OUT if tasks.declared is None else "validation"
    validation = f"{name} {write_rows(held.select(tasks.train, tasks.declared))}" if held.val else None
    logs = request.log_to("wandb", "tensorboard")
    plays = "tasks, episodes and rewards are Treetune's"
    planned: dict[str, Setting] = {
        "prompt-data": Setting(request.target, "the tasks"),
        "data-source-path": Setting("treetune.trainers.slime.TreetuneData", plays),
        "custom-generate-function-path": Setting("treetune.trainers.slime.generate", plays),
        "custom-rm-path": Setting("treetune.trainers.slime.reward", plays),
        "custom-advantage-function-path": Setting(
            "treetune.trainers.slime.advantages" if any(by == "turn" for by, _ in tasks.credits()) else None,
            "the tasks declare credit: turn",
        ),
        "hf-checkpoint": Setting(request.model, "the model"),
        "num-rollout": Setting(steps, "--steps" if request.steps else "slime has no default"),
        "rollout-batch-size": Setting(BATCH, "tasks in a step"),
        "n-samples-per-prompt": Setting(GROUP, "rollouts in a group, which GRPO compares"),
        "global-batch-size": Setting(BATCH * GROUP, "one update a step"),
        "rollout-max-response-len": Setting(lengths.response_limit(lengths.longest) or 1024, "all turns together"),
        "advantage-estimator": Setting("grpo", "needs no critic"),
        "actor-num-gpus-per-node": Setting(launch.count_gpus(), "the GPUs of this machine"),
        "colocate": Setting(True, "the engine and the trainer share the GPUs"),
        "save": Setting(str(run.checkpoints), "only the checkpoints of this training"),
        "save-interval": Setting(every, f"{tenth}, and the end"),
        "eval-interval": Setting(every if held.val else None, f"{tenth}, and the start"),
        **{f"use-{name}": Setting(True, "--log") for name in logs},
        "wandb-project": Setting("treetune" if "wandb" in logs else None, "names the project in loggers"),
        "wandb-group": Setting(run.name if "wandb" in logs else None, "tasks, model and a hash of the plan"),
        "n-samples-per-eval-prompt": Setting(1 if held.val else None, "one rollout a task"),
        "load": Setting(str(run.checkpoints) if run.resume else None, "--resume"),
    }
    given = [override.replace("_", "-", override.partition("=")[0].count("_")) for override in request.theirs]
    if request.own:
        mine = [value for key, value in map(launch.split_override, given) if key == SETTINGS]
        given = [override for override in given if not override.startswith(f"{SETTINGS}=")]
        path = write_settings(request.own, mine[-1] if mine else None)
        planned[SETTINGS] = Setting(str(path), "max_turns and turn_discount, as you set them")
    config = launch.merge(planned, given)
    if validation is not None and "eval-prompt-data" not in config:
        config["eval-prompt-data"] = validation
    return Launch(
        trainer="slime",
        package="slime",
        install="install slime from a checkout, as its guide describes, and run `treetune train` next to its train.py",
        data={"prompt-data": request.target, "validation": held.what, "lengths": lengths.what},
        config=config,
        reasons=launch.reasons(planned, config),
        run=run,
        environment=run.environment(logs),
        checkpoints="checkpoints/latest_checkpointed_iteration.txt",
        saved="checkpoints/iter_{before:07d}",
        command=[sys.executable, str(find_script()), *options(config)],
    )


def read_defaults(config: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of slime's own parsers with their defaults, and Megatron's where it can be imported. Elsewhere
    no option is unknown."""
    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.utils import arguments

    parser = ArgumentParser(add_help=False, conflict_handler="resolve")
    known: dict[str, Any] = {key.replace("_", "-"): value for key, value in vars(arguments._pre_parse_mode()).items()}
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError:
        known[""] = None
    else:
        add_megatron_arguments(parser)
    arguments.get_slime_extra_args_provider()(parser)
    add_sglang_arguments(parser)
    options = ((name, action) for action in parser._actions for name in action.option_strings)
    return known | {name[2:]: action.default for name, action in options if name.startswith("--")}


def write_settings(own: Mapping[str, Any], others: str | None) -> Path:
    """Write a file of settings to the cache folder: those of the user's file, and our keys in its `treetune`."""
    settings = load_yaml(others, interpolates=False) if others else {}
    settings["treetune"] = {**(settings.get("treetune") or {}), **own}
    path = cache_folder() / f"{digest(settings)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.yaml.encode(settings))
    return path


def find_script() -> Path:
    """Find slime's train.py: here, or next to its installed package, which is a checkout."""
    if not Path("train.py").exists() and (found := find_spec("slime")) is not None and found.origin is not None:
        return Path(found.origin).parents[1] / "train.py"
    return Path("train.py")


def options(config: dict[str, str]) -> list[str]:
    """Return keys as slime's options: a `true` key becomes an option without a value, a `false` key is left out.
    Datasets for evaluation are a name and a file."""
    words = []
    for key, value in config.items():
        if value != "false":
            values = value.split(" ", 1) if key == "eval-prompt-data" else [] if value == "true" else [value]
            words += [f"--{key}", *values]
    return words
