"""A step as server-sent events: what the environment shows while it is under way, then its answer.

    curl -N -H 'Accept: text/event-stream' http://127.0.0.1:5000/api/episode/step -d '{...}'

    event: partial
    data: {"content":"Compiling..."}

    event: step
    data: {"observation":...,"reward":...,"done":...,"info":...}

A step that fails after something was shown ends with `event: error`; before that it is an ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from treetune.serve.http.episodes import Episodes
from treetune.serve.http.wire import HttpError, StepBody, encode, http_error

log = logging.getLogger("treetune.serve")

_QUIET_SECONDS = 15.0
"""After so long a comment is sent, so that no proxy takes the connection for dead."""
_MOST_WAITING = 1000
"""Parts that wait for a slow reader; further ones are left out, and are in the observation all the same."""


async def step_events(episodes: Episodes, body: StepBody) -> AsyncGenerator[bytes]:
    """The events of one step. Closing it early leaves the step to go on."""
    parts: asyncio.Queue[str | None] = asyncio.Queue()

    def take(text: str) -> None:
        if parts.qsize() < _MOST_WAITING:
            parts.put_nowait(text)

    episode = episodes.live.get(body.episode_id)
    if episode is not None:
        episode.watchers.append(take)
    step = asyncio.ensure_future(episodes.step(body))
    step.add_done_callback(lambda _: parts.put_nowait(None))
    begun = False
    try:
        while True:
            try:
                text = await asyncio.wait_for(parts.get(), _QUIET_SECONDS)
            except TimeoutError:
                yield b": still at it\n\n"
            else:
                if text is None:
                    break
                yield _event("partial", encode({"content": text}))
            begun = True
        try:
            yield _event("step", step.result())
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, HttpError):
                log.exception("a step failed")
            yield _event("error", http_error(error).body)
    finally:
        if episode is not None:
            episode.watchers.remove(take)
        step.add_done_callback(_seen)


def _seen(step: asyncio.Future[bytes]) -> None:
    if not step.cancelled():
        step.exception()  # nobody waits for it any more: asyncio need not complain


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
