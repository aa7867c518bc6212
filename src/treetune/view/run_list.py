"""The runs that are shown: found below the given paths, opened on demand, and followed as they grow; and the line of
each run in the list.

    runs = RunList([Path("runs")])
    with runs[0].open() as run:
        run.mean_reward
    Overviews(runs).rows()        # returns at once; unknown lines are `pending` and built meanwhile

A run is identified by its position in the list, which stays the same as long as the list exists. Recently used runs
stay open, up to a few hundred thousand rollouts in total. A folder may hold hundreds of runs, and each must be read to
the end for its line, so lines are cached by the size and modification time of the traces, also on disk.
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
from typing import Any

import msgspec

from treetune.config.trust import SUMMARY
from treetune.errors import TreetuneError, UsageError, reason_of
from treetune.runs.annotations import read_tags
from treetune.runs.discovery import RunLocation, find_run, walk_runs
from treetune.runs.plain_files import UNREADABLE, read_regular
from treetune.runs.run import Run, is_run
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically
from treetune.view.figures import NOTHING, overview

_MOST_ROLLOUTS = 300_000
"""The maximum number of rollouts of all open runs together."""
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
                raise UsageError(f"{path} is not a run", remedy="name a run folder, a folder of runs, or a file of one")
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
            raise UsageError(f"there is no run {id}", remedy=f"there are {len(self._runs)}: reload the list")
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


# The line of each run


_WAIT_SECONDS = 0.7
"""How long the list waits for lines that are not known yet."""
_FEW = 3
"""Up to this many runs stay open for the next call; for more runs, only the lines are cached."""
_VERSION = 1
"""The version of the format of a line."""
_OF_A_PART: Stamp = (-1, -1)
"""The stamp of a line whose run was not read to the end yet."""


class _KeptRow(msgspec.Struct):
    version: int
    path: str
    stamp: Stamp
    row: dict[str, Any]


class Overviews:
    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._folder = default_cache_dir() / "views"
        self._known: dict[int, tuple[Stamp, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The lines of all runs that still exist."""
        self._make_all()
        writers = Writers()
        rows = (self.row(shown, writers, wait=False) for shown in self._runs)
        return [row for row in rows if row is not None]

    def row(self, shown: ShownRun, writers: Writers | None = None, wait: bool = True) -> dict[str, Any] | None:
        """The line of a run; None if the run is gone. Without `wait` it may be `pending`."""
        try:
            stamp = shown.stamp()
            found = self._find(shown, stamp)
            if found is None and wait:
                found = self._make(shown, stamp)
        except OSError:
            return None
        about = {"id": shown.id, "name": shown.name, "path": str(shown.path), "kind": shown.kind}
        live = (writers or Writers()).has(shown)
        if found is None:  # the last known line, or the summary's figures
            known = self._known.get(shown.id)
            found = known[1] if known is not None else _row_of_summary(shown)
        return {**about, **found, "live": live, "tags": read_tags(shown.path)}

    def has_changed(self, shown: ShownRun, rollouts: int) -> bool:
        """Whether its line is out of date, or has another number of rollouts."""
        known = self._known.get(shown.id)
        return known is None or known[0] != shown.stamp() or known[1]["rollouts"] != rollouts

    # Building the lines

    def _find(self, shown: ShownRun, stamp: Stamp) -> dict[str, Any] | None:
        known = self._known.get(shown.id)
        if known is not None and known[0] == stamp:
            return known[1]
        if (known is None or known[0] == _OF_A_PART) and (kept := self._read(shown, stamp)) is not None:
            self._known[shown.id] = stamp, kept
            return kept
        return None

    def _make(self, shown: ShownRun, stamp: Stamp) -> dict[str, Any]:
        row: dict[str, Any]
        try:
            if shown.rollouts is None and len(self._runs) > _FEW:
                row = {**_line_of(shown.place.open()), "read": 1.0}  # opened only for this, and not kept open
            else:
                with shown.open() as run:
                    row = {**_line_of(run), "read": shown.share_read}
        except OSError:
            raise  # the run is gone
        except Exception as error:  # a fault in one run must not hide the others
            why = reason_of(error)
            row = {**_row_of_summary(shown), "pending": False, "read": 1.0, "error": why}
        is_whole = row["read"] == 1.0
        self._known[shown.id] = stamp if is_whole else _OF_A_PART, row
        if is_whole and "error" not in row:
            self._keep(shown, stamp, row)
        return row

    def _make_all(self) -> None:
        """Builds the missing lines in a thread, and briefly waits for it."""
        until = time.monotonic() + _WAIT_SECONDS
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, name="treetune view", daemon=True)
                self._worker.start()
        self._worker.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Builds the missing lines. Runs of other programs come last, because reading them takes longer."""
        for shown in sorted(self._runs, key=lambda shown: not shown.is_own):
            with suppress(OSError):
                stamp = shown.stamp()
                if self._find(shown, stamp) is None:
                    self._make(shown, stamp)

    # On disk

    def _file(self, shown: ShownRun) -> Path:
        return self._folder / f"{digest(str(shown.path.resolve()))}.json"

    def _read(self, shown: ShownRun, stamp: Stamp) -> dict[str, Any] | None:
        with suppress(OSError, msgspec.MsgspecError):
            kept = msgspec.json.decode(self._file(shown).read_bytes(), type=_KeptRow)
            if (kept.version, kept.path, kept.stamp) == (_VERSION, str(shown.path.resolve()), stamp):
                return kept.row
        return None

    def _keep(self, shown: ShownRun, stamp: Stamp, row: dict[str, Any]) -> None:
        kept = _KeptRow(_VERSION, str(shown.path.resolve()), stamp, row)
        with suppress(OSError):  # only makes the next start slower
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(shown), msgspec.json.encode(kept))


def _line_of(run: Run) -> dict[str, Any]:
    """The overview of a run, with an error if lines could not be read."""
    return {**overview(run), **({"error": run.warnings[0]} if run.warnings else {})}


def _row_of_summary(shown: ShownRun) -> dict[str, Any]:
    """The figures in its summary, if there is one. It shows no rollouts yet, so that `changes` reports the run once it
    has some."""
    row = {**NOTHING, "read": 0.0, "pending": True}
    with suppress(OSError, *UNREADABLE):
        if not shown.is_own:
            return row
        summary = msgspec.json.decode(read_regular(shown.path / SUMMARY), type=dict[str, Any])
        row |= {name: summary[name] for name in ("stderr", "tasks", "scored", "outcomes") if name in summary}
        row |= {"mean": summary.get("mean_reward"), "pass_at": summary.get("pass_at_k") or {}}
    return row
