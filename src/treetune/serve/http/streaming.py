"""Episodes on a connection that stays open: one over a WebSocket, and a step as server-sent events.

A WebSocket takes what `start` takes, then what `step` takes without the episode's id. The server closes it after the
last step; where the client closes it, the episode ends. The events of a step are `partial` (what the environment shows
meanwhile), then `step`; or `error`, where it fails after something was shown. `docs/task_server_api.md` shows both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated

import msgspec

from treetune.serve.http import wire
from treetune.serve.http.asgi import Receive, Send
from treetune.serve.http.wire import encode, read_body, to_http_error

if TYPE_CHECKING:
    from treetune.serve.http.door import HttpDoor

SOCKET_PATH = "/api/episode/ws"
_MOST_MESSAGES = 16
"""Messages that may wait for a step under way; a client that sends more is disconnected."""
_QUIET_SECONDS = 15.0
"""After so long a comment is sent, so that no proxy takes the connection for dead."""
_MOST_PARTS = 1000
"""Parts that wait for a slow reader; further ones are left out, and are in the observation all the same."""


class Move(msgspec.Struct):
    """One step over a WebSocket."""

    action: str | wire.ActionBody
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None


class EpisodeSocket:
    """One episode over one WebSocket."""

    def __init__(self, door: HttpDoor, receive: Receive, send: Send) -> None:
        self._door = door
        self._receive, self._send = receive, send
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        """None: no more will come."""
        self._episode: str | None = None
        self._has_left = False
        """The client has closed the connection."""

    async def run(self) -> None:
        await self._receive()  # that somebody connects
        await self._send({"type": "websocket.accept"})
        reader = asyncio.create_task(self._read())
        try:
            ended = False
            while not ended and (message := await self._messages.get()) is not None:
                answer = await self._answer(message)
                with contextlib.suppress(OSError):  # it has left; the reader hears of it too
                    await self._send({"type": "websocket.send", "text": answer.decode()})
                ended = self._episode is not None and self._episode not in self._door.live
            if not self._has_left:
                with contextlib.suppress(OSError, RuntimeError):  # it may leave just now
                    await self._send({"type": "websocket.close", "code": 1000 if ended else 1008})
        finally:
            reader.cancel()
            await self._cancel()

    async def _answer(self, message: bytes) -> bytes:
        """The first message that can starts the episode, the others are its steps."""
        try:
            if self._episode is None:
                answer = await self._door.start(read_body(wire.StartBody, message))
                self._episode = str(json.loads(answer)["episode_id"])
                return answer
            move = read_body(Move, message)
            return await self._door.step(wire.StepBody(self._episode, move.action, move.turn))
        except Exception as error:
            return to_http_error(error).body

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect" or self._messages.qsize() >= _MOST_MESSAGES:
                self._has_left = message["type"] == "websocket.disconnect"
                await self._cancel()  # a step under way is stopped with it
                self._messages.put_nowait(None)
                return
            self._messages.put_nowait(message.get("bytes") or (message.get("text") or "").encode())

    async def _cancel(self) -> None:
        if self._episode is not None and self._episode in self._door.live:
            await self._door.cancel(self._episode)


async def stream_step(door: HttpDoor, body: wire.StepBody) -> AsyncGenerator[bytes]:
    """The server-sent events of one step: what the environment shows meanwhile, then the answer. Closing it early
    leaves the step to go on."""
    parts: asyncio.Queue[str | None] = asyncio.Queue()

    def take(text: str) -> None:
        if parts.qsize() < _MOST_PARTS:
            parts.put_nowait(text)

    episode = door.live.get(body.episode_id)
    if episode is not None:
        episode.watchers.append(take)
    step = asyncio.ensure_future(door.step(body))
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
                yield _format_event("partial", encode({"content": text}))
            begun = True
        try:
            yield _format_event("step", step.result())
        except Exception as error:
            if not begun:
                raise
            yield _format_event("error", to_http_error(error).body)
    finally:
        if episode is not None:
            episode.watchers.remove(take)
        # Nobody may wait for the step any more: its error is then no complaint of asyncio's.
        step.add_done_callback(lambda step: step.cancelled() or step.exception())


def _format_event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
