"""The runs that are shown: found below the paths that were named, opened when they are asked for, followed as they
grow.

    runs = RunList([Path("runs")])
    with runs[0].open() as run:
        run.mean_reward

A run is known by its place in the list, which stays the same for as long as the list lives. Of the runs that were
opened the last are kept, as many as hold some hundred thousand rollouts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from treetune.errors import TreetuneError, UsageError
from treetune.runs.folder import SUMMARY, TRACES
from treetune.runs.marks import Key, Mark, key_of, read_marks
from treetune.runs.run import Run, is_run

_DEEPEST = 5
"""Folders within each other that are looked into."""
_MOST_ROLLOUTS = 300_000
"""Of all runs that are kept open."""
_READ_SECONDS = 0.5
"""How long a run is read until what there is of it is shown; the rest follows."""
_SLICE_SECONDS = 0.2
_FRESH_SECONDS = 15.0
"""So long after its last line a run without a summary counts as being written, where locks cannot be seen."""

Stamp = tuple[int, int]


class ShownRun:
    """A run of the list. It is read by one thread at a time."""

    def __init__(self, id: int, path: Path, name: str) -> None:
        self.id, self.path, self.name = id, path, name
        self.kind = "treetune"
        self.used = 0.0
        """When it was last asked for."""
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._reader: threading.Thread | None = None
        self._marks: dict[Key, Mark] = {}
        self._marked: object = None
        """Which marks of which rollouts its columns have."""

    @contextmanager
    def open(self, follow: bool = True) -> Iterator[Run]:
        """The run with what was written since; others wait meanwhile."""
        with self._lock:
            self.used = time.monotonic()
            try:
                self.stamp()  # raises where it is gone
                if self._run is None:
                    self._run = Run(self.path, seconds=_READ_SECONDS)
                    self._read_on(self._run, len(self._run))
                elif follow and self._reader is None:
                    self._read_on(self._run, self._run.follow(_READ_SECONDS))
                self._note_marks(self._run)
                yield self._run
            except FileNotFoundError:
                self._run = None
                raise UsageError(f"{self.path} is gone", remedy="was it moved or removed?") from None

    def _read_on(self, run: Run, new: int) -> None:
        """Reads the rest of a long run, a little at a time, while what there is of it is shown. A last line that was
        cut short is no rest: nothing is new then."""

        def read() -> None:
            more = new
            with suppress(OSError, TreetuneError):
                while more and self._run is run and run.share_read < 1.0:
                    with self._lock:
                        more = run.follow(_SLICE_SECONDS)
                    time.sleep(_SLICE_SECONDS / 10)  # others want it too
            self._reader = None

        if new and run.share_read < 1.0:
            self._reader = threading.Thread(target=read, name="treetune view", daemon=True)
            self._reader.start()

    def close(self) -> None:
        with self._lock:
            self._run = self._marked = None

    @property
    def share_read(self) -> float:
        """How much of it is known; 1.0 is all."""
        run = self._run
        return run.share_read if run is not None and self._reader is not None else 1.0

    @property
    def rollouts(self) -> int | None:
        """How many are known; None where it is not open."""
        run = self._run
        return None if run is None else len(run)

    def stamp(self) -> Stamp:
        """What changes when something is written to it."""
        state = os.stat(self.path / TRACES.file)
        return state.st_size, state.st_mtime_ns

    def mark_of(self, run: Run, at: int) -> Mark | None:
        return self._marks.get(key_of(run.columns.entries[at])) if self._marks else None

    def forget_marks(self) -> None:
        self._marked = None

    def _note_marks(self, run: Run) -> None:
        if self._marked == (id(run.columns), len(run)):
            return
        self._marks = read_marks(self.path)
        self._marked = id(run.columns), len(run)
        columns = run.columns
        noted: dict[int, str] = {}
        uids = {mark.uid for mark in self._marks.values()}
        if uids:
            texts, codes = columns.texts("uid"), columns.codes("uid")
            for at, code in enumerate(codes.tolist()):
                if texts[code] in uids and (mark := self._marks.get(key_of(columns.entries[at]))) is not None:
                    noted[at] = mark.mark or "comment"
        columns.note("mark", noted)


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
        self._close_others(id)
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

    def _close_others(self, id: int) -> None:
        """Those that nobody has looked at for the longest, where too much is open."""
        others = sorted((run for run in self if run.rollouts and run.id != id), key=lambda run: -run.used)
        held = self._runs[id].rollouts or 0
        for run in others:
            held += run.rollouts or 0
            if held > _MOST_ROLLOUTS:
                run.close()


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
        with os.scandir(top) as entries:
            folders = sorted(
                entry.name for entry in entries if entry.is_dir() and not entry.name.startswith((".", "_"))
            )
    except OSError:  # no folder, or not ours to read
        return
    for name in folders:
        yield from _runs_below(top / name, depth + 1)


class Writers:
    """Which runs are being written just now: those whose lock somebody holds."""

    def __init__(self) -> None:
        self._locked: set[int] | None = None
        with suppress(OSError), open("/proc/locks") as file:
            self._locked = {int(line.split()[5].rpartition(":")[2]) for line in file if " FLOCK " in line}

    def has(self, path: Path) -> bool:
        try:
            if self._locked is not None:
                return os.stat(path / ".lock").st_ino in self._locked
            fresh = time.time() - os.stat(path / TRACES.file).st_mtime < _FRESH_SECONDS
            return fresh and not (path / SUMMARY).exists()
        except OSError:
            return False
