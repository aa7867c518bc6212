"""`treetune train`: writes a trainer's config and data from any tasks, and starts the trainer's own entry point."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from treetune.cli import options
from treetune.cli.build import build_target
from treetune.cli.options import TASKS, Json, TasksTarget, option
from treetune.cli.output import print_json
from treetune.config.structs import to_plain
from treetune.errors import MissingExtraError, UsageError
from treetune.system.screen import Screen
from treetune.tasksets.target import refuse_server
from treetune.trainers.launch import DEFAULT_MODEL, TRAINERS, BuiltFile, Files, Launch, TrainRequest, as_text, plan
from treetune.trainers.result import count_written, read_result


def train_command(
    context: typer.Context,
    trainer: Annotated[str, typer.Argument(help=f"{', '.join(TRAINERS)}.")],
    target: TasksTarget,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="The trainer's own keys, passed on as they are."),
    ] = None,
    model: Annotated[
        str, option("The model to train: a folder, or a name on the hub.", "-m", "--model")
    ] = DEFAULT_MODEL,
    steps: Annotated[int | None, option("The number of steps; by default, the trainer decides.", min=1)] = None,
    num_tasks: options.NumTasks = None,
    val: Annotated[
        int, option("How many tasks to hold out for validation, if the TARGET has no val_tasks.", min=0)
    ] = 64,
    resume: Annotated[
        bool, option("Continue this training from its newest checkpoint; only --steps may differ.")
    ] = False,
    log: options.Log = None,
    output: Annotated[
        Path | None, option("The run folder. Default: runs/train-TARGET-MODEL-HASH.", "-o", "--output")
    ] = None,
    dry_run: Annotated[bool, option("Show the data, the config and the command; start nothing.", "--dry-run")] = False,
    cache_dir: options.CacheDir = None,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Train on any tasks: write the trainer's data and config, and start its own entry point in this Python.

    Keys of the trainer follow the TARGET in the trainer's own form (verl: trainer.save_freq=10; TRL:
    learning_rate=1e-5) and override the plan; the trainer rejects unknown keys. Keys of the TARGET: --taskset.level 2.
    """
    screen = Screen(json)
    for key, value in context.obj.items():
        if re.split(r"[.\[]", key)[0] not in TASKS:
            raise UsageError(
                f"--{key} is not a key of a TARGET", remedy=f"a trainer's own keys have no dashes: {key}={value}"
            )

    def build(format: str) -> Files:
        refuse_server(target, f"train {trainer}")
        files: dict[str, list[BuiltFile]] = {}
        entries = build_target(context, target, format, screen, num_tasks=num_tasks, cache_dir=cache_dir, trust=trust)
        for entry in entries:
            shares = _count_by_name(entry.get("shares", ()))
            files.setdefault(entry["split"], []).append(BuiltFile(entry["path"], entry["rows"], shares))
        return files

    request = TrainRequest(
        target=target,
        build=build,
        model=model,
        steps=steps,
        num_tasks=num_tasks,
        taskset=dict(context.obj),
        overrides=overrides or [],
        val=val,
        log=log or (),
        output=output,
        resume=resume,
        trust=trust,
        cache_dir=cache_dir,
    )
    launch = plan(trainer, request)
    launch.run.check(launch.checkpoints)
    plain = plain_plan(launch)
    if dry_run:
        defaults = launch.read_defaults() if launch.installed is not None else {}
        if defaults:
            launch.refuse_unknown(defaults)
        old = {key: defaults[key] for key in launch.config if key in defaults}
        print_json({**plain, "defaults": old}) if json else show(screen, launch, defaults)
        return 0
    if launch.installed is None:
        raise MissingExtraError(
            f"{launch.package} is not installed in this Python",
            remedy=f"{launch.install}; --dry-run shows what would be started",
        )
    if not json:
        show(screen, launch, {})
    launch.run.begin()
    before = count_written(launch.run)
    code = start(launch)
    result = read_result(launch, before)
    for line in result.lines():
        screen.say(line)
    if code == 0 and result.problem is not None:
        code = 1
        Screen(True).say(f"error: nothing was learned: {result.problem}", style="red")
    screen.say(f"the rollouts: treetune view {launch.run.folder}")
    if json:
        print_json({**plain, "result": to_plain(result), "code": code})
    return code


def _count_by_name(shares: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for share in shares:
        counts[share["name"]] += share["draws"]
    return dict(counts)


def start(launch: Launch) -> int:
    """Runs the trainer to its end; returns its exit code. The trainer's output is not changed."""
    environment = {**os.environ, **launch.environment}
    # The trainer's processes must also find tasks that are declared in files of the current folder.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    process: subprocess.Popen[bytes] | None = None
    ended = False

    def end(*_: Any) -> None:
        """The signal is meant for the trainer, and may arrive before that has started."""
        nonlocal ended
        ended = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, end)
    try:
        process = subprocess.Popen(launch.command, env=environment)
        if ended:
            process.terminate()
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:  # the trainer also gets the signal, and exits in its own way
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def plain_plan(launch: Launch) -> dict[str, Any]:
    return {
        "trainer": launch.trainer,
        "run": str(launch.run.folder),
        "installed": launch.installed,
        "data": launch.data,
        "config": launch.config,
        "environment": launch.environment,
        "command": launch.command,
    }


def show(screen: Screen, launch: Launch, defaults: Mapping[str, Any]) -> None:
    """Show the plan. Only the config values that differ from the trainer's defaults, if the defaults are known."""
    screen.say(f"{launch.trainer}: {launch.installed or f'not installed here: {launch.install}'}")
    screen.say(f"run: {launch.run.folder}")
    screen.say("data:")
    for key, value in launch.data.items():
        screen.say(f"  {key}: {value}")
    screen.say(f"config, as changes of {launch.trainer}'s defaults:" if defaults else "config:")
    for key, value in launch.config.items():
        old = as_text(defaults[key]) if key in defaults else None
        why = launch.reasons.get(key)
        if old != value:
            screen.say(f"  {key}: " + (f"{old} -> " if old is not None else "") + value + (f"  # {why}" if why else ""))
    screen.say(f"$ {shlex.join([*(f'{k}={v}' for k, v in launch.environment.items()), *launch.command])}")
