"""`treetune list`: what is installed, and what can be configured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from treetune.target import NEEDS_TASKS


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="A taskset: show what its config takes. With --servers: a register.")
    ] = None,
    servers: Annotated[
        bool,
        typer.Option(
            "--servers", help="The running servers in a register, a folder or URL (default: TREETUNE_SERVERS)."
        ),
    ] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="What works where: targets by verbs, kinds of tasks by trainers.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that each of the --servers has to answer.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """What is installed: tasksets, environments, models. With a NAME: the keys of that taskset's config.

    treetune list --servers FOLDER_OR_URL shows the servers that run, and how they are.
    """
    from treetune.cli.output import console_for, print_json
    from treetune.plugins import environments, tasksets
    from treetune.policies import KINDS

    if servers:
        from treetune.cli.register import list_servers

        return list_servers(name, timeout, json)
    if matrix:
        from treetune.cli.listing import as_text, cells

        return print_json(cells()) if json else print(as_text())
    if name is not None:
        return _describe(name, json)
    found = {
        "tasksets": {id: {"from": origin, "about": _about(tasksets, id)} for id, origin in tasksets.names().items()},
        "environments": {
            id: {"from": origin, "about": _about(environments, id)} for id, origin in environments.names().items()
        },
        "models": {kind: {"about": about} for kind, about in KINDS.items()},
    }
    if json:
        return print_json(found)
    from rich.table import Table
    from rich.text import Text

    console = console_for(False)
    for kind, entries in found.items():
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=kind, title_justify="left")
        table.title_style = "bold"
        for id, entry in sorted(entries.items()):
            origin = entry.get("from", "")
            table.add_row(id, Text(entry["about"]), Text("" if origin == "built in" else origin))
        console.print(table)
    console.print("[dim]treetune list NAME shows a taskset's keys; treetune show NAME its tasks[/dim]")
    return None


def _about(registry: Any, id: str) -> str:
    """The first line of the module's docstring."""
    import importlib
    import inspect

    from treetune.cli.hosts import missing_extra

    try:
        cls = registry.resolve(id)
    except Exception as error:  # a broken package of somebody else must not break the list
        return f"cannot be loaded: {error}"
    doc = inspect.getdoc(cls) if cls.__doc__ else None
    doc = doc or inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    extra = missing_extra(cls)
    missing = f" Not installed: pip install 'treetune[{extra}]'" if extra else ""
    return doc.partition("\n")[0] + missing


def _describe(name: str, json: bool) -> None:
    from treetune.cli.output import console_for, print_json
    from treetune.config import defaults_of, field_docs
    from treetune.plugins import tasksets
    from treetune.target import taskset_class

    cls: Any = taskset_class({"id": name})
    docs = field_docs(cls.config_type)
    defaults = defaults_of(cls.config_type)
    keys: dict[str, dict[str, Any]] = {
        key: {"default": defaults.get(key), "required": key not in defaults, "about": docs.get(key, "")}
        for key in cls.config_type.__struct_fields__
        if key != "extra"
    }
    flags = {flag: getattr(cls, flag) for flag in ("INFINITE", "NEEDS_CONTAINER")}
    if json:
        return print_json({"id": name, "about": _about(tasksets, name), "flags": flags, "config": keys})
    from rich.table import Table
    from rich.text import Text

    console = console_for(False)
    console.print(Text(_about(tasksets, name)))
    console.print(Text("  ".join(f"{flag}: {value}" for flag, value in flags.items()), style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "default", "meaning"):
        table.add_column(heading)
    for key, entry in keys.items():
        name = "shuffle.seed" if key == "shuffle" else key
        table.add_row(
            f"--taskset.{name}", Text("required" if entry["required"] else str(entry["default"])), Text(entry["about"])
        )
    console.print(table)
    return None


class Target(StrEnum):
    """What a verb can be given."""

    ID = "id"
    CONFIG = "config.yaml"
    PYTHON = "file.py:Name"
    ROWS = "rows"
    MIXTURE = "mixture"
    INFINITE = "infinite"
    SERVER = "server"


class Kind(StrEnum):
    """How a task is played and scored."""

    RULE = "ground truth"
    REWARD = "own reward"
    ENVIRONMENT = "environment, one turn"
    MULTI_TURN = "environment, several turns"


class Column(NamedTuple):
    """A verb, a door or a trainer. It takes every target, or every kind of task, but for those that it refuses."""

    name: str
    of: type[Target] | type[Kind]
    refuses: Mapping[str, str] = {}
    """What it does not take, with words of the message that says so."""

    def takes(self, what: Target | Kind) -> bool:
        return what not in self.refuses


_NO_SERVER: dict[str, str] = {Target.SERVER: NEEDS_TASKS}

COLUMNS = (
    Column(name="show", of=Target),
    Column(name="validate", of=Target, refuses=_NO_SERVER),
    Column(name="eval", of=Target),
    Column(name="eval", of=Kind),
    Column(name="build verl", of=Target, refuses=_NO_SERVER),
    Column(name="build skyrl", of=Target, refuses=_NO_SERVER),
    Column(name="build trl", of=Target, refuses=_NO_SERVER),
    Column(name="convert", of=Target, refuses=_NO_SERVER),
    Column(name="serve --zmq", of=Target, refuses=_NO_SERVER),
    Column(name="serve --http", of=Target, refuses=_NO_SERVER),
    Column(name="serve --zmq", of=Kind),
    Column(name="serve --http", of=Kind),
    Column(name="verl", of=Kind, refuses={Kind.MULTI_TURN: "has episodes of several turns, and verl plays one"}),
    Column(name="SkyRL", of=Kind),
    Column(name="AReaL", of=Kind),
    Column(name="TRL", of=Kind),
)

TABLES: dict[str, type[Target] | type[Kind]] = {"target": Target, "task": Kind}


def columns(of: type[Target] | type[Kind]) -> Iterator[Column]:
    return (column for column in COLUMNS if column.of is of)


def cells() -> dict[str, dict[str, dict[str, bool | str]]]:
    """By table, row and column: True, or words of the refusal."""
    return {
        table: {
            str(what): {column.name: column.takes(what) or column.refuses[what] for column in columns(of)}
            for what in of
        }
        for table, of in TABLES.items()
    }


def as_text() -> str:
    """The tables as Markdown; below each, what is refused and in which words."""
    parts = []
    for table, rows in cells().items():
        names = list(next(iter(rows.values())))
        width = max(map(len, [table, *rows]))
        lines = [_line([table.ljust(width), *names]), _line(["-" * width, *("-" * len(name) for name in names)])]
        for what, found in rows.items():
            marks = [("yes" if found[name] is True else "no").ljust(len(name)) for name in names]
            lines.append(_line([what.ljust(width), *marks]))
        refused: dict[tuple[str, str], list[str]] = {}
        for what, found in rows.items():
            for name, said in found.items():
                if isinstance(said, str):
                    refused.setdefault((what, said), []).append(name)
        notes = [f"- {what}: {', '.join(names)}: {said}" for (what, said), names in refused.items()]
        parts.append("\n".join([*lines, *(["", *notes] if notes else [])]))
    return "\n\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
