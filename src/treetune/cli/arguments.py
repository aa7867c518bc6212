"""Dotted overrides: `--taskset.level 3`, `--sampling.temperature=0.7`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

from treetune.errors import UsageError, did_you_mean

TASKS = ("taskset", "train_tasks", "val_tasks")
"""The groups in which a TARGET's own keys lie: `--taskset.level 3`, `--val_tasks[0].max_rows 10`."""


def set_apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without the dotted ones, and those as `--a.b=VALUE`. They may stand anywhere: typer does not know
    them, and would take one that stands before the target for the target."""
    plain: list[str] = []
    dotted: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return [*plain, argument, *waiting], dotted
        if not argument.startswith("--") or "." not in argument.partition("=")[0]:
            plain.append(argument)
        elif "=" in argument or not waiting or waiting[0].startswith("--"):
            dotted.append(argument)
        else:
            dotted.append(f"{argument}={waiting.pop(0)}")
    return plain, dotted


def read_overrides(context: typer.Context, prefixes: Sequence[str]) -> dict[str, str]:
    """What was set apart, as `{"taskset.level": "3"}`; `prefixes` are the groups that may be overridden. Anything else
    that typer left over is refused."""
    overrides: dict[str, str] = {}
    for argument in [*context.args, *(context.obj or [])]:
        key, equals, value = argument.removeprefix("--").partition("=")
        head = re.split(r"[.\[]", key)[0]
        if not argument.startswith("--") or "." not in key or head not in prefixes:
            options = [option for parameter in context.command.params for option in parameter.opts]
            dotted = [f"--{prefix}.{key.partition('.')[2] or 'KEY'}" for prefix in prefixes]
            hint = did_you_mean(argument.partition("=")[0], [*options, *dotted])
            remedy = f"see `{context.command_path} --help`; dotted overrides begin with "
            raise UsageError(
                f"unknown argument {argument!r}{hint}", remedy=remedy + ", ".join(f"--{prefix}." for prefix in prefixes)
            )
        if not equals:
            raise UsageError(f"{argument} needs a value", remedy=f"write {argument} VALUE")
        overrides[key] = value
    return overrides


TARGET = (
    "An id, config.yaml, file.py:Name, module:Name, rows (a file, folder or hub name), or a server (tcp://, http://)."
)
TASKS_TARGET = "An id, config.yaml, file.py:Name, module:Name, or rows: a file, a folder or a hub name."
"""Of verbs that need the tasks themselves, which a server keeps."""

TRUST = "Run code that rows name, though no build of yours has kept it."


def trusted(trust: bool) -> dict[str, str]:
    """What `--trust` overrides."""
    return {"taskset.trust": "true"} if trust else {}
