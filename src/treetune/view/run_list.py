"""The runs that are shown: found below the paths that were named, opened when they are asked for, followed as they
grow.

    runs = RunList([Path("runs")])
    with runs[0].open() as run:
        run.mean_reward

A run is known by its place in the list, which stays the same for as long as the list lives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treetune.errors import UsageError
from treetune.runs.folder import TRACES
from treetune.runs.run import Run, is_run

_DEEPEST = 5
"""Folders within each other that are looked into."""


class ShownRun:
    """A run of the list. It is read by one thread at a time."""

    def __init__(self, id: int, path: Path, name: str) -> None:
        self.id, self.path, self.name = id, path, name
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._file: tuple[int, int] | None = None
        """Which file the traces were read from: another one has taken its place where a run was resumed or scored
        again."""

    @contextmanager
    def open(self) -> Iterator[Run]:
        """The run with what was written since; others wait meanwhile."""
        with self._lock:
            try:
                yield self._follow()
            except FileNotFoundError as error:
                raise UsageError(f"{self.path} is gone: {error}", remedy="was it moved or removed?") from None

    def stamp(self) -> tuple[int, int]:
        """What changes when something is written to it."""
        state = os.stat(self.path / TRACES.file)
        return state.st_size, state.st_mtime_ns

    def _follow(self) -> Run:
        state = os.stat(self.path / TRACES.file)
        file = state.st_dev, state.st_ino
        entries = self._run.columns.entries if self._run is not None else []
        if self._run is None or file != self._file or (entries and entries[-1].end > state.st_size):
            self._run, self._file = Run(self.path), file
        else:
            self._run.follow()
        return self._run


class RunList:
    def __init__(self, paths: Sequence[Path]) -> None:
        """Paths of runs, and of folders with runs in them, at any depth."""
        self._paths = [Path(path) for path in paths]
        self._lock = threading.Lock()
        self._runs: list[ShownRun] = []
        self._known: set[Path] = set()
        for path in self._paths:
            if not path.exists():
                raise UsageError(f"there is no {path}", remedy="name a run folder, or a folder of runs")
        self.look()
        if not self._runs and any(path.is_file() for path in self._paths):
            raise UsageError(f"{self._paths[0]} is no run", remedy="name a folder that `treetune eval` has written")

    @property
    def place(self) -> str:
        """What was named."""
        return ", ".join(map(str, self._paths))

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[ShownRun]:
        return iter(list(self._runs))

    def __getitem__(self, id: int) -> ShownRun:
        if not 0 <= id < len(self._runs):
            raise UsageError(f"there is no run {id}", remedy=f"there are {len(self._runs)}: look at the list again")
        return self._runs[id]

    def look(self) -> bool:
        """Looks for runs again; gives whether there are new ones."""
        found = [(path, top) for top in self._paths for path in _runs_below(top)]
        with self._lock:
            new = [(path, top) for path, top in found if path not in self._known]
            for path, top in new:
                if path not in self._known:
                    self._known.add(path)
                    self._runs.append(ShownRun(len(self._runs), path, _name(path, top, len(self._paths) > 1)))
        return bool(new)


def _name(path: Path, top: Path, several: bool) -> str:
    """Short, and not that of another one."""
    if path == top:
        return str(path) if several else path.resolve().name
    return str(path.relative_to(top.parent if several else top))


def _runs_below(top: Path, depth: int = 0) -> Iterator[Path]:
    if is_run(top):
        yield top
    if depth == _DEEPEST:
        return
    try:
        folders = sorted(
            entry.name for entry in os.scandir(top) if entry.is_dir() and not entry.name.startswith((".", "__"))
        )
    except OSError:  # no folder, or not ours to read
        return
    for name in folders:
        yield from _runs_below(top / name, depth + 1)
