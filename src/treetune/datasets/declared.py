"""Configs that declare `train_tasks` and `val_tasks`, read from YAML: a plain file, or a trainer's own recipe.

Only the two lists are resolved and checked. What else a recipe holds (hydra's `defaults`, a trainer's keys and
interpolations) is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from treetune.config import load_yaml, with_overrides
from treetune.datasets.resolve import LISTS, load_tasks
from treetune.datasets.taskset import DatasetTaskset
from treetune.errors import ConfigError


class Declared(msgspec.Struct):
    config: dict[str, Any]
    """The whole file, as it is written."""
    lists: dict[str, list[DatasetTaskset]]
    """The tasksets of `train` and `val`."""


def declares_tasks(data: Mapping[str, Any]) -> bool:
    return any(data.get(name) for name in LISTS)


def task_nodes(data: Mapping[str, Any], overrides: Mapping[str, str], source: str) -> dict[str, list[dict[str, Any]]]:
    """The entries of each list, overridden and resolved."""
    own = {name: data[name] for name in LISTS if data.get(name)}
    if not own:
        raise ConfigError([("train_tasks", "is required, or val_tasks: the tasks to build")], source=source)
    # Interpolations may reach into the rest of the file, so it is laid below; only the lists are resolved.
    resolved = with_overrides(data, overrides, source=source, only=list(own))
    faults = [(name, "expected a list of tasks") for name in own if not isinstance(resolved[name], list)]
    if faults:
        raise ConfigError(faults, source=source)
    return {name: resolved[name] for name in own}


def read_declared(
    path: str,
    overrides: Mapping[str, str],
    *,
    cache_dir: str | Path | None = None,
    further: Mapping[str, Any] | None = None,
) -> Declared:
    """The tasks that a YAML file declares; every fault of all of them is reported at once."""
    data = load_yaml(path)
    faults: list[tuple[str, str]] = []
    lists: dict[str, list[DatasetTaskset]] = {}
    for name, nodes in task_nodes(data, overrides, path).items():
        entries = [{**node, **(further or {})} if isinstance(node, dict) else node for node in nodes]
        lists[name.removesuffix("_tasks")] = load_tasks(entries, cache_dir, path=name, faults=faults)
    if faults:
        raise ConfigError(faults, source=path)
    return Declared(data, lists)
