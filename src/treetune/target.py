"""From a name to a taskset: an id, a ready set, `config.yaml`, `file.py:Name`, `module:Name`, rows, a server.

    taskset = load_taskset("arithmetic", {"taskset.level": "2"})
    taskset = build_taskset({"id": "reverse-text", "shuffle": {"seed": 0}})

And back: `describe` gives the node that builds a taskset again, `taskset_fingerprint` says what it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from treetune import plugins
from treetune.code_reference import FILE_SCHEME, parse_place
from treetune.config import (
    CodeName,
    FileName,
    ModelName,
    convert,
    convert_node,
    declared_keys,
    declared_values,
    load_yaml,
    map_declared,
    missing_values,
    to_plain,
)
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
from treetune.files import code_hash, hash_files
from treetune.overrides import lay_over, override_values, select_overridden, with_overrides
from treetune.profile import Rates
from treetune.run_config import is_run_config, origin_of, refuse_foreign
from treetune.task import canonical, digest
from treetune.taskset import Taskset
from treetune.trust import Origin, current_origin, names_from
from treetune.variables import conceal

NEEDS_TASKS = "needs the tasks themselves"
"""What a verb says of a server whose tasks it would need."""

UNTRUSTED = "untrusted"
"""The key of a node that was read from data. Its value, such as `a row`, is the origin of its names."""

_LIST = re.compile(r"(train|val)_tasks\b")


def read_target(
    target: str, overrides: Mapping[str, str] | None = None, split: str | None = None, usual: str = "val"
) -> dict[str, Any]:
    """The config a target stands for, with the overrides in it: a mapping with a `taskset` node.

    Of a config that declares `train_tasks` and `val_tasks`, `split` picks the list; without it the `usual` one is
    taken, or the only one. Files that a YAML file names are looked for beside it first. The config of a run folder is
    data, unless an `eval` of this user wrote it or the overrides set `taskset.trust`.
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
    """A YAML file with a `taskset` node. Its files are looked for beside it first, those of an override are not."""
    if overrides:
        data["taskset"] = _spell_out(data["taskset"])
    resolved = with_overrides(data, overrides, source=target)
    found = find_files(resolved["taskset"], [Path(target).expanduser().resolve().parent])
    return cast(dict[str, Any], lay_over({**resolved, "taskset": found}, select_overridden(resolved, overrides)))


def _spell_out(node: Any) -> Any:
    """A node, and its sources, as mappings, so that their keys can be overridden."""
    if isinstance(node, str) and "${" not in node:
        return {"id": node}
    if isinstance(node, Mapping) and isinstance(node.get("sources"), list):
        return {**node, "sources": [_spell_out(source) for source in node["sources"]]}
    return node


def locate(target: str) -> str:
    """The file of a set that is ready by name; any other target as it is."""
    return str(plugins.find_ready(target) or target)


def expand_ready(node: Any) -> Any:
    """A node whose id is a ready set as its file has it, with the node's own keys laid over that; `split` picks the
    list. Any other node as it is."""
    file = plugins.find_ready(str(node["id"])) if isinstance(node, Mapping) and "id" in node else None
    if file is None:
        return node
    declared = plugins.load_builtin("DECLARED_NODE")
    base = declared(load_yaml(file), str(file), node.get("split"), "val", {})
    return lay_over(base, {key: value for key, value in node.items() if key not in ("id", "split")})


def is_server(target: str) -> bool:
    """Whether it is the address of a server of ours; one of another project's has its prefix before it."""
    return "://" in target and target.partition(":")[0] not in plugins.tasksets.foreign


def refuse_server(target: str, verb: str) -> None:
    """Raises where a verb that needs the tasks themselves is given the address of a server."""
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
    """The taskset of a config node: `id` (or `custom_cls.path` and `custom_cls.name`) and its own keys. `cls` is its
    class where that is known already, and the `options` are those of the class. `elsewhere` are keys of the node that
    the caller has read."""
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
    except ConfigError as error:  # of its sources, which know neither where it stands nor in which file
        faults = [(re.sub(r"^taskset\b", path, key).removeprefix("."), problem) for key, problem in error.faults]
        raise ConfigError(faults, source=source, remedy=error.remedy) from error
    if not hasattr(taskset, "config"):
        remedy = "call super().__init__ in its __init__, with what it was given"
        raise TasksetError(f"{cls.__name__} was made without its config", remedy=remedy)
    taskset._declared = Declared(path, source, frozenset(raw or ()))
    if taskset.name == cls.__name__ and ":" not in str(node.get("id", ":")):
        taskset.name = str(node["id"])
    return taskset


def _by_parameter(
    node: Mapping[str, Any], cls: type[Taskset[Any, Any]], config: Any, path: str, source: str
) -> Taskset[Any, Any]:
    """The taskset with each of the values of a parameter, which its profile names."""
    from treetune.mixture import ByParameter

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
    return ByParameter(config, sources, sources[0].name)


def taskset_class(node: Mapping[str, Any], path: str = "taskset") -> type[Taskset[Any, Any]] | None:
    """The class that a node names; None where it names none."""
    with names_from(_origin_of(node)):
        if names_class(node):
            cls = custom_class(node["custom_cls"], f"{path}.custom_cls")
        elif "id" in node:
            cls = plugins.tasksets.resolve(str(node["id"]), current_origin())
        else:
            return None
    if not issubclass(cls, Taskset):
        raise PluginError(f"{cls.__name__} is no Taskset", remedy="subclass treetune.Taskset")
    return cls


def _origin_of(node: Mapping[str, Any]) -> Origin:
    """Where the names in a node come from: its own word, which can only make it less trusted, or what it came in."""
    return Origin(str(node[UNTRUSTED])) if UNTRUSTED in node else current_origin()


# Classes and files that a node names


class _CustomClass(msgspec.Struct):
    path: str | None = None
    name: str | None = None


def names_class(node: Mapping[str, Any]) -> bool:
    """Whether `custom_cls` names a class beside the base; trainers' configs spell out `{path: null, name: Task}`."""
    custom = node.get("custom_cls")
    if not isinstance(custom, Mapping):
        return custom is not None
    return any(value for key, value in custom.items() if (key, value) != ("name", "Task"))


def custom_class(node: Any, path: str) -> type:
    """The class in a file, which may be written `file://…`, or in a module: `pkg://module`."""
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
    if cls.__module__ in ("treetune.taskset", "treetune.datasets.taskset") and issubclass(cls, Taskset):
        raise UsageError(f"{name!r} in {place} is only the base class that it imports", remedy=remedy)
    return cls


def find_files(node: Any, folders: Sequence[Path], usual: type[Taskset[Any, Any]] | None = None) -> Any:
    """A node whose files and code are looked for in `folders`: its class, and the keys that the config of that class
    declares as `FileName` or `CodeName`. `usual` is the class of a node that names none."""
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
    except TreetuneError:  # reported when it is made
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
    """A file, code or a model, where it is looked for in folders."""
    if kind is ModelName:
        scripted = name.startswith("scripted:")
        return f"scripted:{plugins.absolute_spec(name.removeprefix('scripted:'), folders)}" if scripted else name
    return plugins.absolute_path(name, folders) if kind is FileName else plugins.absolute_spec(name, folders)


def _find_each(value: Any, find: Callable[[str, Sequence[Path]], str], folders: Sequence[Path]) -> Any:
    if isinstance(value, list):
        return [_find_each(item, find, folders) for item in value]
    return find(value, folders) if isinstance(value, str) else value


# What a taskset is


def describe(taskset: Taskset[Any, Any], node: Any) -> dict[str, Any]:
    """The node that builds this taskset again, with every key spelled out and file paths made absolute."""
    found = find_files(node, [Path.cwd()])
    named = {key: found[key] for key in ("id", "custom_cls", "weight") if key in found}
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    if isinstance(found.get("profile"), Mapping) and config.get("profile") is not None:
        config["profile"] |= {key: found["profile"][key] for key in ("path",) if key in found["profile"]}
    if "sources" in config:
        built = zip(getattr(taskset, "sources", []), config["sources"], strict=False)
        config["sources"] = [describe(source, node) for source, node in built]
    # The weight is the mixture's, which its source was made without.
    return {**named, **config, **further} | named


class Fingerprint(msgspec.Struct, frozen=True):
    """What a taskset is made of, so that a run can say it changed."""

    class_name: str
    code: str | None
    """A hash of the files of the class and its bases, and of the code that its config names; None without a file."""
    config: dict[str, Any]
    source: str | None
    """What identifies the data, where the taskset says so."""
    parts: list[Fingerprint] = []
    """Those of a mixture's sources."""
    profile: str | None = None
    """Identifies the pass rates that it is drawn by."""

    def differences(self, now: Fingerprint, path: str = "") -> list[str]:
        """What changed from this one to `now`, in words."""
        changes = []
        if self.class_name != now.class_name:
            changes.append(f"{path}class: {self.class_name} -> {now.class_name}")
        elif self.code != now.code:
            changes.append(f"{path}code of {self.class_name} changed")
        changes += [f"{path}{change}" for change in config_differences(self.config, now.config)]
        if self.source != now.source:
            changes.append(f"{path}data: {self.source} -> {now.source}")
        if self.profile != now.profile:
            changes.append(f"{path}the pass rates of its profile changed")
        if len(self.parts) != len(now.parts):
            changes.append(f"{path}sources: {len(self.parts)} -> {len(now.parts)}")
        for number, (old, new) in enumerate(zip(self.parts, now.parts, strict=False)):
            changes += old.differences(new, f"{path}sources[{number}].")
        return changes


def taskset_fingerprint(taskset: Taskset[Any, Any]) -> Fingerprint:
    parts = [taskset_fingerprint(part) for part in getattr(taskset, "sources", [])]
    config: dict[str, Any] = conceal(to_plain(taskset.config))
    scorer = taskset.scorer
    if scorer is not None and (isinstance(scorer, type) or not hasattr(scorer, "without_files")):
        problem = f"{taskset.name}.scorer is {scorer!r:.80}, which is no scorer"
        raise TasksetError(
            problem, remedy="set it to one of treetune.scorers, such as includes(), or name it otherwise"
        )
    if scorer is not None and (whole := scorer.without_files()) != scorer:
        config["scorer"] = conceal(to_plain(whole))  # a file that it names, such as a rubric, by its content
    if parts:
        config.pop("sources", None)  # each is a part, whichever way it was written
    named = taskset.config.profile
    profile = Rates(named).digest if named is not None and named.path is not None else None
    return Fingerprint(type(taskset).__name__, _code_of(taskset), config, taskset.source(), parts, profile)


def _code_of(taskset: Taskset[Any, Any]) -> str | None:
    """The code of the taskset, and what its config names: an environment, which scores too, and files."""
    own = code_hash(base for base in type(taskset).__mro__ if base not in Taskset.__mro__)
    if own is None:
        return None
    named: list[Any] = []
    if isinstance(env_class := getattr(taskset.config, "env_class", None), str):
        with suppress(TreetuneError):  # reported where the environment is made
            named.append(code_hash([taskset.environment_class(env_class)]))
    for specs in declared_values(taskset.config, CodeName).values():
        files = [plugins.file_of(spec) for spec in specs]
        named += [hash_files([file]) for file in files if file is not None and file.is_file()]
    return digest([own, *named]) if named else own


def config_differences(old: Any, new: Any) -> list[str]:
    """`a.b: 1 -> 2` for each key that differs."""
    return [f"{path}: {before!r} -> {now!r}" for path, before, now in find_differences(old, new)]


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted path of each key that differs, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from find_differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif canonical(old) != canonical(new):
        yield path, old, new
