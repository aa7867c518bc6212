"""The limits of a process that reads what others have written: memory and time, by how large the files are.

    with limited(total, largest):
        ...                          # raises MemoryError or TooLong, or ends the process

They apply to the whole process, so only a process that does nothing else may set them. A file may take a multiple of
its size: a small one that unpacks to gigabytes is refused, and a large one is read.
"""

from __future__ import annotations

import resource
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from treetune.errors import format_error

_MEMORY, _MEMORY_RATIO = 320 << 20, 8
"""Bytes of memory, and those for each byte of the largest file."""
_SECONDS, _SECONDS_PER_MEGABYTE, _NEXT_SECONDS = 10.0, 1.0, 5.0
"""Of processor time; once it is over, each further file has a little."""
_CLOCK_RATIO, _CLOCK_SECONDS = 4, 60
"""By the clock, after which the process is ended."""


class TooLong(Exception):
    """The processor time is over."""


@contextmanager
def limited(total: int, largest: int) -> Iterator[None]:
    """The limits for files of so many bytes in all, the largest of which has so many."""
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
    """What went wrong with a file, in the words of the limit that it met."""
    if isinstance(error, MemoryError):
        return "it takes more memory than a file of its size may"
    if isinstance(error, TooLong):
        return "it takes more time than a file of its size may"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, zipfile.BadZipFile | OSError | ValueError) and str(error):
        return str(error)
    return format_error(error)
