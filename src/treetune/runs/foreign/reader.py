"""Reads runs of other programs in a separate process, within limits: a hostile file can harm only that process.

    ask_reader(ReadRequest("outputs/rollout_data", "verl", top="outputs", folder=..., seconds=0.5))        # waits

The process (`main` in `kept.py`) stores new rollouts as traces, which the caller reads, and stays for the next request.
Only one runs at a time, so several hostile runs take no more memory than one. The limits are multiples of a file's
size: a small file that unpacks to gigabytes is refused, and a large one is read.
"""

from __future__ import annotations

import resource
import signal
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import UsageError, format_error

if TYPE_CHECKING:
    from treetune.system.processes import WorkerPool

_MEMORY, _MEMORY_RATIO = 320 << 20, 8
"""The memory limit in bytes: a base, and an amount for each byte of the largest file."""
_SECONDS, _SECONDS_PER_MEGABYTE, _NEXT_SECONDS = 10.0, 1.0, 5.0
"""The CPU time limit in seconds: a base, an amount per megabyte, and then an amount for each further file."""
_CLOCK_RATIO, _CLOCK_SECONDS = 4, 60
"""The limit of wall-clock time, after which the process is killed."""
_one = threading.Lock()


class ReadRequest(msgspec.Struct):
    """The run to read, and for how long."""

    path: str
    kind: str
    top: str
    """No file outside of this folder is read."""
    folder: str
    """Where its traces are stored."""
    seconds: float
    """About how long to read; another request continues."""


def ask_reader(asked: ReadRequest) -> None:
    """Returns when the run was read. Raises `UsageError` if the process failed or was killed."""
    with _one:
        replies = _workers().ask(msgspec.to_builtins(asked), 1)
    fault = replies[0] if replies else "reading it took more memory or time than a run of its size may"
    if fault:
        raise UsageError(f"{asked.path} cannot be read: {fault}", remedy="remove it, or read it where it was written")


@cache
def _workers() -> WorkerPool:
    from treetune.system.processes import WorkerPool

    return WorkerPool("treetune.runs.foreign.kept", "the reader of runs", "reinstall Treetune", flags=("-P", "-m"))


# In the process


class TooLong(Exception):
    """The CPU time limit was reached."""


@contextmanager
def limited(total: int, largest: int) -> Iterator[None]:
    """Limits this process to the resources that files of `total` bytes, the largest of which has `largest`, may take.
    Beyond that, MemoryError or TooLong is raised, or the process ends; so only a process that does nothing else may use
    it."""
    memory, seconds = _MEMORY + _MEMORY_RATIO * largest, _SECONDS + _SECONDS_PER_MEGABYTE * (total >> 20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, _raise_too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if before[1] < 0 else min(memory, before[1]), before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds, _NEXT_SECONDS)
    signal.alarm(int(_CLOCK_RATIO * seconds) + _CLOCK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.signal(signal.SIGPROF, handler)


def _raise_too_long(number: int, frame: Any) -> None:
    raise TooLong


def explain(error: BaseException) -> str:
    """The message for an error with a file, which names the limit that was reached."""
    if isinstance(error, MemoryError):
        return "it takes more memory than a file of its size may"
    if isinstance(error, TooLong):
        return "it takes more time than a file of its size may"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, zipfile.BadZipFile | OSError | ValueError) and str(error):
        return str(error)
    return format_error(error)
