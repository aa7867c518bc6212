"""Dotted overrides: `--taskset.level 3`, `--sampling.temperature=0.7`."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.errors import UsageError, did_you_mean


def read_overrides(arguments: Sequence[str], prefixes: Sequence[str]) -> dict[str, str]:
    """What typer left over, as `{"taskset.level": "3"}`. `prefixes` are the groups that may be overridden."""
    overrides: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        head = key.partition(".")[0]
        if not argument.startswith("--") or "." not in key or head not in prefixes:
            known = [f"--{prefix}.KEY" for prefix in prefixes]
            hint = did_you_mean(head, prefixes) if "." in key else ""
            raise UsageError(f"unknown argument {argument!r}{hint}", remedy=f"dotted overrides are {', '.join(known)}")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"{argument} needs a value", remedy=f"write {argument} VALUE")
            value = waiting.pop(0)
        overrides[key] = value
    return overrides
