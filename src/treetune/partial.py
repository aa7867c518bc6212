"""Partial observations: what an environment shows while its step is still under way, for commands that take long.

    from treetune.partial import show

    def step(self, action):
        for line in run(action.text):
            show(line)               # from the loop or from any thread that the step runs in
        return Step(...)             # the whole observation, as ever

Where nobody looks, nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Sink = Callable[[str], object]

_shown: ContextVar[tuple[asyncio.AbstractEventLoop, Sink] | None] = ContextVar("partial observations", default=None)


def show(text: str) -> None:
    """Shows a part of the observation to whoever watches this step."""
    if (watched := _shown.get()) is None:
        return
    loop, sink = watched
    if asyncio._get_running_loop() is loop:
        sink(text)
    else:
        loop.call_soon_threadsafe(sink, text)


@contextmanager
def shown_to(sink: Sink) -> Iterator[None]:
    """Within it, what is shown goes to `sink`, on the event loop of now."""
    token = _shown.set((asyncio.get_running_loop(), sink))
    try:
        yield
    finally:
        _shown.reset(token)
