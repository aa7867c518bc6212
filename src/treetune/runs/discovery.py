"""Finds the runs of any program: the run at a path, or all runs below a folder.

run = open_run("outputs/rollout_data")       # of Treetune, or of a program in `runs/foreign`
for place in runs_below("outputs"):
    place.path, place.kind, place.open()
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import UsageError
from treetune.runs.folder import TRACES
from treetune.runs.foreign import PROGRAMS
from treetune.runs.foreign.cached_run import KeptRun
from treetune.runs.foreign.program import Program, Stamp
from treetune.runs.plain_files import below, find_fault
from treetune.runs.run import Run, is_run, no_run

_NEAR = 2
"""How many folders deep to look for the only run of a folder: trainers write below the folder that they were given."""
_ENDINGS = (".eval", ".json", ".jsonl", ".parquet")
_NAMED = 5
_MOST_FOLDERS, _DEEPEST = 20_000, 12
"""How many folders to search, and how deep: a home directory has more folders, but no runs that deep."""
_MOST_REFUSED = 20
"""How many files that must not be opened are named."""
UNREAD = "unread"
"""The kind of a file that may be a run but must not be opened to find out."""


class ForeignRun(Run):
    """A run of another program, with the same columns, groups, queries and traces."""

    def __init__(self, path: str | Path, kind: Program, seconds: float | None = None, top: Path | None = None) -> None:
        """`seconds` limits the first read; `follow` continues it. No file outside of `top` is read."""
        self.path, self.kind = Path(path), kind.name
        self._kept = KeptRun(self.path, kind, top)
        self.folder = self._kept.folder
        self._source = self._kept.update(seconds)
        if not self._source.files:
            raise UsageError(
                f"{self.path} contains no run of {kind.name}", remedy="name a run that this program has written"
            )
        self._begin_anew()
        super().follow(seconds)

    def follow(self, seconds: float | None = None) -> int:
        """Reads what the program has written since the last read; returns the number of new rollouts. If the program
        rewrote its files, all rollouts count as new."""
        times, self._source = self._source.times, self._kept.update(seconds)
        if self._source.times != times:
            self._begin_anew()
        return super().follow(seconds)

    @property
    def share_read(self) -> float:
        return min(self._source.share_read, super().share_read)

    @property
    def warnings(self) -> list[str]:
        return [*self._source.warnings, *super().warnings]

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the program records about the run, under the names of Treetune's config."""
        return self._source.config


class RunLocation(msgspec.Struct, frozen=True):
    """The location of a run."""

    path: Path
    kind: str
    """The program that wrote it: `treetune`, `verl`, `trl`, ..."""
    top: Path | None = None
    """The folder that was named; a link that leads out of it is not followed."""
    fault: str = ""
    """Why it must not be opened."""

    def open(self, seconds: float | None = None) -> Run:
        """Opens the run. `seconds` limits the first read of a run that takes long; `follow` continues it."""
        if self.fault:
            raise UsageError(f"{self.path} {self.fault}", remedy="name a regular file, or remove it")
        if self.kind == Run.kind:
            return Run(self.path, seconds)
        return ForeignRun(self.path, self._foreign, seconds, self.top)

    def stamp(self) -> Stamp:
        """The size of its files and the time of the last change: if neither changes, neither does the run. Raises
        FileNotFoundError if it is gone."""
        if self.kind in (Run.kind, UNREAD):
            state = os.stat(self.path / TRACES.file) if self.kind == Run.kind else os.lstat(self.path)
            return state.st_size, state.st_mtime_ns
        with below(self.top or _top_of(self.path)):
            stamps = [self._foreign.stamp(file) for file in self._foreign.files(self.path)]
        if not stamps:
            raise FileNotFoundError(self.path)
        return sum(size for size, _ in stamps), max(time for _, time in stamps)

    @property
    def _foreign(self) -> Program:
        return next(kind for kind in PROGRAMS if kind.name == self.kind)


def open_run(path: str | Path) -> Run:
    """Opens the run at a path, or the only one below it. Warns of lines that cannot be read."""
    path = Path(path).expanduser()
    place = find_run(path)
    if place is None:
        several = [str(each.path) for each in runs_below(path) if not each.fault] if path.is_dir() else []
        if several:
            named = ", ".join(several[:_NAMED]) + (
                f" and {len(several) - _NAMED} more" if len(several) > _NAMED else ""
            )
            raise UsageError(f"{path} has {len(several)} runs below it: {named}", remedy="name one of them")
        raise no_run(path)
    run = place.open()
    for warning in run.warnings:
        warnings.warn(f"{run.path}: {warning}", stacklevel=2)
    return run


def find_run(path: str | Path) -> RunLocation | None:
    """Finds the run at a path, or the only one near below it; None if there is none or more than one."""
    path = Path(path).expanduser()
    if not path.exists():
        return None
    if (place := _at(path, _top_of(path))) is not None or not path.is_dir():
        return place
    found = [place for place in _below(path, _NEAR) if not place.fault]
    return found[0] if len(found) == 1 else None


def runs_below(folder: str | Path) -> list[RunLocation]:
    """Returns all runs at a path or below it, sorted by path. Folders inside a run are not searched."""
    return sorted(walk_runs(folder), key=lambda each: each.path)


def walk_runs(folder: str | Path) -> Iterator[RunLocation]:
    """Yields the same runs as they are found, the nearest first, and files that may be runs but must not be opened."""
    folder = Path(folder).expanduser()
    place = _at(folder, _top_of(folder)) if folder.exists() else None
    return iter([place]) if place is not None else _below(folder, _DEEPEST)


def _top_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _at(path: Path, top: Path) -> RunLocation | None:
    if path.name == TRACES.file:
        path = path.parent
    if is_run(path):
        return RunLocation(path, Run.kind, top)
    with below(top):
        return next((RunLocation(path, kind.name, top) for kind in PROGRAMS if kind.files(path)), None)


def _below(top: Path, depth: int) -> Iterator[RunLocation]:
    """Yields the runs below a folder that is not a run itself, the nearest first. `depth` limits how many folders deep
    to search."""
    folders, looked_at, refused = deque([(top, 1)]), 0, 0
    while folders:
        folder, level = folders.popleft()
        looked_at += 1
        if looked_at > _MOST_FOLDERS:
            found = f"{top} has more than {_MOST_FOLDERS:,} folders: runs deep inside it were not searched"
            warnings.warn(f"{found}. Name a folder closer to them.", stacklevel=2)
            return
        try:
            inside = sorted(os.scandir(folder), key=lambda each: each.name)
        except OSError:
            continue
        for each in inside:
            path = folder / each.name
            if each.name.startswith("."):
                continue
            if each.is_dir(follow_symlinks=False):
                if (place := _at(path, top)) is not None:
                    yield place
                elif level < depth:
                    folders.append((path, level + 1))
            elif each.name.endswith(_ENDINGS) and not each.is_dir() and path.exists():
                if fault := find_fault(path, top):
                    refused += 1
                    if refused <= _MOST_REFUSED:
                        yield RunLocation(path, UNREAD, top, fault)
                elif (place := _at(path, top)) is not None:
                    yield place
