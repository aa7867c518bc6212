"""Turns a TARGET into a taskset: an id, a ready-made set, `config.yaml`, `file.py:Name`, `module:Name`, rows, a server.

taskset = load_taskset("arithmetic", {"taskset.level": "2"})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from treetune.config import plugins
from treetune.config.interpolation import deep_merge, override_values, select_overridden, with_overrides
from treetune.config.structs import load_yaml
from treetune.config.trust import is_run_config, names_from, origin_of, refuse_foreign
from treetune.core.from_config import UNTRUSTED, build_taskset, find_files
from treetune.core.taskset import Taskset
from treetune.errors import (
    ConfigError,
    UsageError,
)

NEEDS_TASKS = "needs the tasks themselves"
"""Part of the error of a verb that needs the tasks of a server."""

_LIST = re.compile(r"(train|val)_tasks\b")


def read_target(
    target: str, overrides: Mapping[str, str] | None = None, split: str | None = None, usual: str = "val"
) -> dict[str, Any]:
    """Return the config for a target, with the overrides applied: a mapping with a `taskset` node.

    If a config declares `train_tasks` and `val_tasks`, `split` picks the list; without it, the `usual` list or the only
    one. Files named in a YAML file are looked up next to it first. The config of a run folder is treated as data,
    unless an `eval` of this user wrote it or the overrides set `taskset.trust`.
    """
    target = locate(target)
    overrides = dict(overrides or {})
    if not is_run_config(target):
        return _read_target(target, overrides, split, usual)
    written = load_yaml(target)
    origin = origin_of(target, written, overrides.get("taskset.trust") == "true")
    if not origin.trusted:
        refuse_foreign(Path(target).parent, written)
    if not _is_of_rows(written.get("taskset")):  # only rows have the key
        overrides.pop("taskset.trust", None)
    with names_from(origin):
        data = _read_target(target, overrides, split, usual)
    return data if origin.trusted else {**data, "taskset": {**data["taskset"], UNTRUSTED: origin.what}}


def _is_of_rows(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("id") == "rows"


def _read_target(target: str, overrides: Mapping[str, str], split: str | None, usual: str) -> dict[str, Any]:
    of_lists = {key: raw for key, raw in overrides.items() if _LIST.match(key)}
    rest = {key: raw for key, raw in overrides.items() if key not in of_lists}
    if Path(target).suffix in (".yaml", ".yml"):
        data = load_yaml(target)
        if "taskset" not in data:
            node = plugins.load_builtin("DECLARED_NODE")(data, target, split, usual, of_lists)
            return override_values({"taskset": node}, rest)
        if not of_lists:
            return _read_config(data, target, rest)
    elif is_server(target):
        data = {"taskset": plugins.load_builtin("SERVER_NODE")(target)}
    else:
        names_rows = plugins.load_builtin("NAMES_ROWS")
        data = {"taskset": {"id": "rows", "files": [target]} if names_rows(target) else {"id": target}}
    if of_lists:
        faults = [(key, "only a config with train_tasks or val_tasks has it; write --taskset.KEY") for key in of_lists]
        raise ConfigError(faults, source="the overrides")
    return override_values(data, rest)


def _read_config(data: dict[str, Any], target: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Read a YAML file with a `taskset` node. File names in it are looked up next to it first, those in an override are
    not."""
    if overrides:
        data["taskset"] = _spell_out(data["taskset"])
    resolved = with_overrides(data, overrides, source=target)
    found = find_files(resolved["taskset"], [Path(target).expanduser().resolve().parent])
    return cast(dict[str, Any], deep_merge({**resolved, "taskset": found}, select_overridden(resolved, overrides)))


def _spell_out(node: Any) -> Any:
    """Return a node, and its sources, as mappings, so that their keys can be overridden."""
    if isinstance(node, str) and "${" not in node:
        return {"id": node}
    if isinstance(node, Mapping) and isinstance(node.get("sources"), list):
        return {**node, "sources": [_spell_out(source) for source in node["sources"]]}
    return node


def locate(target: str) -> str:
    """Return the file of a ready-made set; any other target unchanged."""
    return str(plugins.find_ready(target) or target)


def is_server(target: str) -> bool:
    """Whether it is the address of a Treetune server. Addresses of other projects' servers have a prefix."""
    return "://" in target and target.partition(":")[0] not in plugins.tasksets.foreign


def refuse_server(target: str, verb: str) -> None:
    """Raise if a verb that needs the tasks themselves gets the address of a server."""
    if is_server(target):
        raise UsageError(
            f"{target} is a running server, and `{verb}` {NEEDS_TASKS}",
            remedy="name the taskset or the rows that it serves; show, eval, top and probe take a server",
        )


def load_taskset(
    target: str, overrides: Mapping[str, str] | None = None, split: str | None = None
) -> Taskset[Any, Any]:
    data = read_target(target, overrides, split)
    return build_taskset(data["taskset"], path="taskset", raw=overrides or {}, source=target)
