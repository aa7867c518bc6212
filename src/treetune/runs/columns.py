"""The entries of a run as columns: what a viewer sorts, filters and groups by.

    columns = Columns()
    columns.extend(read_index(folder))
    columns.reward[columns.numbers("turns") > 2]
    columns.groups()                                     # one line for each task

Texts are kept once and named by number. A column of numbers has NaN where a rollout has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from treetune.runs.index import Entry

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Codes = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

NUMBERS = {
    "reward": "reward",
    "turns": "turns",
    "prompt_tokens": "prompt_tokens",
    "tokens": "completion_tokens",
    "seconds": "seconds",
    "rollout": "rollout",
    "attempt": "attempt",
    "step": "step",
    "task": "idx",
    "success": "success",
}
"""The names of the columns of numbers, each with the field of an entry."""
TEXTS = {"source": "source", "outcome": "outcome", "failure": "failure", "answer": "answer", "uid": "uid"}


class Coded:
    """A column of texts, each of which is kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str | None, int] = {None: -1}

    def code(self, text: str | None) -> int:
        found = self._codes.get(text)
        if found is None:
            assert text is not None
            found = self._codes[text] = len(self.texts)
            self.texts.append(text)
        return found


class Groups(msgspec.Struct):
    """One line for each task, in the order in which they were first seen."""

    task: Codes
    """Which of them each rollout belongs to."""
    first: Codes
    """The first rollout of each."""
    entries: list[Entry]
    """Those of `first`."""
    rollouts: Codes
    scored: Codes
    mean: Numbers
    """Over scored rollouts; NaN where there is none."""
    variance: Numbers
    lowest: Numbers
    highest: Numbers

    def __len__(self) -> int:
        return len(self.first)

    @property
    def failed(self) -> Mask:
        """All of its rollouts failed."""
        return np.equal(self.scored, 0)

    @property
    def mixed(self) -> Mask:
        return (self.scored > 0) & (self.lowest < self.highest)

    def all_of(self, reward: float) -> Mask:
        found: Mask = (self.scored > 0) & (self.lowest == reward) & (self.highest == reward)
        return found

    def flags(self) -> list[str]:
        """What each came to: `all 1`, `all 0`, `mixed`, `failed` where no rollout has a reward; `same` where all have
        another one."""
        masks = (self.failed, self.mixed, self.all_of(0.0), self.all_of(1.0))
        found: list[str] = np.select(masks, ("failed", "mixed", "all 0", "all 1"), "same").tolist()
        return found

    def table(self) -> dict[str, Any]:
        """Columns by name, one row a task."""
        scored = self.scored > 0
        return {
            "task": [entry.idx for entry in self.entries],
            "uid": [entry.uid for entry in self.entries],
            "source": [entry.source for entry in self.entries],
            "rollouts": self.rollouts,
            "scored": self.scored,
            "mean": self.mean,
            "variance": self.variance,
            "lowest": np.where(scored, self.lowest, math.nan),
            "highest": np.where(scored, self.highest, math.nan),
            "flag": self.flags(),
        }

    def df(self) -> Any:
        """A pandas DataFrame, one row a task."""
        import pandas as pd

        return pd.DataFrame(self.table())

    def __repr__(self) -> str:
        counts = Counter(self.flags())
        return f"Groups({len(self):,} tasks: {', '.join(f'{count:,} {flag}' for flag, count in counts.most_common())})"

    def _repr_html_(self) -> str:
        return str(self.df()._repr_html_())


class Columns:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._columns: dict[str, np.ndarray[Any, Any]] = {}
        self._coded: dict[str, Coded] = {}
        self._groups: Groups | None = None
        self.metrics: list[str] = []
        """The names of the metrics that any rollout has."""

    def __len__(self) -> int:
        return len(self.entries)

    def extend(self, entries: Iterable[Entry]) -> int:
        """Adds entries; gives how many there were."""
        before = len(self.entries)
        self.entries.extend(entries)
        if len(self.entries) > before:
            self._columns, self._coded, self._groups = {}, {}, None
            known = dict.fromkeys(self.metrics)
            for entry in self.entries[before:]:
                if entry.metrics:
                    known.update(dict.fromkeys(entry.metrics))
            self.metrics = list(known)
        return len(self.entries) - before

    @property
    def reward(self) -> Numbers:
        return self.numbers("reward")

    def numbers(self, name: str) -> Numbers:
        """A column of `NUMBERS`, or a metric."""
        if name not in self._columns:
            if name in NUMBERS:
                field = NUMBERS[name]
                values: Sequence[Any] = [getattr(entry, field) for entry in self.entries]
            else:
                values = [entry.metrics.get(name) for entry in self.entries]
            self._columns[name] = np.array([math.nan if value is None else value for value in values], np.float64)
        return self._columns[name]

    def codes(self, name: str) -> Codes:
        """A column of `TEXTS`, as numbers of `texts(name)`; -1 where there is none."""
        if name not in self._coded:
            coded, field = Coded(), TEXTS[name]
            codes = [coded.code(getattr(entry, field)) for entry in self.entries]
            self._columns[name], self._coded[name] = np.array(codes, np.int64), coded
        return self._columns[name]

    def texts(self, name: str) -> list[str]:
        self.codes(name)
        return self._coded[name].texts

    def groups(self) -> Groups:
        """The rollouts by task: those of equal tasks (`occurrence`) apart."""
        if self._groups is None:
            self._groups = self._group()
        return self._groups

    def _group(self) -> Groups:
        known: dict[tuple[str, int], int] = {}
        task = np.array(
            [known.setdefault((entry.uid, entry.occurrence), len(known)) for entry in self.entries], np.int64
        )
        number, reward = len(known), self.reward
        first = np.full(number, len(task), np.int64)
        np.minimum.at(first, task, np.arange(len(task)))
        has = ~np.isnan(reward)
        scored = np.bincount(task[has], minlength=number)
        sums = np.bincount(task[has], reward[has], minlength=number)
        lowest, highest = np.full(number, np.inf), np.full(number, -np.inf)
        np.minimum.at(lowest, task[has], reward[has])
        np.maximum.at(highest, task[has], reward[has])
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums / scored
            spread = np.bincount(task[has], (reward[has] - mean[task[has]]) ** 2, minlength=number)
            variance = spread / scored
        rollouts = np.bincount(task, minlength=number)
        entries = [self.entries[at] for at in first]
        return Groups(task, first, entries, rollouts, scored, mean, variance, lowest, highest)
