"""Freed memory goes back to the system: glibc keeps that of many small things for itself.

    freed = Freed()
    freed.note(live=len(episodes))     # one more has ended

Ten thousand episodes of 30 KB that expired would else stay 300 MB of the process for ever.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

MANY = 1000
"""Below that, it is not worth a look."""
PAUSE_SECONDS = 2.0
"""More may be about to end."""


class Freed:
    def __init__(self) -> None:
        self._ended = 0
        self._due: asyncio.TimerHandle | None = None

    def note(self, live: int) -> None:
        """One has ended, and so many are left. Looking costs most where much is alive, so then it happens rarely."""
        self._ended += 1
        if self._ended >= max(MANY, live) and self._due is None:
            self._due = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._give_back)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _give_back(self) -> None:
        self._ended, self._due = 0, None
        give_back()


def give_back() -> None:
    """70 ms where 300 MB are free; nothing where the C library has no such call."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    import ctypes

    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
    return found
