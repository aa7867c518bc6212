"""Dotted overrides: `--taskset.level 3`, `--sampling.temperature=0.7`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

from treetune.errors import UsageError, did_you_mean


def read_overrides(context: typer.Context, prefixes: Sequence[str]) -> dict[str, str]:
    """What typer left over, as `{"taskset.level": "3"}`. `prefixes` are the groups that may be overridden."""
    overrides: dict[str, str] = {}
    waiting = list(context.args)
    while waiting:
        argument = waiting.pop(0)
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
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"{argument} needs a value", remedy=f"write {argument} VALUE")
            value = waiting.pop(0)
        overrides[key] = value
    return overrides
