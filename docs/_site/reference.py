"""Reference pages, made from the code: what a command takes, what a config may hold, what is in a record.

`<!-- made: fields treetune.core.trace:Trace -->` in a page is replaced by what
`fields("treetune.core.trace:Trace")` gives.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, get_type_hints

import msgspec
import typer.main

from treetune.cli.app import OVERRIDABLE, VERBS, make_app
from treetune.config.structs import field_docs


def commands() -> str:
    """A section for each verb: usage, what it does, its arguments and options, as its `--help` has them."""
    return "\n\n".join(map(_command, VERBS))


def fields(*names: str) -> str:
    """A table for each struct: its fields, their types and defaults, and the docstring below each."""
    return "\n\n".join(_struct(name) for name in names)


def members(name: str) -> str:
    """A table of an enum: its values, and the docstring below each."""
    enum = _load(name)
    docs = field_docs(enum)
    return _table(("value", "meaning"), [(f"`{one.value}`", _cell(docs.get(one.name))) for one in enum])


def api(*names: str) -> str:
    """What mkdocstrings says of each name, and of the members in brackets behind it; fields of a struct as a table."""
    return "\n\n".join(map(_entry, names))


def _entry(name: str) -> str:
    name, _, members = name.removesuffix("]").partition("[")
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    is_struct = isinstance(found, type) and issubclass(found, msgspec.Struct)
    parts = [f"::: {name}\n    options:\n        members: false", *([_fields_of(found)] if is_struct else [])]
    parts += [f"::: {name}.{member}\n    options:\n        heading_level: 4" for member in members.split(",") if member]
    return "\n\n".join(parts)


def _command(verb: str) -> str:
    """The verb's section, with one for each of its own commands where it has several."""
    command = typer.main.get_command(make_app(verb)).commands[verb]  # type: ignore[attr-defined]
    parts = [_help(f"treetune {verb}", command, "##", verb in OVERRIDABLE)]
    for name, one in getattr(command, "commands", {}).items():
        parts.append(_help(f"treetune {verb} {name}", one, "###", verb in OVERRIDABLE))
    return "\n\n".join(parts)


def _help(path: str, command: Any, level: str, dotted: bool) -> str:
    context = typer.Context(command)
    parts = [f"{level} {path}", _prose(command.help)]
    if hasattr(command, "commands"):
        return "\n\n".join(parts)
    parts.append(f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```")
    records = [one.get_help_record(context) for one in command.params]
    rows = [(f"`{name}`", _cell(meaning)) for name, meaning in filter(None, records)]
    if dotted:
        keys = "a [key of the config](configuration.md), such as `--taskset.shuffle.seed 0`"
        rows.append(("`--GROUP.KEY VALUE`", keys))
    return "\n\n".join((*parts, _table(("option", "meaning"), rows)))


def _struct(name: str) -> str:
    struct = _load(name)
    return "\n\n".join((_prose(vars(struct).get("__doc__")), _fields_of(struct)))


def _fields_of(struct: type[msgspec.Struct]) -> str:
    docs, hints = field_docs(struct), get_type_hints(struct)
    rows = [
        (f"`{field.encode_name}`", f"`{_type(hints[field.name])}{_default(field)}`", _cell(docs.get(field.name)))
        for field in msgspec.structs.fields(struct)
    ]
    return _table(("field", "type", "meaning"), rows)


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", re.sub(r"Optional\[(.*)\]$", r"\1 | None", text))


def _default(field: Any) -> str:
    """The value that a field has where nothing is said; a struct and an empty value say little."""
    shown = field.default_factory() if field.default is msgspec.NODEFAULT != field.default_factory else field.default
    said = isinstance(shown, (bool, int, float, str)) and shown != ""
    return f" = {msgspec.to_builtins(shown)!r}" if said else ""


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _prose(text: str | None) -> str:
    """A docstring as Markdown; a paragraph that is a command is code."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", (text or "").strip())]
    return "\n\n".join(f"```bash\n{one}\n```" if one.startswith("treetune ") else _escape(one) for one in paragraphs)


def _cell(text: str | None) -> str:
    return _escape(" ".join((text or "").split()))


def _escape(text: str) -> str:
    """Text that is no HTML and no border of a table, outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|") for part in parts[::2]]
    return "`".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
