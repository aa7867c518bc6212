"""The line of each run in the list, cached by the size and modification time of its traces, and also on disk for the
next start.

    overviews = Overviews(runs)
    overviews.rows()        # returns at once; unknown lines are `pending` and built meanwhile

A folder may hold hundreds of runs, and each must be read to the end for its line.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from treetune.config.trust import SUMMARY
from treetune.errors import reason_of
from treetune.runs.annotations import read_tags
from treetune.runs.plain_files import UNREADABLE, read_regular
from treetune.runs.run import Run
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically
from treetune.view.figures import NOTHING, overview
from treetune.view.run_list import RunList, ShownRun, Stamp, Writers

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
