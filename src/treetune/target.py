"""From what a user names to a taskset: an id, `config.yaml`, `file.py:Name`, `module:Name`, rows, a server.

taskset = load_taskset("arithmetic", {"taskset.level": "2"})
taskset = build_taskset({"id": "reverse-text", "shuffle": {"seed": 0}})
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treetune.config import collect_config, load_yaml, to_plain, with_overrides
from treetune.errors import ConfigError, PluginError, TasksetError, UsageError, user_code
from treetune.plugins import absolute_path, absolute_spec, builtin, load_file, load_module, load_object, tasksets
from treetune.taskset import Taskset

NEEDS_TASKS = "needs the tasks themselves"
"""What a verb says of a server whose tasks it would need."""

_LIST = re.compile(r"(train|val)_tasks\b")


def read_target(
    target: str, overrides: Mapping[str, str] | None = None, split: str | None = None, usual: str = "val"
) -> dict[str, Any]:
    """The config a target stands for, with the overrides in it: a mapping with a `taskset` node.

    Of a config that declares `train_tasks` and `val_tasks`, `split` picks the list; without it the `usual` one is
    taken, or the only one. Several entries form a mixture by their weights, or a union where none has one. Files that
    a YAML file names are looked for beside it first.
    """
    overrides = overrides or {}
    of_lists = {key: raw for key, raw in overrides.items() if _LIST.match(key)}
    rest = {key: raw for key, raw in overrides.items() if key not in of_lists}
    data: dict[str, Any] = {"taskset": _node_of(target)}
    if Path(target).suffix in (".yaml", ".yml"):
        data = load_yaml(target)
        if "taskset" not in data:
            node = load_object(builtin("DECLARED_NODE"))(data, target, split, usual, of_lists)
            return with_overrides({"taskset": node}, rest, source=target)
        data["taskset"] = located(data["taskset"], [Path(target).expanduser().resolve().parent])
    if of_lists:
        faults = [(key, "only a config with train_tasks or val_tasks has it; write --taskset.KEY") for key in of_lists]
        raise ConfigError(faults, source="the overrides")
    return with_overrides(data, rest, source=target)


def is_server(target: str) -> bool:
    return "://" in target


def refuse_server(target: str, verb: str) -> None:
    """Raises where a verb that needs the tasks themselves is given the address of a server."""
    if is_server(target):
        raise UsageError(
            f"{target} is a running server, and `{verb}` {NEEDS_TASKS}",
            remedy="name the taskset or the rows that it serves; show, eval, top and probe take a server",
        )


def _node_of(target: str) -> dict[str, Any]:
    """The node of a target that is no YAML file."""
    servers = builtin("SERVERS")
    if is_server(target):
        scheme = target.partition("://")[0]
        if scheme not in servers:
            known = ", ".join(f"{name}://" for name in servers)
            raise UsageError(f"{target!r} is the address of no server", remedy=f"it begins with {known}")
        return {"id": servers[scheme], "address": target}
    return {"id": "rows", "files": [target]} if load_object(builtin("NAMES_ROWS"))(target) else {"id": target}


def load_taskset(
    target: str, overrides: Mapping[str, str] | None = None, split: str | None = None
) -> Taskset[Any, Any]:
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
    node: Any,
    path: str,
    raw: Mapping[str, str],
    faults: list[tuple[str, str]],
    *,
    cls: type[Taskset[Any, Any]] | None = None,
    **options: Any,
) -> Taskset[Any, Any] | None:
    """Like `build_taskset`, but adds to `faults` and gives None. `cls` is the class where it is known already; the
    `options` are its own."""
    if isinstance(node, str):
        node = {"id": node}
    if not isinstance(node, Mapping):
        faults.append((path, "expected an id, or keys and values with an id"))
        return None
    before = len(faults)
    faults += missing_values(node, path)
    any_key = cls is not None or "custom_cls" in node
    cls = cls or _taskset_class(node, path, faults)
    if cls is None:
        return None
    config = collect_config(cls, node, path, raw, faults, any_key=any_key)
    if len(faults) > before:
        return None
    with user_code(f"making {cls.__name__}"):
        taskset = cls.from_config(config, **options)
    if not hasattr(taskset, "config"):
        raise TasksetError(
            f"{cls.__name__} was made without its config",
            remedy="call super().__init__ in its __init__, with what it was given",
        )
    if taskset.name == cls.__name__ and ":" not in str(node.get("id", ":")):
        taskset.name = str(node["id"])
    return taskset


def taskset_class(node: Mapping[str, Any], path: str = "taskset") -> type[Taskset[Any, Any]] | None:
    """The class that a node names; None where it names none that can be used."""
    return _taskset_class(node, path, [])


def _taskset_class(node: Mapping[str, Any], path: str, faults: list[tuple[str, str]]) -> type[Taskset[Any, Any]] | None:
    if names_class(node):
        cls = custom_class(node["custom_cls"], f"{path}.custom_cls")
    elif "id" in node:
        cls = tasksets.resolve(str(node["id"]))
    else:
        faults.append((f"{path}.id", "is required: a taskset's name, file.py:Name or module:Name"))
        return None
    if not issubclass(cls, Taskset):
        raise PluginError(f"{cls.__name__} is no Taskset", remedy="subclass treetune.Taskset")
    return cls


def describe(taskset: Taskset[Any, Any], node: Any) -> dict[str, Any]:
    """The node that builds this taskset again, with every key spelled out and file paths made absolute."""
    node = {"id": node} if isinstance(node, str) else node
    if "custom_cls" in node:
        path = str(node["custom_cls"]["path"]).removeprefix("file://")
        custom = {**node["custom_cls"], "path": path if "://" in path else str(Path(path).expanduser().resolve())}
        head: dict[str, Any] = {"custom_cls": custom}
    else:
        head = {"id": absolute_spec(str(node["id"]), [Path.cwd()])}
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    if "sources" in config:
        built = zip(getattr(taskset, "sources", []), config["sources"], strict=False)
        config["sources"] = [_with_weight(describe(source, node), node) for source, node in built]
    return {**head, **config, **further}


def _with_weight(described: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    return {**described, "weight": node["weight"]} if "weight" in node else described


def located(node: Any, folders: Iterable[Path]) -> Any:
    """A node whose files are looked for in `folders`; a mixture's sources too. Data files are left as they are."""
    if isinstance(node, str):
        return {"id": absolute_spec(node, folders)}
    if not isinstance(node, Mapping):
        return node
    found = dict(node)
    for key in ("id", "filter", "opponent"):
        if isinstance(node.get(key), str):
            found[key] = absolute_spec(node[key], folders)
    for key in ("pass_rates", "graph", "folder"):
        if isinstance(node.get(key), str):
            found[key] = absolute_path(node[key], folders)
    if isinstance(node.get("files"), list):
        found["files"] = [absolute_path(file, folders) if isinstance(file, str) else file for file in node["files"]]
    custom = node.get("custom_cls")
    if isinstance(custom, Mapping) and isinstance(custom.get("path"), str):
        found["custom_cls"] = {**custom, "path": absolute_path(custom["path"].removeprefix("file://"), folders)}
    if isinstance(node.get("sources"), list):
        found["sources"] = [located(source, folders) for source in node["sources"]]
    return found


def missing_values(node: Any, path: str) -> list[tuple[str, str]]:
    """A fault for every `???` in a node: OmegaConf's mark of what must still be given."""
    if isinstance(node, Mapping):
        return [fault for key in node for fault in missing_values(node[key], f"{path}.{key}" if path else str(key))]
    if isinstance(node, list):
        return [fault for number, item in enumerate(node) for fault in missing_values(item, f"{path}[{number}]")]
    return [(path, "has no value yet: ??? stands for one that must be given")] if node == "???" else []


def names_class(node: Mapping[str, Any]) -> bool:
    """Whether `custom_cls` names a class beside the base; trainers' configs spell out `{path: null, name: Task}`."""
    custom = node.get("custom_cls")
    if not isinstance(custom, Mapping):
        return custom is not None
    return any(value for key, value in custom.items() if (key, value) != ("name", "Task"))


def custom_class(node: Any, path: str) -> type:
    if not isinstance(node, Mapping):
        raise ConfigError([(path, f"expected keys and values ({path}.path and {path}.name), got {node!r}")])
    if not node.get("path"):
        raise ConfigError([(f"{path}.path", "is required: the Python file of the class")])
    faults = [(f"{path}.{key}", "unknown key; known: path, name") for key in node if key not in ("path", "name")]
    name = node.get("name") or "Task"
    for key, value in (("path", node["path"]), ("name", name)):
        if not isinstance(value, str):
            faults.append((f"{path}.{key}", f"expected text, got {value!r}"))
    if faults:
        raise ConfigError(faults)
    module = _module_at(node["path"])
    cls = getattr(module, name, None)
    own = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Taskset) and value.__module__ == module.__name__
    ]
    remedy = f"set {path}.name to one of: {', '.join(own)}" if own else f"set {path}.name"
    if not isinstance(cls, type):
        raise UsageError(f"{node['path']} has no class {name!r}", remedy=remedy)
    if cls.__module__ in ("treetune.taskset", "treetune.datasets.taskset") and issubclass(cls, Taskset):
        raise UsageError(f"{name!r} in {node['path']} is only the base class that it imports", remedy=remedy)
    return cls


def _module_at(path: str) -> Any:
    """The module of a file, which may be written `file://…`, or of a package: `pkg://module`."""
    if path.startswith("pkg://"):
        return load_module(path.removeprefix("pkg://").removesuffix(".py").replace("/", "."))
    return load_file(path.removeprefix("file://"))
