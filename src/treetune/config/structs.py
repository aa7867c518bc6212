"""Converts YAML to typed configs.

    data = with_overrides(load_yaml("eval.yaml"), {"sampling.temperature": "0.7"})      # of overrides.py
    sampling = convert(data["sampling"], Sampling, path="sampling")

All faults are collected and reported together, each with the path of its key and, for unknown keys, the closest match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from treetune.config.aliases import suggest_key
from treetune.config.code_files import parse_again
from treetune.config.interpolation import escape, explain_interpolation
from treetune.errors import UNKNOWN_KEY, ConfigError, Faults, did_you_mean, gather_faults, suggest_file

T = TypeVar("T")
FileName = Annotated[str, "the name of a file"]
"""The type of a key that names a file or folder, which is looked up next to the YAML file first. A dataset task is
rebuilt if the content changes; other tasksets identify their data in `source()`."""
CodeName = Annotated[str, "the name of code"]
"""The type of a key that may name code: `file.py:Name`."""
ModelName = Annotated[str, "the name of a model"]
"""The type of a key that names a model: `scripted:file.py:Name` is looked up next to the YAML file first."""


def declared_keys(struct: type, kind: Any) -> list[str]:
    """The keys of a config whose type is `kind` (`FileName`, `CodeName`) or a list of it."""
    hints = get_type_hints(struct, include_extras=True)
    return [key for key, hint in hints.items() if kind in (hint, *get_args(hint))]


def declared_values(config: Any, kind: Any) -> dict[str, list[str]]:
    """The files or code that a config names, by key."""
    values = {key: getattr(config, key) for key in declared_keys(type(config), kind)}
    return {key: [value] if isinstance(value, str) else value for key, value in values.items() if value}


def map_declared(value: Any, hint: Any, change: Callable[[Any, str], str]) -> Any:
    """Change the files, code and models that a config value of this type names: `change` receives the declared
    type of a name, and the name. A type with several forms has a `struct_of` that returns the struct."""
    if get_origin(hint) is list and isinstance(value, list):
        return [map_declared(item, get_args(hint)[0], change) for item in value]
    for option in (hint, *get_args(hint)):
        if option in (FileName, CodeName, ModelName):
            return change(option, value) if isinstance(value, str) else value
        if isinstance(option, type) and issubclass(option, msgspec.Struct) and isinstance(value, Mapping):
            struct = option.struct_of(value) if hasattr(option, "struct_of") else option
            hints = get_type_hints(struct, include_extras=True) if struct is not None else {}
            return {key: map_declared(item, hints.get(key, Any), change) for key, item in value.items()}
    return value


def load_yaml(path: str | Path, *, interpolates: bool = True) -> dict[str, Any]:
    """Read a YAML file without resolving it; `with_overrides` resolves its interpolations. With `interpolates=False`,
    `${` is plain text."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = Path(path).expanduser()
    try:
        if interpolates:
            loaded: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        else:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror or error}{suggest_file(path)}"
        remedy = (
            f"correct the path, which is taken from {Path.cwd()}; `treetune list` shows the names that need no file"
        )
        raise ConfigError([("", problem)], source=str(path), remedy=remedy) from None
    except OmegaConfBaseException as error:
        raise ConfigError([explain_interpolation(error)], source=str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([("", f"not valid YAML: {error}")], source=str(path)) from None
    if not isinstance(loaded, dict):
        raise ConfigError([("", "expected keys and values at the top")], source=str(path))
    return loaded


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML that `load_yaml` reads back as the same data. Values from the environment are written as variables."""
    import yaml

    return str(yaml.safe_dump(escape(dict(data)), sort_keys=False, allow_unicode=True))


def convert(
    data: Any,
    struct: type[T],
    *,
    path: str = "",
    raw: Mapping[str, str] | None = None,
    source: str = "config",
    elsewhere: Iterable[str] = (),
) -> T:
    """Convert `data` to the typed config `struct`. Raises one `ConfigError` with all faults. `raw` holds the text of
    overrides by path, so that `--model.name 7` can still be the string "7". `elsewhere` are keys that others read,
    which are suggested for unknown keys."""
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError([(path, f"expected keys and values, got {data!r:.60}")], source=source)
    hints = get_type_hints(struct, include_extras=True)
    known = {field.name: field for field in msgspec.structs.fields(cast(Any, struct))}
    values: dict[str, Any] = {}
    faults: Faults = []
    inside = f"{path}." if path else ""
    for key, value in data.items():
        here = f"{inside}{key}"
        place = f"--{here}" if raw and here in raw else here  # as the user wrote it
        if key not in known:
            faults.append((place, f"{UNKNOWN_KEY}{_hint(str(key), struct, path, elsewhere)}"))
        elif (reader := _reader_in(hints[key])) is not None and value is not None:
            with gather_faults(faults):
                values[key] = reader(value, here, raw)
        elif (nested := _struct_in(hints[key], value)) is not None and isinstance(value, Mapping):
            tag = nested.__struct_config__.tag_field
            with gather_faults(faults):
                values[key] = convert({k: v for k, v in value.items() if k != tag}, nested, path=here, raw=raw)
        elif isinstance(value, Mapping) and (tags := _tags_of(hints[key])) is not None:
            given = value.get(tags[0])
            near = did_you_mean(given, tags[1]) if isinstance(given, str) else ""
            faults.append((f"{here}.{tags[0]}", f"expected one of {', '.join(tags[1])}, got {given!r:.60}{near}"))
        else:
            try:
                values[key] = _value(value, hints[key], (raw or {}).get(here))
            except msgspec.ValidationError as error:
                faults.append((place, _explain(str(error), value, hints[key])))
    missing = [name for name, field in known.items() if field.required and name not in data]
    faults += [(f"{inside}{name}", "is required") for name in missing]
    try:
        if not faults:
            return struct(**values)
    except (TypeError, ValueError) as error:
        faults.append((path, str(error)))
    raise ConfigError(faults, source=source)


def _hint(key: str, struct: type, path: str, elsewhere: Iterable[str]) -> str:
    """Suggest keys that an unknown key may mean; otherwise list the known ones."""
    hints = get_type_hints(struct)
    hidden = getattr(struct, "HIDDEN", ())
    own = [field.name for field in msgspec.structs.fields(cast(Any, struct)) if field.name not in hidden]
    nested = {name: _struct_in(hints[name], None) for name in own}
    inside = [f"{name}.{key}" for name, part in nested.items() if part is not None for key in part.__struct_fields__]
    return suggest_key(key, [*own, *elsewhere, *inside], path) or f"; known: {', '.join(own)}"


def convert_node(
    node: Mapping[str, Any],
    cls: type[Any],
    *,
    path: str = "",
    raw: Mapping[str, str] | None = None,
    any_key: bool = True,
    elsewhere: Iterable[str] = (),
) -> Any:
    """The typed config of a `Taskset` from a node; with `any_key`, unknown keys too, if the class accepts them."""
    inside = f"{path}." if path else ""
    faults: Faults = []
    keys = {key: value for key, value in node.items() if key not in ("custom_cls", "id")}
    if isinstance(keys.get("tools"), Mapping):  # a single tool may be written `tools: {mcp: {...}}`
        keys["tools"] = [{name: settings} for name, settings in keys["tools"].items()]
    if "extra" in keys:
        faults.append((f"{inside}extra", "is not a key itself: write the further keys next to the others"))
    elif any_key and cls.OPEN_KEYS:
        own = set(cls.config_type.__struct_fields__)
        keys["extra"] = {key: keys.pop(key) for key in list(keys) if key not in own}
        faults += [(f"{inside}{key}", problem) for key, problem in _find_misspelt(cls, keys["extra"])]
    with gather_faults(faults):
        config = convert(keys, cls.config_type, path=path, raw=raw, elsewhere=["id", *elsewhere])
    if faults:
        raise ConfigError(faults)
    return config


def _find_misspelt(cls: type[Any], keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Unknown keys that are similar to a key of the config, and not mentioned in the class's own files."""
    import difflib

    from treetune.config.code_files import own_files

    for key in keys:
        near = difflib.get_close_matches(key, cls.config_type.__struct_fields__, n=1, cutoff=0.85)
        word = re.compile(rf"\b{re.escape(key)}\b".encode())
        if near and not any(word.search(file.read_bytes()) for file in own_files(cls)):
            yield key, f"is not a key, and {cls.__name__} does not read it; did you mean {near[0]!r}?"


def missing_values(node: Any, path: str) -> Faults:
    """A fault for every `???` in a node, which is OmegaConf's mark for a required value."""
    if isinstance(node, Mapping):
        return [fault for key in node for fault in missing_values(node[key], f"{path}.{key}" if path else str(key))]
    if isinstance(node, list):
        return [fault for number, item in enumerate(node) for fault in missing_values(item, f"{path}[{number}]")]
    return [(path, "has no value: ??? marks a value that you must set")] if node == "???" else []


def to_plain(config: Any) -> dict[str, Any]:
    """A typed config as plain values that YAML can hold and `convert` accepts."""
    plain: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_write_path)
    return plain


def _write_path(value: Any) -> str:
    if isinstance(value, PurePath):
        # Absolute, so that a saved config names the same file from any folder.
        return str(Path(value).expanduser().absolute())
    raise NotImplementedError(f"a config cannot hold a {type(value).__name__}")


def _read_path(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str | PurePath):
        return kind(value)
    raise msgspec.ValidationError(f"Expected {kind.__name__}, got {type(value).__name__}")


def defaults_of(struct: type) -> dict[str, Any]:
    """The plain default of each field that has one."""
    fields = msgspec.structs.fields(cast(Any, struct))
    found = {field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT}
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not msgspec.NODEFAULT}
    return {name: to_plain(value) for name, value in {**found, **made}.items()}


def field_docs(struct: type) -> dict[str, str]:
    """The docstring below each field of a struct, or each member of an enum, including those of its bases."""
    import ast
    import inspect
    import textwrap

    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        try:
            source = textwrap.dedent(parse_again(partial(inspect.getsource, cls)))
            definition = parse_again(partial(ast.parse, source)).body[0]
        except (OSError, TypeError):
            continue
        for field, below in pairwise(cast(ast.ClassDef, definition).body):
            match field, below:
                case (
                    (ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)])),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _value(value: Any, hint: Any, raw: str | None) -> Any:
    try:
        return msgspec.convert(value, hint, dec_hook=_read_path)
    except msgspec.ValidationError:
        if raw is not None:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(raw, hint, dec_hook=_read_path)
        raise


def _struct_in(hint: Any, value: Any) -> type[msgspec.Struct] | None:
    """The struct that a value of this type is read as; in a union, the one that the value's tag names."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
    if len(structs) > 1 and isinstance(value, Mapping):
        configs = [struct.__struct_config__ for struct in structs]
        structs = [
            one for one, config in zip(structs, configs, strict=True) if value.get(config.tag_field) == config.tag
        ]
    return structs[0] if len(structs) == 1 else None


def _reader_in(hint: Any) -> Callable[..., Any] | None:
    """The `read_config` of a type that has one, and of lists of such types; else None."""
    if get_origin(hint) is list and (one := _reader_in(get_args(hint)[0])) is not None:
        return partial(_read_list, one)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((option.read_config for option in options if hasattr(option, "read_config")), None)


def _read_list(read: Callable[..., Any], value: Any, path: str, raw: Mapping[str, str] | None) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError([(path, f"expected a list, got {value!r:.60}")])
    faults: Faults = []
    items = []
    for number, item in enumerate(value):
        with gather_faults(faults):
            items.append(read(item, f"{path}[{number}]", raw))
    if faults:
        raise ConfigError(faults)
    return items


def _tags_of(hint: Any) -> tuple[str, list[str]] | None:
    """The key that names the struct in a union, and its possible values."""
    structs = [part for part in get_args(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    configs = [struct.__struct_config__ for struct in structs]
    return (str(configs[0].tag_field), [str(config.tag) for config in configs]) if len(configs) > 1 else None


_SPELLINGS = {
    "int": "a whole number, such as 3",
    "float": "a number, such as 0.5",
    "bool": "true or false",
    "str": 'text, in quotes if it looks like something else: "3"',
    "array": "a list: [a, b]",
    "object": "keys and values: {key: value}",
}
"""How a value of each type is written in YAML."""


def _explain(problem: str, value: Any, hint: Any) -> str:
    if problem.startswith("Invalid enum value") and (choices := _choices(hint)):
        near = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        return f"expected one of {', '.join(map(str, choices))}, got {value!r:.60}{near}"
    if "regex '^https?://'" in problem:
        return f"expected an address that begins with http:// or https://, got {value!r:.60}"
    wrong_type = re.match(r"Expected `(\w+).*, got", problem)
    remedy = f"; write {_SPELLINGS[wrong_type[1]]}" if wrong_type and wrong_type[1] in _SPELLINGS else ""
    return f"{problem[0].lower()}{problem[1:].replace('`', '')} ({value!r:.60}){remedy}"


def _choices(hint: Any) -> list[Any]:
    """The values that a `Literal` or an enum allows, at any depth in the hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [member.value for member in hint]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None; the fields of the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}
