"""One episode over one WebSocket: start, steps, and the end of the connection is the end of the episode.

    -> {"task_index": 3}            what `start` takes
    <- {"episode_id": ..., "observation": ...}
    -> {"action": "42"}             what `step` takes, without the episode's id
    <- {"observation": ..., "reward": 1.0, "done": true, ...}

After the last step the server closes. An error is answered like over HTTP, with its `status`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from treetune.serve.http.episodes import Episodes
from treetune.serve.http.wire import ActionBody, HttpError, StartBody, StepBody, read_body

SOCKET_PATH = "/api/episode/ws"
_MOST_WAITING = 16
"""Messages that may wait for a step under way; whoever sends more is shown the door."""


class Move(msgspec.Struct):
    action: str | ActionBody
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Begun(msgspec.Struct):
    episode_id: str


class _Stepped(msgspec.Struct):
    done: bool


_start_body = msgspec.json.Decoder(StartBody)
_move = msgspec.json.Decoder(Move)
_begun = msgspec.json.Decoder(_Begun)
_stepped = msgspec.json.Decoder(_Stepped)


class EpisodeSocket:
    def __init__(
        self,
        episodes: Episodes,
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._episodes = episodes
        self._receive, self._send = receive, send
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What was said; None: nothing more is heard."""
        self._episode: str | None = None
        self._left = False
        """The other side has closed the connection."""

    async def run(self) -> None:
        await self._receive()  # that somebody connects
        await self._send({"type": "websocket.accept"})
        reader = asyncio.create_task(self._read())
        try:
            ended = await self._start() and await self._play()
            if not self._left:
                code = 1000 if ended else 1008
                with contextlib.suppress(OSError, RuntimeError):  # it may leave just now
                    await self._send({"type": "websocket.close", "code": code})
        finally:
            reader.cancel()
            await self._leave()

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect" or self._waiting.qsize() >= _MOST_WAITING:
                self._left = message["type"] == "websocket.disconnect"
                await self._leave()  # a step under way is stopped with it
                self._waiting.put_nowait(None)
                return
            self._waiting.put_nowait(message.get("bytes") or (message.get("text") or "").encode())

    async def _start(self) -> bool:
        while (said := await self._waiting.get()) is not None:
            answer, good = await _answered(self._episodes.start, said, _start_body)
            if good:
                self._episode = _begun.decode(answer).episode_id
            await self._tell(answer)
            if good:
                return True
        return False

    async def _play(self) -> bool:
        """Whether the episode came to its end before the connection did."""
        assert self._episode is not None
        while (said := await self._waiting.get()) is not None:
            answer, good = await _answered(self._step, said, _move)
            await self._tell(answer)
            if self._episode not in self._episodes.live or (good and _stepped.decode(answer).done):
                return True
        return False

    async def _step(self, move: Move) -> bytes:
        assert self._episode is not None
        return await self._episodes.step(StepBody(self._episode, move.action, move.turn))

    async def _tell(self, answer: bytes) -> None:
        try:
            await self._send({"type": "websocket.send", "text": answer.decode()})
        except OSError:
            return  # gone; the reader hears of it too

    async def _leave(self) -> None:
        if self._episode in self._episodes.live and self._episode is not None:
            await self._episodes.cancel(self._episode)


async def _answered(
    ask: Callable[[Any], Awaitable[bytes]], said: bytes, decoder: msgspec.json.Decoder[Any]
) -> tuple[bytes, bool]:
    try:
        return await ask(read_body(decoder, said)), True
    except HttpError as error:
        return error.body, False
