"""How many file descriptors are left, and saying so when there are none: an accept that fails would be silent."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time

log = logging.getLogger("treetune.serve")
RESERVED = 64
"""Kept for all that is no connection: state, traces, workers, sandboxes."""
_WARN_SECONDS = 60.0
_warned = -_WARN_SECONDS


def count_left(newest: int) -> int:
    """How many there are beyond the newest: the lowest that is free is always taken."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if most == resource.RLIM_INFINITY else most - newest


def warn(what: str) -> None:
    """Once a minute."""
    global _warned
    if time.monotonic() - _warned >= _WARN_SECONDS:
        _warned = time.monotonic()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        log.error("out of file descriptors (of %d): %s; serve with a larger `ulimit -n`", most, what)


def warn_where_none_is_left() -> None:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            warn("no further connection is accepted, and no file can be opened")
