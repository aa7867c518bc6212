"""Builds a taskset from its node in a config.

    taskset = build_taskset({"id": "reverse-text", "shuffle": {"seed": 0}})

`node_of` does the reverse: it returns the node that rebuilds a taskset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from treetune.config import plugins, tables
from treetune.config.code_reference import FILE_SCHEME, parse_place
from treetune.config.interpolation import deep_merge
from treetune.config.structs import (
    CodeName,
    FileName,
    ModelName,
    convert,
    convert_node,
    declared_keys,
    load_yaml,
    map_declared,
    missing_values,
    to_plain,
)
from treetune.config.trust import Origin, current_origin, names_from
from treetune.core.taskset import Taskset
from treetune.errors import (
    ConfigError,
    Declared,
    Faults,
    PluginError,
    TasksetError,
    TreetuneError,
    UsageError,
    did_you_mean,
    gather_faults,
    user_code,
)

UNTRUSTED = "untrusted"
"""The key that marks a node read from data. Its value, such as `a row`, is the origin of the names in the node."""


def expand_ready(node: Any) -> Any:
    """Expand a node whose id names a ready-made taskset: the node's own keys override those of its file, and `split`
    selects the task list. Any other node is returned unchanged."""
    file = plugins.find_ready(str(node["id"])) if isinstance(node, Mapping) and "id" in node else None
    if file is None:
        return node
    declared = plugins.load_builtin("DECLARED_NODE")
    base = declared(load_yaml(file), str(file), node.get("split"), "val", {})
    return deep_merge(base, {key: value for key, value in node.items() if key not in ("id", "split")})


def build_taskset(
    node: Any,
    *,
    path: str = "taskset",
    raw: Mapping[str, str] | None = None,
    source: str = "config",
    cls: type[Taskset[Any, Any]] | None = None,
    elsewhere: Sequence[str] = (),
    **options: Any,
) -> Taskset[Any, Any]:
    """Build the taskset of a config node: `id` (or `custom_cls.path` and `custom_cls.name`) and the taskset's own keys.
    `cls` is its class if already known, and `options` are options of that class. `elsewhere` lists keys of the node
    that the caller reads itself."""
    node = expand_ready({"id": node} if isinstance(node, str) else node)
    if not isinstance(node, Mapping):
        raise ConfigError([(path, "expected an id, or keys and values with an id")], source=source)
    if UNTRUSTED in node:
        with names_from(_origin_of(node)):
            plain = {key: value for key, value in node.items() if key != UNTRUSTED}
            return build_taskset(plain, path=path, raw=raw, source=source, cls=cls, elsewhere=elsewhere, **options)
    faults = missing_values(node, path)
    any_key = cls is not None or "custom_cls" in node
    cls = cls or taskset_class(node, path)
    if cls is None:
        faults.append((f"{path}.id", "is required: a taskset's name, file.py:Name or module:Name"))
        raise ConfigError(faults, source=source)
    with gather_faults(faults):
        config = convert_node(node, cls, path=path, raw=raw, any_key=any_key, elsewhere=elsewhere)
    if faults:
        raise ConfigError(faults, source=source)
    if config.profile is not None and config.profile.parameter is not None:
        return _by_parameter(node, cls, config, path, source)
    try:
        with user_code(f"making {cls.__name__}"):
            taskset = cls.from_config(config, **options)
    except ConfigError as error:  # raised by its sources, which do not know their path or file
        faults = [(re.sub(r"^taskset\b", path, key).removeprefix("."), problem) for key, problem in error.faults]
        raise ConfigError(faults, source=source, remedy=error.remedy) from error
    if not hasattr(taskset, "config"):
        remedy = "call super().__init__ in its __init__, with the same arguments"
        raise TasksetError(f"{cls.__name__} was made without its config", remedy=remedy)
    taskset._declared = Declared(path, source, frozenset(raw or ()))
    if taskset.name == cls.__name__ and ":" not in str(node.get("id", ":")):
        taskset.name = str(node["id"])
    return taskset


def _by_parameter(
    node: Mapping[str, Any], cls: type[Taskset[Any, Any]], config: Any, path: str, source: str
) -> Taskset[Any, Any]:
    """Build the taskset once for each value of the parameter that its profile names."""
    profile, at = config.profile, f"{path}.profile" if path else "profile"
    key = profile.parameter
    faults: Faults = []
    if not cls.INFINITE:
        faults = [
            (f"{at}.parameter", f"is for a taskset that never ends; {cls.__name__} has a pass rate for each task")
        ]
    elif key not in cls.config_type.__struct_fields__:
        known = [
            field for field in cls.config_type.__struct_fields__ if field not in Taskset.config_type.__struct_fields__
        ]
        hint = did_you_mean(key, known) or f"; it has: {', '.join(known) or 'none of its own'}"
        faults = [(f"{at}.parameter", f"{cls.__name__} has no key {key!r}{hint}")]
    sources: list[Taskset[Any, Any]] = []
    for value in [] if faults else profile.values:
        own: Faults = []
        with gather_faults(own):
            kept = {name: given for name, given in node.items() if name != "profile"}
            sources.append(build_taskset({**kept, key: value}, path=path, source=source))
        faults += [(f"{at}.values", problem) for _, problem in own]
    if faults:
        raise ConfigError(faults, source=source)
    made: Taskset[Any, Any] = plugins.load_builtin("BY_PARAMETER")(config, sources, sources[0].name)
    return made


def taskset_class(node: Mapping[str, Any], path: str = "taskset") -> type[Taskset[Any, Any]] | None:
    """The class that a node names, or None if it names none."""
    with names_from(_origin_of(node)):
        if names_class(node):
            cls = custom_class(node["custom_cls"], f"{path}.custom_cls")
        elif "id" in node:
            cls = plugins.tasksets.resolve(str(node["id"]), current_origin())
        else:
            return None
    if not issubclass(cls, Taskset):
        raise PluginError(f"{cls.__name__} is not a Taskset", remedy="subclass treetune.Taskset")
    return cls


def _origin_of(node: Mapping[str, Any]) -> Origin:
    """The origin of the names in a node: the node's own mark, which can only lower trust, or the current origin."""
    return Origin(str(node[UNTRUSTED])) if UNTRUSTED in node else current_origin()


# Classes and files that a node names


class _CustomClass(msgspec.Struct):
    path: str | None = None
    name: str | None = None


def names_class(node: Mapping[str, Any]) -> bool:
    """Whether `custom_cls` names a class other than the base (trainers' configs use `{path: null, name: Task}`)."""
    custom = node.get("custom_cls")
    if not isinstance(custom, Mapping):
        return custom is not None
    return any(value for key, value in custom.items() if (key, value) != ("name", "Task"))


def custom_class(node: Any, path: str) -> type:
    """The class in a file, given as a path or `file://…`, or in a module: `pkg://module`."""
    custom = convert(node, _CustomClass, path=path)
    place, name = custom.path, custom.name or "Task"
    if not place:
        raise ConfigError([(f"{path}.path", "is required: the Python file of the class")])
    module = plugins.load_module(parse_place(place, name), current_origin())
    cls = getattr(module, name, None)
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Taskset)]
    own = [value.__name__ for value in classes if value.__module__ == module.__name__]
    remedy = f"set {path}.name to one of: {', '.join(own)}" if own else f"set {path}.name"
    if not isinstance(cls, type):
        raise UsageError(f"{place} has no class {name!r}", remedy=remedy)
    bases = {Taskset.__module__, tables["TASKSETS"]["dataset"].partition(":")[0]} - {module.__name__}
    if cls.__module__ in bases and issubclass(cls, Taskset):
        raise UsageError(f"{name!r} in {place} is only the base class that it imports", remedy=remedy)
    return cls


def find_files(node: Any, folders: Sequence[Path], usual: type[Taskset[Any, Any]] | None = None) -> Any:
    """Resolve the files and code that a node names against `folders`: its class, and the keys that the config of that
    class declares as `FileName` or `CodeName`. `usual` is the class of a node that names none."""
    node = expand_ready({"id": node} if isinstance(node, str) else node)
    if not isinstance(node, Mapping):
        return node
    found = dict(node)
    if "id" in node:
        found["id"] = plugins.absolute_spec(str(node["id"]), folders)
    custom = node.get("custom_cls")
    if isinstance(custom, Mapping) and isinstance(custom.get("path"), str):
        path = custom["path"].removeprefix(FILE_SCHEME)
        found["custom_cls"] = {**custom, "path": plugins.absolute_path(path, folders)}
    if isinstance(node.get("sources"), list):
        found["sources"] = [find_files(source, folders) for source in node["sources"]]
    try:
        cls = taskset_class(found) or usual
    except TreetuneError:  # reported when the taskset is made
        cls = usual
    if cls is not None:
        for kind, find in ((FileName, plugins.absolute_path), (CodeName, plugins.absolute_spec)):
            for key in found.keys() & set(declared_keys(cls.config_type, kind)):
                found[key] = _find_each(found[key], find, folders)
        hints = get_type_hints(cls.config_type, include_extras=True)
        if "scorer" in found and "scorer" in hints:
            found["scorer"] = map_declared(found["scorer"], hints["scorer"], partial(_find_declared, folders))
    if isinstance(profile := found.get("profile"), Mapping) and isinstance(profile.get("path"), str):
        found["profile"] = {**profile, "path": plugins.absolute_path(profile["path"], folders)}
    return found


def _find_declared(folders: Sequence[Path], kind: Any, name: str) -> str:
    """A file, code or model name, resolved against folders."""
    if kind is ModelName:
        scripted = name.startswith("scripted:")
        return f"scripted:{plugins.absolute_spec(name.removeprefix('scripted:'), folders)}" if scripted else name
    return plugins.absolute_path(name, folders) if kind is FileName else plugins.absolute_spec(name, folders)


def _find_each(value: Any, find: Callable[[str, Sequence[Path]], str], folders: Sequence[Path]) -> Any:
    if isinstance(value, list):
        return [_find_each(item, find, folders) for item in value]
    return find(value, folders) if isinstance(value, str) else value


def node_of(taskset: Taskset[Any, Any], node: Any) -> dict[str, Any]:
    """The node that rebuilds this taskset, with every key spelled out and file paths made absolute."""
    found = find_files(node, [Path.cwd()])
    named = {key: found[key] for key in ("id", "custom_cls", "weight") if key in found}
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    if isinstance(found.get("profile"), Mapping) and config.get("profile") is not None:
        config["profile"] |= {key: found["profile"][key] for key in ("path",) if key in found["profile"]}
    if "sources" in config:
        built = zip(getattr(taskset, "sources", []), config["sources"], strict=False)
        config["sources"] = [node_of(source, node) for source, node in built]
    # The weight belongs to the mixture; its source was built without it.
    return {**named, **config, **further} | named
