"""Episodes on a connection that stays open: one over a WebSocket, and a step as server-sent events.

A WebSocket takes what `start` takes, then what `step` takes without the episode's id. The server closes it after the
last step; where the client closes it, the episode ends. The events of a step are `partial` (what the environment shows
meanwhile), then `step`; or `error`, where it fails after something was shown. `docs/task_server_api.md` shows both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from treetune.serve.bodies import Holding
from treetune.serve.http import wire
from treetune.serve.http.asgi import Receive, Send
from treetune.serve.http.wire import encode, read_body, to_http_error

if TYPE_CHECKING:
    from treetune.serve.http.door import HttpDoor

SOCKET_PATH = "/api/episode/ws"
_MOST_MESSAGES = 16
"""Messages that may wait for a step under way, of as many bytes as one may have; a client that sends more is
disconnected."""
START_SECONDS = 60.0
"""A WebSocket that has begun no episode by then is closed."""
_LOOK_SECONDS = 5.0
"""How often a silent one is looked at: its episode may have ended."""
_QUIET_SECONDS = 15.0
"""After so long a comment is sent, so that no proxy takes the connection for dead."""
_MOST_PARTS = 1000
"""Parts that wait for a slow reader; further ones are left out, and are in the observation all the same."""


class EpisodeSocket:
    """One episode over one WebSocket."""

    def __init__(self, door: HttpDoor, receive: Receive, send: Send) -> None:
        self._door = door
        self._receive, self._send = receive, send
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        """None: no more will come."""
        self._waiting = Holding()
        self._episode: str | None = None
        self._has_left = False
        """The client has closed the connection."""

    async def run(self) -> None:
        await self._receive()  # that somebody connects
        await self._send({"type": "websocket.accept"})
        reader = asyncio.create_task(self._read())
        try:
            code, reason = await self._play()
            if not self._has_left:
                with contextlib.suppress(OSError, RuntimeError):  # it may leave just now
                    await self._send({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            reader.cancel()
            self._waiting.release()
            await self._cancel()

    async def _play(self) -> tuple[int, str]:
        """Answers each message; how and why the connection is to be closed."""
        until = time.monotonic() + START_SECONDS
        while True:
            begun = self._episode is not None
            try:
                wait = _LOOK_SECONDS if begun else max(0.0, until - time.monotonic())
                async with asyncio.timeout(wait):
                    message = await self._messages.get()
            except TimeoutError:
                if not begun:
                    return 1008, f"no episode was started in {START_SECONDS:g} seconds"
                if not self._is_live():
                    return 1008, "the episode has ended: nobody stepped it, or it reached its deadline"
                continue
            if message is None:
                return 1008, "more messages than may wait"
            self._waiting.release(len(message))
            answer = await self._answer(message)
            with contextlib.suppress(OSError):  # it has left; the reader hears of it too
                await self._send({"type": "websocket.send", "text": answer.decode()})
            if self._episode is not None and not self._is_live():
                return 1000, ""

    def _is_live(self) -> bool:
        return self._episode in self._door.live

    async def _answer(self, message: bytes) -> bytes:
        """The first message that can starts the episode, the others are its steps."""
        try:
            if self._episode is None:
                answer = await self._door.start(read_body(wire.StartBody, message))
                self._episode = str(json.loads(answer)["episode_id"])
                return answer
            move = read_body(wire.MoveBody, message)
            step = wire.StepBody(
                episode_id=self._episode, action=move.action, tool_calls=move.tool_calls, turn=move.turn
            )
            return await self._door.step(step)
        except Exception as error:
            return to_http_error(error).body

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            self._has_left = message["type"] == "websocket.disconnect"
            data = message.get("bytes") or (message.get("text") or "").encode()
            fits = self._waiting.add(len(data)) and self._waiting.bytes <= self._door.config.max_bytes
            too_many = self._messages.qsize() >= _MOST_MESSAGES or not fits
            if self._has_left or too_many:
                await self._cancel()  # a step under way is stopped with it
                self._messages.put_nowait(None)
                return
            self._messages.put_nowait(data)

    async def _cancel(self) -> None:
        if self._episode is not None and self._is_live():
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
                yield format_event("partial", encode({"content": text}))
            begun = True
        try:
            yield format_event("step", step.result())
        except Exception as error:
            if not begun:
                raise
            yield format_event("error", to_http_error(error).body)
    finally:
        if episode is not None:
            episode.watchers.remove(take)
        # Nobody may wait for the step any more: its error is then no complaint of asyncio's.
        step.add_done_callback(lambda step: step.cancelled() or step.exception())


def format_event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
