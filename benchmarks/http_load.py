"""Callers that cost little, so that the server is what is measured: raw sockets, in processes of their own.

    play(port, concurrent=32, steps=300)              # over HTTP
    play(port, 32, 300, over=WebSocket)               # as OpenEnv is stepped

Each caller starts an episode, and sends the next step when the last is answered.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, ClassVar

PROCESSES = max(1, (os.cpu_count() or 2) - 1)
"""The server has one processor, its callers the others."""


class Caller(asyncio.Protocol):
    """One caller over HTTP."""

    first: ClassVar[bytes] = b""

    def __init__(self, steps: int, done: asyncio.Future[None]) -> None:
        self._steps, self._done = steps, done
        self._turn, self._id = -1, ""
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._transport.write(self.first or self._start())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (answer := self._answer()) is None:
            return
        self._buffer = b""
        request = self._next(answer)
        if request is None:
            self._done.set_result(None)
            self._transport.close()
        else:
            self._transport.write(request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def _answer(self) -> bytes | None:
        """The body of the answer, when all of it is there."""
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert head.startswith(b"HTTP/1.1 200"), self._buffer
        return body if len(body) >= length else None

    def _start(self) -> bytes:
        return _posted("/api/episode/start", "{}")

    def _next(self, answer: bytes) -> bytes | None:
        self._id = self._id or json.loads(answer)["episode_id"]
        self._turn += 1
        if self._turn == self._steps:
            return None
        return _posted("/api/episode/step", f'{{"episode_id":"{self._id}","action":"hello","turn":{self._turn}}}')


class WebSocket(Caller):
    """One caller of an OpenEnv server."""

    first = (
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    _open = False

    def _answer(self) -> bytes | None:
        if not self._open:
            self._open = b"\r\n\r\n" in self._buffer
            return b"" if self._open else None
        if len(self._buffer) < 4:
            return None
        length, start = self._buffer[1] & 0x7F, 2
        if length == 126:
            length, start = int.from_bytes(self._buffer[2:4], "big"), 4
        return self._buffer[start:] if len(self._buffer) >= start + length else None

    def _next(self, answer: bytes) -> bytes | None:
        if not answer:
            return _framed('{"type":"reset","data":{}}')
        assert b'"error"' not in answer[:20], answer
        self._turn += 1
        return None if self._turn == self._steps else _framed('{"type":"step","data":{"message":"hello"}}')


def _posted(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


def _framed(text: str) -> bytes:
    assert len(text) < 126
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text.encode()  # masked with zeros


async def _played(port: int, concurrent: int, steps: int, over: Callable[..., Caller]) -> None:
    loop = asyncio.get_running_loop()
    ends = []
    for _ in range(concurrent):
        done = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda done=done: over(steps, done), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*ends)


def _play(port: int, concurrent: int, steps: int, over: Callable[..., Caller]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_played(port, concurrent, steps, over))


def play(port: int, concurrent: int, steps: int, over: Callable[..., Caller] = Caller) -> None:
    """So many episodes at a time, each with so many steps."""
    shares = [concurrent // PROCESSES + (number < concurrent % PROCESSES) for number in range(PROCESSES)]
    context = multiprocessing.get_context("fork")
    callers = [context.Process(target=_play, args=(port, share, steps, over)) for share in shares if share]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
        assert caller.exitcode == 0, "a caller failed"
