"""Where runs are, of whichever program: one at a path, or all below a folder.

run = open_run("outputs/rollout_data")       # ours, or one of those that `runs/foreign` knows
for place in runs_below("outputs"):
    place.path, place.kind, place.open()
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from treetune.errors import UsageError
from treetune.runs.folder import TRACES
from treetune.runs.foreign import KINDS
from treetune.runs.foreign.kind import Kind, Stamp
from treetune.runs.foreign.run import ForeignRun
from treetune.runs.run import Run, is_run, no_run

_NEAR = 2
"""How many folders deep the one run of a folder is looked for: trainers write below the folder that they were given."""
_ENDINGS = (".eval", ".json", ".jsonl", ".parquet")
_NAMED = 5
_MOST_FOLDERS = 20_000
"""How many folders are looked at: somebody's home has more, and no runs at its far ends."""


class Place(msgspec.Struct, frozen=True):
    """Where a run is."""

    path: Path
    kind: str
    """Which program wrote it: `treetune`, `verl`, `trl`, ..."""

    def open(self, seconds: float | None = None) -> Run:
        """`seconds` is how long to read at first, of a run that takes long; `follow` goes on."""
        if self.kind == Run.kind:
            return Run(self.path, seconds)
        return ForeignRun(self.path, self._foreign, seconds)

    def stamp(self) -> Stamp:
        """The size of its files and when the last was changed: while it stays the same, so does the run. Raises
        FileNotFoundError where it is gone."""
        if self.kind == Run.kind:
            told = os.stat(self.path / TRACES.file)
            return told.st_size, told.st_mtime_ns
        stamps = [self._foreign.stamp(file) for file in self._foreign.files(self.path)]
        if not stamps:
            raise FileNotFoundError(self.path)
        return sum(size for size, _ in stamps), max(time for _, time in stamps)

    @property
    def _foreign(self) -> Kind:
        return next(kind for kind in KINDS if kind.name == self.kind)


def open_run(path: str | Path) -> Run:
    """The run at a path, or the only one below it. What could not be read of it is a warning."""
    path = Path(path).expanduser()
    place = find_run(path)
    if place is None:
        several = [str(each.path) for each in runs_below(path)] if path.is_dir() else []
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


def find_run(path: str | Path) -> Place | None:
    """The run at a path, or the only one near below it; None where there is none, or several."""
    path = Path(path).expanduser()
    if not path.exists():
        return None
    if (place := _at(path)) is not None or not path.is_dir():
        return place
    below = list(_below(path, _NEAR))
    return below[0] if len(below) == 1 else None


def runs_below(folder: str | Path) -> list[Place]:
    """All runs at a path or below it, by path. Nothing below a run is looked at."""
    folder = Path(folder).expanduser()
    place = _at(folder) if folder.exists() else None
    return [place] if place is not None else sorted(_below(folder, None), key=lambda each: each.path)


def _at(path: Path) -> Place | None:
    if path.name == TRACES.file:
        path = path.parent
    if is_run(path):
        return Place(path, Run.kind)
    return next((Place(path, kind.name) for kind in KINDS if kind.files(path)), None)


def _below(top: Path, depth: int | None) -> Iterator[Place]:
    """Runs below a folder that is none itself, the nearest first; `depth` is how many folders deep they may lie."""
    folders, looked_at = deque([(top, 1)]), 0
    while folders:
        folder, level = folders.popleft()
        looked_at += 1
        if looked_at > _MOST_FOLDERS:
            found = f"{top} has more than {_MOST_FOLDERS:,} folders: runs that lie deep in it were not looked for"
            warnings.warn(f"{found}. Name a folder nearer to them.", stacklevel=2)
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
                if (place := _at(path)) is not None:
                    yield place
                elif depth is None or level < depth:
                    folders.append((path, level + 1))
            elif each.name.endswith(_ENDINGS) and each.is_file() and (place := _at(path)) is not None:
                yield place
