"""The lines of the traces of a run, as they were written or as traces."""

from __future__ import annotations

import os

import msgspec

from treetune.errors import TasksetError
from treetune.evaluation import TRACES, Run
from treetune.runs.images import bring_back
from treetune.trace import Trace, decode_trace


def read_line(run: Run, at: int) -> bytes:
    """Without its images, which are files beside it."""
    places = run.columns.places
    file = os.open(run.path / TRACES.file, os.O_RDONLY)
    try:
        return os.pread(file, int(places("length")[at]), int(places("offset")[at]))
    finally:
        os.close(file)


def read_trace(run: Run, at: int) -> Trace:
    try:
        return decode_trace(bring_back(read_line(run, at), run.path))
    except msgspec.MsgspecError as error:
        raise damaged(run, at, error) from None


def damaged(run: Run, at: int, error: Exception) -> TasksetError:
    entry = run.columns.entries[at]
    where = f"the trace of {entry.uid[:12]}/{entry.rollout}, at byte {entry.offset:,} of {run.path / TRACES.file}"
    return TasksetError(f"{where}, is damaged: {error}", remedy="remove that line")
