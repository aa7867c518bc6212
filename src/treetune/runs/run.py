"""A run as data, as `eval` and `serve --traces` write it.

    run = Run("runs/x")
    run.mean_reward, run.groups().df(), run.df()
    for trace in run.traces("failed"):
        print(trace.failure)

Opening a run reads its index, not its traces; `follow` reads what a running program has added. A long run without an
index can be opened in part: `Run("runs/x", seconds=0.5)`, and `follow(seconds=0.5)` continues.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from treetune.config.structs import load_yaml
from treetune.config.trust import CONFIG, SUMMARY
from treetune.core.task import Task
from treetune.core.trace import Trace, decode_trace
from treetune.errors import TasksetError, UsageError, did_you_mean
from treetune.runs.annotations import Key, Mark, key_of, marks_stamp, read_marks
from treetune.runs.columns import NUMBERS, TEXTS, Columns, Entries, Groups, Mask
from treetune.runs.entry import Entry, pread_line
from treetune.runs.folder import TRACES
from treetune.runs.index import IndexReader
from treetune.runs.plain_files import UNREADABLE, bring_back, find_fault, read_regular
from treetune.runs.query import Query, solved
from treetune.runs.summary import Summary, Tally

T = TypeVar("T")
TypeOf = Callable[[Task], type[Task]]
_NAMED = 5
"""The maximum number of runs that a message names."""
_LARGEST_CONFIG = 1 << 20
"""In bytes; YAML is slow to read."""


def is_run(path: str | Path) -> bool:
    """Whether a path is a folder that holds the traces of a run."""
    return (Path(path) / TRACES.file).is_file()


def means_run(path: Path) -> bool:
    """Whether a path without a run was intended as a run: it contains runs, or it does not exist but has runs next to
    it."""
    if ":" in path.name:  # file.py:Name
        return False
    return bool(_runs_in(path)) or (not path.exists() and path.parent != Path() and bool(_runs_in(path.parent)))


def no_run(path: Path, *, own: bool = False) -> UsageError:
    """The error for a path without a run, naming runs near it. With `own`, only a run folder of Treetune is
    accepted."""
    problem = f"{path} contains no run" if path.exists() else f"there is no run {path}"
    if own and is_run(path):
        problem = f"{path} has no {CONFIG}, which describes what was run"
    remedy = "name a folder that `eval` or `serve --traces` has written"
    remedy += "" if own else ", or a run of verl, TRL, SkyRL or Inspect"
    if within := _runs_in(path):
        remedy = f"name one of the runs in it: {', '.join(within[:_NAMED])}{', ...' if len(within) > _NAMED else ''}"
    others = [other for other in _runs_in(path.parent) if other != str(path)]
    return UsageError(f"{problem}{did_you_mean(str(path), others)}", remedy=remedy)


def _runs_in(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.iterdir()) if is_run(path)] if folder.is_dir() else []


def load_config(folder: Path) -> dict[str, Any]:
    """Loads the `config.yaml` of a run folder, which anyone may have written; empty if there is none."""
    file = folder / CONFIG
    if not file.exists():
        return {}
    if fault := find_fault(file, folder, _LARGEST_CONFIG):
        raise TasksetError(f"{file} {fault}", remedy="restore the file that `eval` wrote, or remove it")
    return load_yaml(file)


def read_summary(folder: Path) -> Summary | None:
    """Reads the `summary.json` of a run folder; None before the run has ended."""
    try:
        return msgspec.json.decode(read_regular(folder / SUMMARY), type=Summary)
    except (OSError, *UNREADABLE):
        return None


class Run:
    kind = "treetune"
    """The program that wrote it; `runs/foreign` has those of other programs."""

    def __init__(self, path: str | Path, seconds: float | None = None) -> None:
        """`seconds` limits the first read of a long run without an index."""
        self.path = self.folder = Path(path)  # where its files are; elsewhere for a run of another program
        if not is_run(self.path):
            raise no_run(self.path)
        self._begin_anew()
        self.follow(seconds)

    def _begin_anew(self) -> None:
        self.columns, self._reader = Columns(), IndexReader(self.folder)
        self._summary: Summary | None = None
        self._marks: dict[Key, Mark] = {}
        self._marked: object = None
        """The state of the marks and rollouts from which the column was built."""

    def follow(self, seconds: float | None = None) -> int:
        """Reads what was written since the last read, for about `seconds` at most; returns the number of new rollouts.
        If the run was resumed or rescored, all of it is read again, into new `columns`."""
        if self._reader.replaced:
            self._begin_anew()
        until = None if seconds is None else time.monotonic() + seconds
        before = len(self.columns)
        for entries in self._reader.read():
            self.columns.extend(entries)
            if until is not None and time.monotonic() >= until:
                break
        return len(self.columns) - before

    @property
    def warnings(self) -> list[str]:
        """Warnings about unreadable and duplicate lines."""
        return self._reader.damage.warnings_of(TRACES.file)

    @property
    def share_read(self) -> float:
        """The share of the run that was read; 1.0 is all."""
        try:
            size = os.stat(self.folder / TRACES.file).st_size
        except FileNotFoundError:
            return 1.0
        return min(1.0, self._reader.end / size) if size else 1.0

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its `config.yaml`; empty if there is none."""
        return load_config(self.folder)

    @property
    def summary(self) -> Summary:
        """Its figures: those of `summary.json`, or those of its traces if that lacks rollouts, as it does while a run
        is being written."""
        if self._summary is None or self._summary.rollouts != len(self):
            self._summary = read_summary(self.folder)
        if self._summary is None or self._summary.rollouts != len(self):
            tally = Tally(self.pass_threshold)
            for trace in self.traces():
                tally.add(trace)
            self._summary = tally.summary()
        return msgspec.structs.replace(self._summary, warnings=[*self.warnings, *self._summary.warnings])

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
        """The mean over scored rollouts."""
        scored = self.columns.reward[~np.isnan(self.columns.reward)]
        return float(scored.mean()) if len(scored) else None

    def solved(self) -> Mask:
        """Which rollouts count as solved, by the threshold of the run."""
        return solved(self.columns, self.pass_threshold)

    # Single rollouts

    def read_marks(self) -> dict[Key, Mark]:
        """Reads the marks of its rollouts, which also become the column `mark`."""
        stamp = marks_stamp(self.path), len(self.columns)
        if self._marked != stamp:
            self._marks, self._marked = read_marks(self.path), stamp
            columns = self.columns
            uids = {mark.uid for mark in self._marks.values()}
            codes = [code for code, uid in enumerate(columns.texts("uid")) if uid in uids] if uids else []
            rows = np.flatnonzero(np.isin(columns.codes("uid"), codes)).tolist() if codes else []
            found = ((row, self._marks.get(key_of(columns.entry(row)))) for row in rows)
            if self._marks or columns.texts("mark"):
                columns.note("mark", {row: mark.mark or "comment" for row, mark in found if mark is not None})
        return self._marks

    def fits(self, query: str = "") -> Mask:
        """Returns which rollouts a query selects (`reward<1 & source=gsm8k "therefore"`)."""
        if "mark" in query:
            self.read_marks()
        return Query(query).select(self.columns, self.folder / TRACES.file)

    def select(self, query: str = "") -> Entries:
        """Returns the entries of the rollouts that a query selects."""
        return Entries(self.columns, np.flatnonzero(self.fits(query)))

    def traces(self, query: str = "") -> Iterator[Trace]:
        """Reads the traces of the rollouts that a query selects, one by one. A damaged trace is left out with a
        warning."""
        with open(self.folder / TRACES.file, "rb", buffering=0) as file:
            for entry in self.select(query):
                try:
                    yield self._trace(file.fileno(), entry)
                except TasksetError as error:
                    warnings.warn(f"{error.message}; it is left out", stacklevel=2)

    def trace(self, name: str | Entry, type_of: TypeOf | None = None) -> Trace:
        """Reads the trace of one rollout: an entry; `UID/NUMBER`, where a prefix of the uid suffices; or `task 3/0` by
        index. `type_of`, usually from a taskset, returns the concrete type of its task."""
        entry = name if isinstance(name, Entry) else self.find(name)
        with open(self.folder / TRACES.file, "rb", buffering=0) as file:
            return self._trace(file.fileno(), entry, type_of)

    def _trace(self, file: int, entry: Entry, type_of: TypeOf | None = None) -> Trace:
        line = bring_back(pread_line(file, entry), self.folder)
        return self.decode(entry, line, partial(decode_trace, type_of=type_of))

    def trace_without_tokens(self, row: int) -> Trace:
        """Reads the trace of a row without its tokens, which are most of a line, and without its images."""
        entry = self.columns.entry(row)
        return self.decode(entry, self.read_line(entry, tokens=False, images=False), decode_trace)

    def read_line(self, entry: Entry, *, tokens: bool = True, images: bool = True) -> bytes:
        """Reads the line of a trace as it was written, except for the parts that are left out. Images are separate
        files."""
        with open(self.folder / TRACES.file, "rb", buffering=0) as file:
            line = pread_line(file.fileno(), entry, tokens)
        return bring_back(line, self.folder) if images else line

    def decode(self, entry: Entry, line: bytes, decode: Callable[[bytes], T]) -> T:
        """Decodes a line. Raises TasksetError if it is damaged."""
        try:
            return decode(line)
        except UNREADABLE as error:
            where = f"the trace of {entry.uid[:12]}/{entry.rollout}, at byte {entry.offset:,} of {TRACES.file}"
            raise TasksetError(f"{self.path}: {where}, is damaged: {error}", remedy="remove that line") from None

    def find(self, name: str) -> Entry:
        return self.columns.entry(self.row(name))

    def row(self, name: str) -> int:
        """The row of the rollout with this name."""
        task, _, number = name.rpartition("/")
        if not task or not number.isdigit():
            raise UsageError(f"{name!r} does not name a rollout", remedy="write UID/NUMBER, or INDEX/NUMBER: 17/3")
        columns, (uid, _, occurrence) = self.columns, task.partition("#")
        meant = [len(uid) >= 6 and text.startswith(uid) for text in columns.texts("uid")]
        found = np.array([*meant, False], bool)[columns.codes("uid")]
        if uid.isdigit():
            found |= columns.numbers("task") == int(uid)
        found &= columns.numbers("rollout") == int(number)
        if occurrence.isdigit():
            found &= columns.places("occurrence") == int(occurrence)
        rows = np.flatnonzero(found)
        if not len(rows):
            raise UsageError(f"{self.path} has no rollout {name}", remedy="`treetune show RUN` lists them")
        if len(np.unique(columns.codes("uid")[rows])) > 1:
            raise UsageError(f"{name} matches several rollouts", remedy="write more of the uid")
        return int(rows[-1])

    # As tables

    def groups(self) -> Groups:
        """The rollouts by task, one line per task."""
        return self.columns.groups()

    def table(self) -> dict[str, Any]:
        """Columns by name, one row per rollout."""
        columns = self.columns
        named: dict[str, Any] = {}
        for name in TEXTS:
            texts: list[str | None] = [*columns.texts(name), None]  # the last is for a missing text: code -1
            named[name] = [texts[code] for code in columns.codes(name).tolist()]
        named |= {name: columns.numbers(name) for name in NUMBERS}
        named |= {name: columns.numbers(name) for name in columns.metrics if name not in named}
        return named

    def df(self) -> Any:
        """A pandas DataFrame, one row per rollout."""
        import pandas as pd

        return pd.DataFrame(self.table())

    def push_to_hub(self, repo: str, *, private: bool = False) -> str:
        """Pushes the run to a dataset of the hub, `user/name`: a row for each rollout, and its files. Returns the
        address."""
        from treetune.runs.push import AboutRun, push_run

        about = AboutRun(self.kind, self.taskset, self.model, self.pass_threshold, self.summary)
        return push_run(repo, about, self.folder, self.traces(), self.columns.metrics, private)

    def __repr__(self) -> str:
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.4f}"
        failed = int(np.isnan(self.columns.reward).sum())
        return (
            f"Run({str(self.path)!r}: {self.taskset or 'tasks'} by {self.model or 'a trainer'}, {len(self.groups())} "
            f"tasks, {len(self)} rollouts, mean reward {mean}, {failed} failed)"
        )
