"""The rollouts of a run as columns, which a viewer sorts, filters and groups by.

    columns = Columns()
    columns.extend(entries)                              # from an `IndexReader`, repeatedly
    columns.reward[columns.numbers("turns") > 2]
    columns.groups()                                     # one line for each task
    columns.entries[17]                                  # everything known about one rollout

A hundred thousand rollouts take some ten megabytes: numbers are arrays, texts are stored once and referred to by
number, and an `Entry` is created when it is requested. A column of numbers has NaN for a rollout without a value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, overload

import msgspec
import numpy as np

from treetune.runs.entry import Entry

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Codes = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

NUMBERS = {
    "reward": "reward",
    "turns": "turns",
    "prompt_tokens": "prompt_tokens",
    "tokens": "completion_tokens",
    "began": "began",
    "seconds": "seconds",
    "policy": "policy",
    "environment": "environment",
    "retries": "retries",
    "agent_calls": "agent_calls",
    "rollout": "rollout",
    "attempt": "attempt",
    "step": "step",
    "task": "idx",
    "success": "success",
}
"""The names of the numeric columns, each with its field of an entry."""
TEXTS = {"source": "source", "outcome": "outcome", "failure": "failure", "answer": "answer", "uid": "uid"}
NOTES = ("mark",)
"""Texts that are not in the index; `note` sets them."""
_MOST_METRICS = 1000
"""The maximum number of metric columns. A run that gives each metric a new name would have one column per rollout."""
PLACES = ("offset", "length", "text_length", "occurrence", "tokens")
"""Integers of every entry that queries do not compare."""


class _Column:
    """An array that grows."""

    __slots__ = ("_parts", "_type")

    def __init__(self, type: Any, first: int = 0) -> None:
        """The `first` rows have no number."""
        self._type = type
        self._parts = [np.full(first, math.nan)] if first else []

    def add(self, values: Sequence[Any]) -> None:
        self._parts.append(np.array(values, self._type))  # None becomes NaN

    @property
    def array(self) -> np.ndarray[Any, Any]:
        if len(self._parts) != 1:
            self._parts = [np.concatenate(self._parts) if self._parts else np.zeros(0, self._type)]
        return self._parts[0]


class _Texts:
    """A column of texts, each stored once."""

    __slots__ = ("_numbers", "codes", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.codes = _Column(np.int64)
        self._numbers: dict[str | None, int] = {None: -1}

    def add(self, values: Sequence[str | None]) -> None:
        numbers, texts = self._numbers, self.texts
        for text in dict.fromkeys(values):
            if text not in numbers and text is not None:
                numbers[text] = len(texts)
                texts.append(text)
        self.codes.add([numbers[text] for text in values])

    def text(self, row: int) -> str | None:
        code = int(self.codes.array[row])
        return None if code < 0 else self.texts[code]


class Groups(msgspec.Struct):
    """The rollouts by task, with one line per task in the order of first appearance."""

    task: Codes
    """The task of each rollout, as an index into these lists."""
    first: Codes
    """The first rollout of each task."""
    rollouts: Codes
    scored: Codes
    mean: Numbers
    """The mean reward over scored rollouts; NaN if there are none."""
    variance: Numbers
    lowest: Numbers
    highest: Numbers
    order: Codes
    """The rollouts ordered by task, those of the first task first."""
    starts: Codes
    """The offset in `order` at which the rollouts of each task begin."""
    columns: Columns
    """The columns of the rollouts."""

    def __len__(self) -> int:
        return len(self.first)

    def members(self, task: int) -> Codes:
        """The rollouts of one task, in order."""
        start = self.starts[task]
        return self.order[start : start + self.rollouts[task]]

    def split(self, values: Any, among: Mask | None = None) -> list[list[Any]]:
        """The values of the rollouts of each task, or of the rollouts `among` them."""
        order = self.order if among is None else self.order[among[self.order]]
        ends = np.cumsum(np.bincount(self.task[order], minlength=len(self))).tolist()
        together = values[order].tolist()
        return [together[start:end] for start, end in pairwise([0, *ends])]

    @property
    def failed(self) -> Mask:
        """The tasks whose rollouts all failed."""
        return np.equal(self.scored, 0)

    @property
    def mixed(self) -> Mask:
        return (self.scored > 0) & (self.lowest < self.highest)

    def all_of(self, reward: float) -> Mask:
        found: Mask = (self.scored > 0) & (self.lowest == reward) & (self.highest == reward)
        return found

    def flags(self) -> list[str]:
        """The result of each task: `all 1`, `all 0`, `mixed`, `failed` if no rollout has a reward, and `same` if all
        have the same other reward."""
        masks = (self.failed, self.mixed, self.all_of(0.0), self.all_of(1.0))
        found: list[str] = np.select(masks, ("failed", "mixed", "all 0", "all 1"), "same").tolist()
        return found

    def table(self) -> dict[str, Any]:
        """Columns by name, one row per task."""
        columns, first = self.columns, self.first
        named = {name: [columns.texts(name)[code] for code in columns.codes(name)[first]] for name in ("uid", "source")}
        names = ("rollouts", "scored", "mean", "variance", "lowest", "highest")
        figures = {name: getattr(self, name) for name in names}
        return {"task": columns.numbers("task")[first].astype(int), **named, **figures, "flag": self.flags()}

    def df(self) -> Any:
        """A pandas DataFrame, one row per task."""
        import pandas as pd

        return pd.DataFrame(self.table())

    def __repr__(self) -> str:
        counts = Counter(self.flags())
        return f"Groups({len(self):,} tasks: {', '.join(f'{count:,} {flag}' for flag, count in counts.most_common())})"

    def _repr_html_(self) -> str:
        return str(self.df()._repr_html_())


class Entries(Sequence[Entry]):
    """The entries of some rows, each made on access."""

    def __init__(self, columns: Columns, rows: Codes | None = None) -> None:
        self._columns, self._rows = columns, rows

    @property
    def rows(self) -> Codes:
        """The rows of these entries."""
        return np.arange(len(self._columns)) if self._rows is None else self._rows

    def __len__(self) -> int:
        return len(self._columns) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> Entries: ...
    def __getitem__(self, at: int | slice) -> Entry | Entries:
        if isinstance(at, slice):
            return Entries(self._columns, self.rows[at])
        at = range(len(self))[at]  # raises IndexError
        return self._columns.entry(at if self._rows is None else int(self._rows[at]))


class Columns:
    def __init__(self) -> None:
        self._number = 0
        self._numbers = {name: _Column(np.float64) for name in NUMBERS}
        self._places = {name: _Column(np.int64) for name in PLACES}
        self._texts = {name: _Texts() for name in TEXTS}
        self._metrics: dict[str, _Column] = {}
        self._notes = {name: _Texts() for name in NOTES}
        self._groups: Groups | None = None

    def __len__(self) -> int:
        return self._number

    def extend(self, entries: Sequence[Entry]) -> int:
        """Adds entries; returns how many."""
        if not entries:
            return 0
        for name, field in NUMBERS.items():
            self._numbers[name].add(list(map(attrgetter(field), entries)))
        for name, place in self._places.items():
            place.add(list(map(attrgetter(name), entries)))
        for name, field in TEXTS.items():
            self._texts[name].add(list(map(attrgetter(field), entries)))
        for name in dict.fromkeys(name for entry in entries for name in entry.metrics):
            if name not in self._metrics and len(self._metrics) < _MOST_METRICS:
                self._metrics[name] = _Column(np.float64, first=self._number)
        for name, metric in self._metrics.items():
            metric.add([entry.metrics.get(name) for entry in entries])
        self._number += len(entries)
        self._groups = None
        return len(entries)

    @property
    def entries(self) -> Entries:
        return Entries(self)

    def entry(self, row: int) -> Entry:
        """The entry of a row."""
        fields: dict[str, Any] = {name: int(place.array[row]) for name, place in self._places.items()}
        for name, field in NUMBERS.items():
            value = float(self._numbers[name].array[row])
            whole = field not in _FRACTIONS
            fields[field] = None if math.isnan(value) else int(value) if whole else value
        for name, field in TEXTS.items():
            fields[field] = self._texts[name].text(row)
        fields["metrics"] = {
            name: value for name, metric in self._metrics.items() if not math.isnan(value := float(metric.array[row]))
        }
        fields["tokens"] = bool(fields["tokens"])
        if fields["success"] is not None:
            fields["success"] = bool(fields["success"])
        return Entry(**fields)

    @property
    def end(self) -> int:
        """Where the last trace ends."""
        return int(self.places("offset")[-1] + self.places("length")[-1]) if self._number else 0

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics."""
        return list(self._metrics)

    @property
    def reward(self) -> Numbers:
        return self.numbers("reward")

    def numbers(self, name: str) -> Numbers:
        """A column of `NUMBERS`, or a metric."""
        return (self._numbers.get(name) or self._metrics[name]).array

    def places(self, name: str) -> Codes:
        """A column of `PLACES`."""
        return self._places[name].array

    def codes(self, name: str) -> Codes:
        """A column of `TEXTS` or `NOTES`, as indices into `texts(name)`; -1 for a missing text."""
        if name not in self._notes:
            return self._texts[name].codes.array
        noted = self._notes[name].codes.array
        return np.concatenate([noted, np.full(self._number - len(noted), -1)])

    def texts(self, name: str) -> list[str]:
        return (self._texts.get(name) or self._notes[name]).texts

    def note(self, name: str, texts: Mapping[int, str]) -> None:
        """Sets a column of `NOTES`: the texts of some rows, which replace earlier texts."""
        self._notes[name] = _Texts()
        self._notes[name].add([texts.get(row) for row in range(self._number)])

    def groups(self) -> Groups:
        """Groups the rollouts by task. Equal tasks are kept apart by `occurrence`."""
        if self._groups is None:
            self._groups = self._group()
        return self._groups

    def _group(self) -> Groups:
        # Texts are numbered in the order of first appearance, and so are groups.
        task, occurrence, reward = self.codes("uid"), self.places("occurrence"), self.reward
        if occurrence.any():
            key = task * (occurrence.max() + 1) + occurrence
            _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
            task = np.argsort(np.argsort(first))[inverse]
        number = int(task.max()) + 1 if len(task) else 0
        order = np.argsort(task, kind="stable")
        rollouts = np.bincount(task, minlength=number)
        starts = np.cumsum(rollouts) - rollouts
        has = ~np.isnan(reward)
        paid, of = reward[has], task[has]
        scored = np.bincount(of, minlength=number)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.bincount(of, paid, minlength=number) / scored
            variance = np.bincount(of, (paid - mean[of]) ** 2, minlength=number) / scored
        together = reward[order]
        lowest = np.fmin.reduceat(together, starts) if number else np.zeros(0)
        highest = np.fmax.reduceat(together, starts) if number else np.zeros(0)
        return Groups(task, order[starts], rollouts, scored, mean, variance, lowest, highest, order, starts, self)


_FRACTIONS = ("reward", "began", "seconds", "policy", "environment")
