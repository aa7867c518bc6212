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
from collections.abc import Callable
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


class shown_to:
    """Within it, what is shown goes to `sink`, on the event loop of now. A class: it is entered at every step."""

    __slots__ = ("_sink", "_token")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __enter__(self) -> None:
        self._token = _shown.set((asyncio.get_running_loop(), self._sink))

    def __exit__(self, *exception: object) -> None:
        _shown.reset(self._token)
