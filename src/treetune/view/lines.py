"""The lines of the traces of a run, as they were written or as traces.

read_trace(run, 17).turns            # without its tokens, which are most of a line
"""

from __future__ import annotations

import os

import msgspec

from treetune.core.trace import Trace, decode_trace
from treetune.errors import TasksetError
from treetune.evaluation import TRACES, Run
from treetune.runs.entry import ends_with_tokens
from treetune.runs.images import bring_back


def read_line(run: Run, at: int) -> bytes:
    """The whole line, without its images, which are files beside it."""
    return _read(run, at, int(run.columns.places("length")[at]))


def read_text(run: Run, at: int) -> bytes:
    """The line without its tokens, which are its last field."""
    length, text = (int(run.columns.places(name)[at]) for name in ("length", "text_length"))
    if text < length and ends_with_tokens(line := _read(run, at, text), text):
        return line + b"}"
    return _read(run, at, length)


def _read(run: Run, at: int, length: int) -> bytes:
    file = os.open(run.folder / TRACES.file, os.O_RDONLY)
    try:
        return os.pread(file, length, int(run.columns.places("offset")[at]))
    finally:
        os.close(file)


def read_trace(run: Run, at: int) -> Trace:
    """Without its tokens and its images."""
    try:
        return decode_trace(read_text(run, at))
    except msgspec.MsgspecError as error:
        raise damaged(run, at, error) from None


def show_images(run: Run, line: bytes) -> bytes:
    return bring_back(line, run.folder)


def damaged(run: Run, at: int, error: Exception) -> TasksetError:
    entry = run.columns.entries[at]
    where = f"the trace of {entry.uid[:12]}/{entry.rollout}, at byte {entry.offset:,} of {run.folder / TRACES.file}"
    return TasksetError(f"{where}, is damaged: {error}", remedy="remove that line")
