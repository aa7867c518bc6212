"""Configs that declare `train_tasks` and `val_tasks`, read from YAML: a plain file, or a trainer's own recipe.

Only the two lists are resolved and checked. What else a recipe holds (hydra's `defaults`, a trainer's keys and
interpolations) is the trainer's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from treetune.config import _struct_in, load_yaml, with_overrides
from treetune.datasets.config import DatasetConfig
from treetune.datasets.resolve import LISTS, load_tasks, task_class
from treetune.datasets.taskset import DatasetTaskset
from treetune.errors import ConfigError
from treetune.target import located, names_class


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
    for name, nodes in located_nodes(data, overrides, path).items():
        entries = [{**node, **(further or {})} if isinstance(node, dict) else node for node in nodes]
        lists[name.removesuffix("_tasks")] = load_tasks(entries, cache_dir, path=name, faults=faults)
    if faults:
        raise ConfigError(faults, source=path)
    return Declared(data, lists)


def located_nodes(data: Mapping[str, Any], overrides: Mapping[str, str], path: str) -> dict[str, list[Any]]:
    """The entries of each list of the file `path`, overridden. Files that it names are looked for beside it first;
    those of an override only from where we are."""
    folders = [Path(path).expanduser().resolve().parent]
    return {
        name: [
            _with_text(node, written, located(node, folders), _raw_of(overrides, name, number))
            if isinstance(node, dict)
            else node
            for number, (node, written) in enumerate(zip(nodes, _written(data[name], len(nodes)), strict=True))
        ]
        for name, nodes in task_nodes(data, overrides, path).items()
    }


def declared_node(
    data: dict[str, Any], target: str, split: str | None, usual: str, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """The taskset node of the list that `split` names, or of the `usual` one."""
    if not declares_tasks(data):
        raise ConfigError(
            [("taskset", "is required (such as {id: arithmetic}), or train_tasks and val_tasks")], source=target
        )
    lists = located_nodes(data, overrides, target)
    names = [name.removesuffix("_tasks") for name in lists]
    if split is None:
        split = usual if usual in names else names[0]
    if split not in names:
        raise ConfigError([("--split", f"there is no list {split!r}; use {' or '.join(names)}")], source=target)
    if unused := [key for key in overrides if not key.startswith(f"{split}_tasks")]:
        faults = [(key, f"sets a key of the other list, and {split}_tasks is used; see --split") for key in unused]
        raise ConfigError(faults, source="the overrides")
    entries = lists[f"{split}_tasks"]
    faults = [
        (f"{split}_tasks[{number}]", f"expected keys and values, got {node!r}")
        for number, node in enumerate(entries)
        if not isinstance(node, Mapping)
    ]
    if faults:
        raise ConfigError(faults, source=target)
    nodes = [node if names_class(node) else {"id": "dataset", **_without_class(node)} for node in entries]
    if len(nodes) == 1:
        return nodes[0]
    weighted = any(node.get("weight") is not None for node in nodes)
    return {"id": "mixture" if weighted else "union", "sources": nodes}


def _without_class(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "custom_cls"}


def _raw_of(overrides: Mapping[str, str], name: str, number: int) -> dict[tuple[str, ...], str]:
    """The overrides of one entry, as they were typed, by the keys that lead to them."""
    entry = re.compile(rf"{name}(?:\[{number}\]|\.{number})\.([^\[\]]+)")
    matches = [(entry.fullmatch(key), raw) for key, raw in overrides.items()]
    return {tuple(match[1].split(".")): raw for match, raw in matches if match is not None}


def _written(entries: Any, count: int) -> list[Any]:
    """The entries as the file has them; nothing where it has another number of them, by interpolation."""
    return entries if isinstance(entries, list) and len(entries) == count else [None] * count


def _with_text(
    node: dict[str, Any], written: Any, found: dict[str, Any], raw: Mapping[tuple[str, ...], str]
) -> dict[str, Any]:
    """`found` with each override as it was given: its files not looked for, and text where its key is text, though it
    might be read as YAML (`Q: {question}`). A key of a class's own is text where the file has text."""
    for keys in raw:
        found = _replaced(found, keys, _at(node, keys))
    if not raw:
        return found
    try:
        config_type: type[msgspec.Struct] = task_class(found).config_type
    except ConfigError:  # told when the entry is loaded
        config_type = DatasetConfig
    for keys, text in raw.items():
        own = keys[0] not in config_type.__struct_fields__ and isinstance(_at(written, keys), str)
        if _wants_text(config_type, keys, _at(node, keys)) or (own and isinstance(_at(node, keys), Mapping)):
            found = _replaced(found, keys, text)
    return found


def _at(node: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _replaced(node: Any, keys: Sequence[str], value: Any) -> Any:
    if not keys:
        return value
    if not isinstance(node, Mapping):
        return node
    return {**node, keys[0]: _replaced(node.get(keys[0]), keys[1:], value)}


def _wants_text(struct: type, keys: Sequence[str], value: Any) -> bool:
    """Whether the field that `keys` lead to takes text, and not `value`."""
    hint = get_type_hints(struct, include_extras=True).get(keys[0])
    if keys[0] == "custom_cls":
        hint = str if len(keys) == 2 else None
    elif len(keys) > 1:
        nested = _struct_in(hint)
        return nested is not None and _wants_text(nested, keys[1:], value)
    elif isinstance(value, Mapping) and _struct_in(hint) is not None:
        return False  # keys and values are meant, and what is wrong in them is told by its key
    return hint is not None and not _fits(value, hint) and _fits("text", hint)


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True
