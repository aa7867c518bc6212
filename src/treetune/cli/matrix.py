"""What works where: the kinds of TARGETs by the verbs that take them, the kinds of tasks by the places that play them.

    for column in columns(Target): column.name, column.refuses

`treetune list --matrix` prints the tables, and a test tries every cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from treetune.target import NEEDS_TASKS


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
