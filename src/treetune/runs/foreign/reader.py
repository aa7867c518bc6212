"""Reads runs of other programs in a process of its own, within limits: a hostile file can harm only that process.

    ask_reader(Asked("outputs/rollout_data", "verl", top="outputs", folder=..., seconds=0.5))        # waits

The process (`reader_process.py`) keeps what is new as traces, which the caller reads. It stays for the next request.
Only one runs at a time, so several hostile runs take no more memory than one.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from treetune.errors import UsageError

if TYPE_CHECKING:
    from treetune.system.worker_process import Workers

_one = threading.Lock()


class Asked(msgspec.Struct):
    """Which run is to be taken up."""

    path: str
    kind: str
    top: str
    """The folder that no file may lie outside of."""
    folder: str
    """Where it is kept."""
    seconds: float
    """For about how long it is read; the rest is another request."""


def ask_reader(asked: Asked) -> None:
    """Returns once it is done. Raises `UsageError` where the process failed or was ended."""
    with _one:
        replies = _workers().ask(msgspec.to_builtins(asked), 1)
    fault = replies[0] if replies else "reading it took more memory or time than a run of its size may"
    if fault:
        raise UsageError(f"{asked.path} cannot be read: {fault}", remedy="remove it, or read it where it was written")


@cache
def _workers() -> Workers:
    from treetune.system.worker_process import Workers

    return Workers(
        "treetune.runs.foreign.reader_process", "the reader of runs", "reinstall Treetune", flags=("-P", "-m")
    )
