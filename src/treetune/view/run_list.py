"""The runs that are shown: found below the given paths, opened on demand, and followed as they grow.

    runs = RunList([Path("runs")])
    with runs[0].open() as run:
        run.mean_reward

A run is identified by its position in the list, which stays the same as long as the list exists. Recently used runs
stay open, up to a few hundred thousand rollouts in total.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from treetune.config.trust import SUMMARY
from treetune.errors import TreetuneError, UsageError
from treetune.runs.discovery import RunLocation, find_run, walk_runs
from treetune.runs.run import Run, is_run

_MOST_ROLLOUTS = 300_000
"""The most rollouts of all open runs together."""
_READ_SECONDS = 0.5
"""How long a run is read before its first part is shown."""
_SLICE_SECONDS = 0.2
_FRESH_SECONDS = 60.0
"""How long after its last line a run without a summary counts as being written, if locks cannot be read."""
_LOOK_SECONDS, _LOOK_SHARE = 0.5, 0.1
"""The longest duration of one search for new runs, and the share of time that all searches may take. The next search
continues where the last one stopped."""

_LOCK = re.compile(r"^\d+: FLOCK .* \w+:\w+:(\d+) ", re.M)
"""A line of /proc/locks: a lock that a process holds on a file, which is named by its inode."""

GONE: ContextVar[threading.Event | None] = ContextVar("gone", default=None)
"""Set once the client has disconnected: a call that is still waiting for a run is then not answered."""
Stamp = tuple[int, int]


class ShownRun:
    """A run in the list. Only one thread at a time reads it."""

    def __init__(self, id: int, place: RunLocation, name: str) -> None:
        self.id, self.name = id, name
        self.place, self.path, self.kind = place, place.path, place.kind
        self.used = 0.0
        """When it was last requested."""
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._reader: threading.Thread | None = None

    @contextmanager
    def open(self, follow: bool = True) -> Iterator[Run]:
        """Opens the run and reads what was written since the last time; other threads wait meanwhile."""
        with self._lock:
            if (gone := GONE.get()) is not None and gone.is_set():
                raise UsageError("the client has disconnected")
            self.used = time.monotonic()
            try:
                self.stamp()  # raises if the run is gone
                if self._run is None:
                    self._run = self.place.open(_READ_SECONDS)
                    self._read_on(self._run, len(self._run))
                elif follow and self._reader is not None:
                    self._run.follow(0.0)  # reads a little; the thread reads the rest
                elif follow:
                    self._read_on(self._run, self._run.follow(_READ_SECONDS))
                self._run.read_marks()
                yield self._run
            except FileNotFoundError:
                self._run = None
                raise UsageError(f"{self.path} is gone", remedy="was it moved or removed?") from None

    def _read_on(self, run: Run, new: int) -> None:
        """Reads the rest of a long run in a thread, a little at a time, while its first part is shown. An incomplete
        last line is never read."""

        def read() -> None:
            more = new
            with suppress(OSError, TreetuneError):
                while more and self._run is run and run.share_read < 1.0:
                    with self._lock:
                        more = run.follow(_SLICE_SECONDS)
                    time.sleep(_SLICE_SECONDS / 10)  # so that other calls get the lock
            self._reader = None

        if new and run.share_read < 1.0:
            self._reader = threading.Thread(target=read, name="treetune view", daemon=True)
            self._reader.start()

    def close(self) -> None:
        """Closes the run unless a thread is using it."""
        if self._lock.acquire(blocking=False):
            self._run = None
            self._lock.release()

    @property
    def share_read(self) -> float:
        """The share of the run that was read; 1.0 is all."""
        run = self._run
        return run.share_read if run is not None and self._reader is not None else 1.0

    @property
    def rollouts(self) -> int | None:
        """How many rollouts were read; None if the run is not open."""
        run = self._run
        return None if run is None else len(run)

    @property
    def is_own(self) -> bool:
        """Whether Treetune wrote it."""
        return self.kind == Run.kind

    def stamp(self) -> Stamp:
        """A value that changes when something is written to the run. Raises FileNotFoundError if the run is gone."""
        return self.place.stamp()


class RunList:
    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths` are runs, or folders that contain runs at any depth."""
        self._paths = [Path(path) for path in paths]
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._runs: list[ShownRun] = []
        self._known: set[Path] = set()
        self._walk: Iterator[tuple[Path, RunLocation]] = iter(())
        for path in self._paths:
            if not path.exists():
                raise UsageError(f"there is no {path}", remedy="name a run folder, or a folder of runs")
            if path.is_file() and find_run(path) is None:
                raise UsageError(f"{path} is no run", remedy="name a run folder, a folder of runs, or a file of one")
        self.look()

    @property
    def place(self) -> str:
        """The paths that were given."""
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

    def look(self, now: bool = False) -> bool:
        """Looks for new runs, at once with `now`, otherwise only from time to time; returns whether there are any. A
        folder with very many folders is searched in several steps."""
        with self._lock:
            began = time.monotonic()
            if began < self._next_look and not now:
                return False
            found: list[tuple[Path, RunLocation]] = []
            for top, place in self._go_on():
                if (known := place.path.absolute() if place.fault else place.path.resolve()) not in self._known:
                    self._known.add(known)
                    found.append((top, place))
                if time.monotonic() - began > _LOOK_SECONDS:
                    break
            for top, place in sorted(found, key=lambda each: (self._paths.index(each[0]), each[1].path)):
                name = _name(place.path, top, len(self._paths) > 1)
                self._runs.append(ShownRun(len(self._runs), place, name))
            self._next_look = began + (time.monotonic() - began) / _LOOK_SHARE
            return bool(found)

    def _go_on(self) -> Iterator[tuple[Path, RunLocation]]:
        """Continues an interrupted walk over the folders, or starts a new one."""
        rest = next(self._walk, None)
        if rest is not None:
            yield rest
        else:
            self._walk = ((top, place) for top in self._paths for place in _places(top))
        yield from self._walk

    def _close_others(self, id: int) -> None:
        """Closes the least recently used runs if too much is open."""
        others = sorted((run for run in self if run.rollouts and run.id != id), key=lambda run: -run.used)
        held = self._runs[id].rollouts or 0
        for run in others:
            held += run.rollouts or 0
            if held > _MOST_ROLLOUTS:
                run.close()


def _name(path: Path, top: Path, several: bool) -> str:
    """The name of a run in the list."""
    if path == top or not path.is_relative_to(top):
        return str(path) if several else path.resolve().name
    return str(path.relative_to(top.parent if several else top))


def _places(top: Path) -> Iterator[RunLocation]:
    """The runs at a path or below it, including those inside a run folder: `rescored`, or a server's `earlier` ones."""
    for place in walk_runs(top):
        yield place
        if place.kind == Run.kind:
            with suppress(OSError), os.scandir(place.path) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
                yield from (RunLocation(place.path / name, Run.kind) for name in names if is_run(place.path / name))


class Writers:
    """Finds which runs are being written right now: those whose lock a process holds."""

    def __init__(self) -> None:
        self._locked: set[int] | None = None
        with suppress(OSError), open("/proc/locks") as file:
            self._locked = {int(inode) for inode in _LOCK.findall(file.read())}

    def has(self, shown: ShownRun) -> bool:
        try:
            if shown.is_own and self._locked is not None:
                return os.stat(shown.path / ".lock").st_ino in self._locked
            fresh = time.time() - shown.stamp()[1] / 1e9 < _FRESH_SECONDS
            return fresh and not (shown.is_own and (shown.path / SUMMARY).exists())
        except OSError:
            return False
