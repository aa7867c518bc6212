"""An event loop in a thread of its own, for callers that are not async themselves.

    step = run(call(environment.step, action))

Trainers call environments and rewards from many threads at once; all of them share this one loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

THREAD = "treetune-background"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives; waits for it. Who stops waiting (Ctrl-C) cancels it."""
    under_way = submit(work)
    try:
        return under_way.result()
    except BaseException:
        under_way.cancel()
        raise


def submit(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """A coroutine under way."""
    return asyncio.run_coroutine_threadsafe(work, _loop.get())


class _Loop:
    """Made when it is first asked for, once, however many threads ask."""

    _running: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock, self._running = threading.Lock(), None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                thread = threading.Thread(target=self._running.run_forever, name=THREAD, daemon=True)
                thread.start()
            return self._running


_loop = _Loop()

# A forked child has no threads: it begins with a loop of its own.
os.register_at_fork(after_in_child=_loop.forget)
