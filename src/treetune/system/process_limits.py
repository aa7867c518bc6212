"""Limits that all connections of this process share: the memory of request bodies, and file descriptors.

    held = Holding()
    if not held.add(len(part)): ...         # all bodies together would exceed the limit
    held.release()

Each body also has its own limit. Without a shared limit, a thousand of them could take 8 GB. If an accept fails because
no file descriptor is left, it fails silently, so the server checks for that and logs an error.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time

MOST_BYTES = 256 << 20
"""The maximum total size of unanswered request bodies, WebSocket messages and large ZMQ frames."""
RESERVED = 64
"""Descriptors reserved for everything except connections: state, traces, workers, sandboxes."""
_WARN_SECONDS = 60.0

log = logging.getLogger("treetune.serve")
used = 0
_warned = -_WARN_SECONDS


class Holding:
    """The share of this memory that one request or connection holds."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size: int) -> bool:
        """Adds `size` bytes. Returns False if the total would exceed the limit."""
        global used
        if used + size > MOST_BYTES:
            return False
        used += size
        self.bytes += size
        return True

    def release(self, size: int | None = None) -> None:
        """Releases some of the memory, or all of it."""
        global used
        size = self.bytes if size is None else size
        used -= size
        self.bytes -= size


def count_left(newest: int) -> int:
    """The number of free descriptors above the newest one. The system always assigns the lowest free number."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if most == resource.RLIM_INFINITY else most - newest


def warn_of_descriptors(what: str) -> None:
    """Logs a warning, at most once a minute."""
    global _warned
    if time.monotonic() - _warned >= _WARN_SECONDS:
        _warned = time.monotonic()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error("out of file descriptors (of %d): %s; serve with a larger `ulimit -n`", most, what)


def check_descriptors() -> None:
    """Logs an error if no file can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            warn_of_descriptors("no further connection is accepted, and no file can be opened")
