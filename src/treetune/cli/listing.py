"""`treetune list`: what is installed, what can be configured, and what works where."""

from __future__ import annotations

import importlib
import inspect
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.text import Text

from treetune.cli.options import Json, option
from treetune.cli.output import Screen, make_table, print_json
from treetune.config import defaults_of, field_docs
from treetune.plugins import Registry, environments, tasksets
from treetune.policies import SPELLINGS
from treetune.rows.formats import FORMATS
from treetune.target import NEEDS_TASKS, taskset_class


def list_command(
    name: Annotated[str | None, typer.Argument(help="A taskset, for its keys; with --servers, a register.")] = None,
    servers: Annotated[bool, option("The servers in a register (TREETUNE_SERVERS).", "--servers")] = False,
    matrix: Annotated[bool, option("What works where: targets, tasks, verbs, trainers.", "--matrix")] = False,
    timeout: Annotated[float, option("Seconds that each of the --servers has to answer.", min=0.01)] = 2.0,
    json: Json = False,
) -> None:
    """What is installed: tasksets, environments, models. With a NAME: the keys of that taskset's config.

    treetune list --servers FOLDER_OR_URL shows the servers that run, and how they are.
    """
    if servers:
        from treetune.cli.register import list_servers

        return list_servers(name, timeout, json)
    if matrix:
        return print_json(cells()) if json else print(as_text())
    if name is not None:
        return _describe(name, json)
    found = {
        "tasksets": _installed(tasksets),
        "environments": _installed(environments),
        "models": {spelling: {"about": about} for spelling, about in SPELLINGS.items()},
    }
    if json:
        return print_json(found)
    screen = Screen()
    for kind, entries in found.items():
        origins = {id: entry.get("from", "").removeprefix("built in") for id, entry in entries.items()}
        table = make_table((id, entry["about"], origins[id]) for id, entry in sorted(entries.items()))
        table.title, table.title_justify, table.title_style = kind, "left", "bold"
        screen.print(table)
    return screen.say("treetune list NAME shows a taskset's keys; treetune show NAME its tasks", style="dim")


def _installed(registry: Registry) -> dict[str, dict[str, str]]:
    return {id: {"from": origin, "about": _about(registry, id)} for id, origin in registry.names().items()}


def _about(registry: Registry, id: str) -> str:
    """The first line of the docstring of the class or its module, and what is not installed."""
    try:
        cls = registry.resolve(id)
    except Exception as error:  # a broken package of somebody else must not break the list
        return f"cannot be loaded: {error}"
    doc = inspect.getdoc(cls) if cls.__doc__ else None
    doc = doc or inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    extra = missing_extra(cls)
    missing = f" Not installed: pip install 'treetune[{extra}]'" if extra else ""
    return doc.partition("\n")[0] + missing


def missing_extra(cls: type) -> str | None:
    """The extra that a taskset's class names as `EXTRA`, where what it installs is not there."""
    extra: str | None = getattr(cls, "EXTRA", None)
    return extra if extra is not None and find_spec(extra.replace("-", "_")) is None else None


def _describe(name: str, json: bool) -> None:
    cls: Any = taskset_class({"id": name})
    docs, defaults = field_docs(cls.config_type), defaults_of(cls.config_type)
    keys: dict[str, dict[str, Any]] = {
        key: {"default": defaults.get(key), "required": key not in defaults, "about": docs.get(key, "")}
        for key in cls.config_type.__struct_fields__
        if key != "extra"
    }
    flags = {flag: getattr(cls, flag) for flag in ("INFINITE", "NEEDS_CONTAINER")}
    about = _about(tasksets, name)
    if json:
        return print_json({"id": name, "about": about, "flags": flags, "config": keys})
    screen = Screen()
    screen.print(Text(about))
    screen.say("  ".join(f"{flag}: {value}" for flag, value in flags.items()), style="dim")
    rows = []
    for key, entry in keys.items():
        shown = "required" if entry["required"] else str(entry["default"])
        rows.append((f"--taskset.{'shuffle.seed' if key == 'shuffle' else key}", shown, entry["about"]))
    return screen.print(make_table(rows, ("key", "default", "meaning")))


class TargetKind(StrEnum):
    """What a verb can be given."""

    ID = "id"
    CONFIG = "config.yaml"
    PYTHON = "file.py:Name"
    ROWS = "rows"
    MIXTURE = "mixture"
    INFINITE = "infinite"
    SERVER = "server"


class TaskKind(StrEnum):
    """How a task is played and scored."""

    RULE = "ground truth"
    REWARD = "own reward"
    ENVIRONMENT = "environment, one turn"
    MULTI_TURN = "environment, several turns"


_NO_SERVER: dict[str, str] = {TargetKind.SERVER: NEEDS_TASKS}
_ONE_TURN: dict[str, str] = {TaskKind.MULTI_TURN: "has episodes of several turns, and verl plays one"}
DOORS = ("serve --zmq", "serve --http")
BUILDS = [f"build {format}" for format in FORMATS]
VERBS = ["show", "validate", "eval", *BUILDS, "convert", *DOORS]
PLAYERS = ["eval", *DOORS, "verl", "SkyRL", "AReaL", "TRL"]
MATRIX: dict[str, tuple[type[StrEnum], dict[str, dict[str, str]]]] = {
    "target": (TargetKind, {verb: {} if verb in ("show", "eval") else _NO_SERVER for verb in VERBS}),
    "task": (TaskKind, {player: _ONE_TURN if player == "verl" else {} for player in PLAYERS}),
}
"""By table: what its rows are, and its columns. A column takes every row but those that it refuses, each with words of
the message that says so."""


def cells() -> dict[str, dict[str, dict[str, bool | str]]]:
    """By table, row and column: True, or words of the refusal."""
    return {
        table: {str(row): {name: refuses.get(row, True) for name, refuses in columns.items()} for row in rows}
        for table, (rows, columns) in MATRIX.items()
    }


def as_text() -> str:
    """The tables as Markdown; below each, what is refused and in which words."""
    parts = []
    for table, rows in cells().items():
        names = list(next(iter(rows.values())))
        width = max(map(len, [table, *rows]))
        lines = [_line([table.ljust(width), *names]), _line(["-" * width, *("-" * len(name) for name in names)])]
        refused: dict[tuple[str, str], list[str]] = {}
        for what, found in rows.items():
            marks = [("yes" if found[name] is True else "no").ljust(len(name)) for name in names]
            lines.append(_line([what.ljust(width), *marks]))
            for name, words in found.items():
                if isinstance(words, str):
                    refused.setdefault((what, words), []).append(name)
        notes = [f"- {what}: {', '.join(names)}: {words}" for (what, words), names in refused.items()]
        parts.append("\n".join([*lines, *(["", *notes] if notes else [])]))
    return "\n\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
