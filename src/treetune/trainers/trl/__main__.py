"""Runs a training with TRL from the command line, as `treetune train trl` does.

    python -m treetune.trainers.trl TARGET [--taskset.KEY=VALUE] model=MODEL [KEY=VALUE]...

Keys are those of `GRPOConfig`, plus ours: `num_tasks`, `val` (how many tasks to hold out for validation), `max_turns`,
`turn_discount`, `agent`, and `trainer=async` for AsyncGRPO with the vLLM server that `vllm_server_base_url` names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from treetune.core.mixture import Selection
from treetune.core.trace import Trace
from treetune.errors import UsageError, did_you_mean, plural
from treetune.tasksets.target import is_server
from treetune.trainers.held_out import hold_out
from treetune.trainers.launch import TrainRequest, load_tasks, run_command, split_override
from treetune.trainers.rollout_log import RolloutLog
from treetune.trainers.train_run import ROLLOUTS, VALIDATION
from treetune.trainers.trl.launch import NEWEST, OURS, find_trainer
from treetune.trainers.trl.tasks import TrlTasks


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(run, arguments)


def run(arguments: Sequence[str]) -> Any:
    """Train to the end; return the trainer."""
    target, of_target, given = read_arguments(arguments)
    model = given.pop("model", None)
    if model is None:
        raise UsageError("model=MODEL is missing", remedy="a folder, or a name on the hub")
    ours = {key: given.pop(key) for key in OURS if key in given}
    config_class, trainer_class = find_trainer(ours.get("trainer", "grpo"))
    args = read_config(config_class, given)
    # HF's trainers take the checkpoint as an argument of `train`, and leave the key to their caller.
    checkpoint = find_checkpoint(args)
    count = int(ours["num_tasks"]) if "num_tasks" in ours else None
    size = int(ours.get("val", "0"))
    words = [f"{key}={value}" for key, value in ours.items()]
    request = TrainRequest(
        target=target, build=lambda _: {}, num_tasks=count, taskset=of_target, val=size, overrides=words
    )
    tasks, count, validation = select_tasks(request)
    with TrlTasks(tasks, **request.own) as bridge:
        bridge.on_played = write_rollouts(count if validation else None)
        if ours.get("trainer") == "async":
            options = bridge.async_trainer_arguments(model, args, count)
        else:
            options = bridge.trainer_arguments(count)
            if count is not None and validation:
                options["eval_dataset"] = bridge.dataset(validation, first=count)
        trainer = trainer_class(model=model, args=args, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(args.output_dir)
    return trainer


def select_tasks(request: TrainRequest) -> tuple[Any, int | None, int]:
    """Return the tasks, how many of the first ones to train on, and how many of the following ones to validate with."""
    if is_server(request.target):
        return request.target, request.num_tasks, 0
    train, declared = load_tasks(request)
    assert train is not None
    held = hold_out(train, request.val, request.num_tasks, declared)
    if held.train is None or not held.val:
        return train, request.num_tasks, 0
    return Selection([(train, held.train), (declared or train, held.val)]), len(held.train), len(held.val)


def find_checkpoint(args: Any) -> str | None:
    """Return the checkpoint to continue from. `true` is the newest complete checkpoint: a kill may leave an incomplete
    one, which HF's own search would take, and HF would take a step more than `max_steps` after the last."""
    named: str = args.resume_from_checkpoint or "false"
    if named.lower() != "true":
        return None if named.lower() == "false" else named
    found = [(int(file.parent.name.rpartition("-")[2]), file) for file in Path(args.output_dir).glob(NEWEST)]
    if not found:
        raise UsageError(f"{args.output_dir} has no checkpoint", remedy="leave out resume_from_checkpoint")
    taken, file = max(found)
    steps = args.max_steps if args.max_steps > 0 else json.loads(file.read_text())["max_steps"]
    if taken >= steps:
        raise UsageError(f"the training has taken its {plural(steps, 'step')}", remedy="pass a larger --steps")
    return str(file.parent)


def write_rollouts(count: int | None) -> Callable[[int, list[tuple[int, Trace]]], None] | None:
    """Return a function that writes rollouts to the run folder; rollouts of tasks from `count` on belong to
    validations."""
    training, validation = RolloutLog.named(ROLLOUTS), RolloutLog.named(VALIDATION)
    if training is None or validation is None:
        return None

    def write(step: int, played: list[tuple[int, Trace]]) -> None:
        trained = [trace for index, trace in played if count is None or index < count]
        if trained:
            training.add(step + 1, trained)
        if validated := [trace for index, trace in played if count is not None and index >= count]:
            validation.add(step, validated)

    return write


def read_arguments(arguments: Sequence[str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """Split the arguments into the target, overrides of its keys, and TRL's keys."""
    dashed = [word for word in arguments if word.startswith("--")]
    plain = [word for word in arguments if not word.startswith("--")]
    if not plain or "=" in plain[0]:
        raise UsageError("TARGET is missing", remedy="python -m treetune.trainers.trl TARGET model=MODEL")
    of_target = dict(split_override(word.removeprefix("--")) for word in dashed)
    return plain[0], of_target, dict(map(split_override, plain[1:]))


def read_config(config_class: Any, given: Mapping[str, str]) -> Any:
    """Build the config as TRL's own command line does. Without a GPU, it trains on the CPU, in CPU precision."""
    import torch
    from transformers import HfArgumentParser

    known = {field.name for field in fields(config_class)}
    for key in given:
        if key not in known:
            near = did_you_mean(key, known)
            raise UsageError(f"{config_class.__name__} has no {key}{near}", remedy="its own docs list its keys")
    if not torch.cuda.is_available():
        given = {"use_cpu": "true", "bf16": "false", **given}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    try:
        (args,) = HfArgumentParser(config_class, exit_on_error=False).parse_args_into_dataclasses(
            words, look_for_args_file=False
        )
    except Exception as error:  # from argparse, or from the config's own checks
        raise UsageError(f"{config_class.__name__}: {error}") from error
    return args


if __name__ == "__main__":
    main()
