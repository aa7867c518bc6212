"""From what a user names to a taskset: an id, `config.yaml`, `file.py:Name`, `module:Name`, or a config node.

taskset = load_taskset("arithmetic", {"taskset.level": "2"})
taskset = build_taskset({"id": "reverse-text", "shuffle": {"seed": 0}})
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.config import collect, load_yaml, to_plain, with_overrides
from treetune.errors import ConfigError, PluginError, UsageError
from treetune.plugins import load_file, tasksets
from treetune.taskset import Taskset


def read_target(target: str, overrides: Mapping[str, str] | None = None, split: str = "val") -> dict[str, Any]:
    """The config a target stands for, with the overrides in it: a mapping with a `taskset` node.

    Of a config that declares `train_tasks` and `val_tasks`, `split` picks the list; several entries form a mixture by
    their weights, or a union where none has one.
    """
    if Path(target).suffix in (".yaml", ".yml"):
        data = load_yaml(target)
        if "taskset" not in data:
            data = {"taskset": _declared_node(data, target, split)}
    else:
        data = {"taskset": {"id": target}}
    if isinstance(data["taskset"], str):
        data["taskset"] = {"id": data["taskset"]}
    return with_overrides(data, overrides or {}, source=target)


def _declared_node(data: dict[str, Any], target: str, split: str) -> dict[str, Any]:
    from treetune.datasets.declared import declares_tasks, task_nodes

    if not declares_tasks(data):
        raise ConfigError(
            [("taskset", "is required (such as {id: arithmetic}), or train_tasks and val_tasks")], source=target
        )
    lists = task_nodes(data, {}, target)
    if f"{split}_tasks" not in lists:
        raise ConfigError(
            [(f"{split}_tasks", f"is not in it; pick another list with --split: {', '.join(lists)}")], source=target
        )
    nodes = [node if node.get("custom_cls") else {"id": "dataset", **node} for node in lists[f"{split}_tasks"]]
    if len(nodes) == 1:
        return nodes[0]
    weighted = any(node.get("weight") is not None for node in nodes)
    return {"id": "mixture" if weighted else "union", "sources": nodes}


def load_taskset(target: str, overrides: Mapping[str, str] | None = None, split: str = "val") -> Taskset[Any, Any]:
    data = read_target(target, overrides, split)
    return build_taskset(data["taskset"], path="taskset", raw=overrides or {}, source=target)


def build_taskset(
    node: Any, *, path: str = "taskset", raw: Mapping[str, str] | None = None, source: str = "config"
) -> Taskset[Any, Any]:
    """The taskset of a config node: `id` (or `custom_cls.path` and `custom_cls.name`) and its own keys."""
    faults: list[tuple[str, str]] = []
    taskset = collect_taskset(node, path, raw or {}, faults)
    if taskset is None:
        raise ConfigError(faults, source=source)
    return taskset


def collect_taskset(
    node: Any, path: str, raw: Mapping[str, str], faults: list[tuple[str, str]]
) -> Taskset[Any, Any] | None:
    """Like `build_taskset`, but adds to `faults` and gives None."""
    if isinstance(node, str):
        node = {"id": node}
    if not isinstance(node, Mapping):
        faults.append((path, "expected an id, or keys and values with an id"))
        return None
    keys = dict(node)
    if "custom_cls" in keys:
        cls = custom_class(keys.pop("custom_cls"), f"{path}.custom_cls")
        open_keys = "config_type" not in vars(cls)
        keys.pop("id", None)
    elif "id" in keys:
        cls = tasksets.resolve(str(keys.pop("id")))
        open_keys = False
    else:
        faults.append((f"{path}.id", "is required: a taskset's name, file.py:Name or module:Name"))
        return None
    if not issubclass(cls, Taskset):
        raise PluginError(f"{cls.__name__} is no Taskset", remedy="subclass treetune.Taskset")
    if open_keys:
        own = set(cls.config_type.__struct_fields__)
        further = {key: keys.pop(key) for key in list(keys) if key not in own}
        keys["extra"] = {**(keys.get("extra") or {}), **further}
    before = len(faults)
    config = collect(keys, cls.config_type, path, raw, faults)
    if len(faults) > before:
        return None
    taskset = cls(config)
    if taskset.name == cls.__name__ and ":" not in str(node.get("id", ":")):
        taskset.name = str(node["id"])
    return taskset


def describe(taskset: Taskset[Any, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The node that builds this taskset again, with every key spelled out and file paths made absolute."""
    resolved = dict(node)
    if "custom_cls" in resolved:
        custom = dict(resolved["custom_cls"])
        resolved["custom_cls"] = {**custom, "path": _absolute(custom["path"])}
        head = {"custom_cls": resolved["custom_cls"]}
    else:
        place, _, name = str(resolved["id"]).rpartition(":")
        head = {"id": f"{_absolute(place)}:{name}" if place.endswith(".py") else resolved["id"]}
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    return {**head, **config, **further} if "custom_cls" in head else {**head, **config}


def custom_class(node: Any, path: str) -> type:
    if not isinstance(node, Mapping) or not node.get("path"):
        raise ConfigError([(f"{path}.path", "is required: the Python file of the class")])
    unknown = set(node) - {"path", "name"}
    if unknown:
        raise ConfigError([(f"{path}.{key}", "unknown key; known: path, name") for key in sorted(unknown)])
    name = node.get("name") or "Task"
    module = load_file(node["path"])
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        raise UsageError(f"{node['path']} has no class {name!r}", remedy=f"set {path}.name")
    return cls


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
