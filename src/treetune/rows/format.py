"""Trainers' row formats by name, and which one a row is in.

    FORMATS["skyrl"].row_of(task)
    detect(row).task_of(row)

Any task can be written in any of them and read again, and is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from treetune.errors import UnknownNameError, UsageError
from treetune.rows import skyrl, trl, verl
from treetune.task import Task


class RowOf(Protocol):
    def __call__(self, task: Task, *, text_truth: bool = False, scorer: str | None = None) -> dict[str, Any]: ...


class Format(NamedTuple):
    name: str
    row_of: RowOf
    """With `text_truth` a ground truth that is no text is stored as text, for a column that holds text elsewhere.
    `scorer` says how the row is scored ("": by nothing); without it, what follows from the task."""
    task_of: Callable[[Mapping[str, Any]], Task]
    task_of_pruned: Callable[[Mapping[str, Any]], Task]
    """The same for a row that has no nulls, such as `read_rows` gives."""


FORMATS = {
    "verl": Format("verl", verl.row_of, verl.task_of, verl.task_of_pruned),
    "skyrl": Format("skyrl", skyrl.row_of, skyrl.task_of, skyrl.task_of_pruned),
    "trl": Format("trl", trl.row_of, trl.task_of, trl.task_of_pruned),
}

_MARKS = {"skyrl": ("env_class", "reward_spec"), "verl": ("reward_model",), "trl": ("ground_truth",)}
"""The columns that only one format has. SkyRL's aime has a `reward_model` too."""


def named(name: str) -> Format:
    if name not in FORMATS:
        raise UnknownNameError.of("format", name, FORMATS)
    return FORMATS[name]


def detect(columns: Iterable[str]) -> Format:
    """The format that has these columns. Rows with none of the marks are the same in all formats."""
    columns = list(columns)
    found = [name for name, marks in _MARKS.items() if any(mark in columns for mark in marks)]
    if found == ["skyrl", "verl"]:
        found = ["skyrl"]
    if len(found) > 1:
        marks = ", ".join(mark for name in found for mark in _MARKS[name] if mark in columns)
        raise UsageError(
            f"the columns {marks} belong to several formats: {', '.join(found)}", remedy="say which: --from FORMAT"
        )
    if not found and "prompt" not in columns:
        raise UsageError(
            f"these are no rows of tasks, for there is no prompt: {', '.join(columns) or 'no columns'}",
            remedy="make tasks of a dataset with `treetune build`",
        )
    return FORMATS[found[0] if found else "verl"]


class FormatOf:
    """The format of each of many rows: the named one, else the one that has the row's columns."""

    def __init__(self, name: str | None = None) -> None:
        self._given = named(name) if name is not None else None
        self._known: dict[tuple[str, ...], Format] = {}

    def of(self, row: Mapping[str, Any]) -> Format:
        if self._given is not None:
            return self._given
        columns = tuple(row)
        if columns not in self._known:
            self._known[columns] = detect(columns)
        return self._known[columns]
