"""A run as data: what `eval` and `serve --traces` have written.

    run = Run("runs/x")
    run.mean_reward, run.groups().df(), run.df(), run.plot()
    for trace in run.traces("failed"):
        print(trace.failure)

Opening one reads its index, not its traces; a run that is still being written can be asked for what is new (`follow`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.config import load_yaml
from treetune.errors import TasksetError, UsageError
from treetune.runs.columns import NUMBERS, TEXTS, Columns, Groups, Mask
from treetune.runs.folder import CONFIG, SUMMARY, TRACES
from treetune.runs.html import page_of
from treetune.runs.images import bring_back
from treetune.runs.index import Entry, read_index
from treetune.runs.plot import Plot, draw
from treetune.runs.query import Query, solved
from treetune.runs.summary import Summary, Tally
from treetune.trace import Trace, decode_trace


def is_run(path: str | Path) -> bool:
    """Whether a path is a folder that holds the traces of a run."""
    return (Path(path) / TRACES.file).is_file()


class Run:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_run(self.path):
            raise UsageError(
                f"{self.path} holds no run", remedy="name a folder that `eval` or `serve --traces` has written"
            )
        self.columns = Columns()
        self._summary: Summary | None = None
        self.follow()

    def follow(self) -> int:
        """Takes up what was written since; gives how many rollouts there are more."""
        entries = self.columns.entries
        return self.columns.extend(read_index(self.path, TRACES.file, entries[-1].end if entries else 0))

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What it ran: `config.yaml`; empty where there is none."""
        file = self.path / CONFIG
        return dict(load_yaml(str(file))) if file.exists() else {}

    @property
    def summary(self) -> Summary:
        """What it amounts to: `summary.json`; where that does not speak of all rollouts, as in a run that is being
        written, the traces are read."""
        if self._summary is None or self._summary.rollouts != len(self):
            with suppress(OSError, msgspec.MsgspecError):
                self._summary = msgspec.json.decode((self.path / SUMMARY).read_bytes(), type=Summary)
        if self._summary is None or self._summary.rollouts != len(self):
            tally = Tally(self.pass_threshold)
            for trace in self.traces():
                tally.add(trace)
            self._summary = tally.summary()
        return self._summary

    @property
    def pass_threshold(self) -> float:
        """The reward from which a rollout counts as solved."""
        return float(self.config.get("pass_threshold", 1.0))

    @property
    def model(self) -> str:
        return str(self.config.get("model") or "")

    @property
    def taskset(self) -> str:
        node = self.config.get("taskset")
        if not isinstance(node, dict):
            return str(node or "")
        return str(node.get("id") or (node.get("custom_cls") or {}).get("name") or "")

    @property
    def mean_reward(self) -> float | None:
        """Over scored rollouts."""
        scored = self.columns.reward[~np.isnan(self.columns.reward)]
        return float(scored.mean()) if len(scored) else None

    def solved(self) -> Mask:
        """Which rollouts count as solved, by the threshold that the run had."""
        return solved(self.columns, self.pass_threshold)

    # One by one

    def select(self, query: str = "") -> list[Entry]:
        """The entries of the rollouts that a query fits (`reward<1 & source=gsm8k "therefore"`)."""
        mask = Query(query).select(self.columns, self.path / TRACES.file)
        return [self.columns.entries[at] for at in np.flatnonzero(mask)]

    def traces(self, query: str = "") -> Iterator[Trace]:
        """Their traces, read as they are asked for."""
        with open(self.path / TRACES.file, "rb") as file:
            for entry in self.select(query):
                yield self._read(file.fileno(), entry)

    def trace(self, name: str | Entry) -> Trace:
        """That of one rollout: an entry, or `UID/NUMBER` with as much of the uid as it takes; `task 3/0` by index."""
        entry = name if isinstance(name, Entry) else self.find(name)
        with open(self.path / TRACES.file, "rb") as file:
            return self._read(file.fileno(), entry)

    def find(self, name: str) -> Entry:
        task, _, number = name.rpartition("/")
        if not task or not number.isdigit():
            raise UsageError(f"{name!r} names no rollout", remedy="write UID/NUMBER, or INDEX/NUMBER: 17/3")
        uid, _, occurrence = task.partition("#")
        found = [
            entry
            for entry in self.columns.entries
            if entry.rollout == int(number)
            and (str(entry.idx) == uid or (len(uid) >= 6 and entry.uid.startswith(uid)))
            and (not occurrence or entry.occurrence == int(occurrence))
        ]
        if not found:
            raise UsageError(f"{self.path} has no rollout {name}", remedy="`treetune show RUN` lists them")
        if len({entry.uid for entry in found}) > 1:
            raise UsageError(f"{name} may be several rollouts", remedy="write more of the uid")
        return found[-1]

    def _read(self, file: int, entry: Entry) -> Trace:
        try:
            return decode_trace(bring_back(os.pread(file, entry.length, entry.offset), self.path))
        except msgspec.MsgspecError as error:
            raise TasksetError(f"{self.path}: the trace of {entry.uid}/{entry.rollout} is damaged: {error}") from None

    # As tables

    def groups(self) -> Groups:
        """One line for each task."""
        return self.columns.groups()

    def table(self) -> dict[str, Any]:
        """Columns by name, one row a rollout."""
        columns = self.columns
        named: dict[str, Any] = {
            name: [getattr(each, field) for each in columns.entries] for name, field in TEXTS.items()
        }
        named |= {name: columns.numbers(name) for name in NUMBERS}
        named |= {name: columns.numbers(name) for name in columns.metrics if name not in named}
        return named

    def df(self) -> Any:
        """A pandas DataFrame, one row a rollout."""
        import pandas as pd

        return pd.DataFrame(self.table())

    # To look at

    def plot(self, kind: str = "rewards") -> Plot:
        """`rewards`, `sources`, `turns`, `groups` or `steps`: a notebook shows it, and `save` writes it."""
        return draw(self.columns, kind)

    def _repr_html_(self) -> str:
        return page_of(self)

    def __repr__(self) -> str:
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.4f}"
        failed = int(np.isnan(self.columns.reward).sum())
        return (
            f"Run({str(self.path)!r}: {self.taskset or 'tasks'} by {self.model or 'a trainer'}, {len(self.groups())} "
            f"tasks, {len(self)} rollouts, mean reward {mean}, {failed} failed)"
        )
