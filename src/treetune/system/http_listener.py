"""`HttpListener` serves an ASGI application with uvicorn and limits every phase of a request.

    listener = HttpListener("127.0.0.1:0", Access())
    print(await listener.start(app))

uvicorn has no limits on the head of a request, the chunk headers of a body, how slowly a request arrives, how many
requests wait on a connection, or the fragments of a WebSocket message. This module uses undocumented names of uvicorn:
`pyproject.toml` bounds the version, and `tests/serve/test_uvicorn.py` detects changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from treetune.system import process_limits
from treetune.system.access import Access, bind_tcp, bind_unix, parse_http_address
from treetune.system.process_limits import Holding

REQUEST_SECONDS = 60.0
"""The time limit from the first byte of a request to its last. It also applies to a silent new connection, and to an
answer that the client does not read."""
MOST_HEAD_BYTES = 64 << 10
"""The maximum number of bytes of a head, and of the parts of a body that are not content: chunk sizes and extensions,
trailers."""
MOST_HEADERS = 128
_SINGLE_HEADERS = frozenset(
    [b"host", b"authorization", b"origin", b"content-length", b"transfer-encoding", b"x-api-key", b"mcp-session-id"]
)
"""Headers that decide who the client is or where a body ends. If one of them is sent twice, a proxy may read the first
and the server the last."""
MOST_WAITING = 16
"""Requests that a connection may send before the first is answered."""
MOST_FRAGMENTS = 1024
"""The maximum number of fragments of one WebSocket message; empty ones count."""
_CHECK_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 75
_LAST_SECONDS = 2
"""How long the listener waits for answers that are being sent when it closes."""
_CLOSE_SECONDS = 1.0
"""How long the peer of a WebSocket may take to confirm the close. Its messages are read until then."""


class HttpListener:
    """Serves an ASGI application on the running event loop."""

    def __init__(self, address: str, access: Access, unix: str | None = None) -> None:
        """`unix` is the path of a socket that is served too. Raises UsageError if it is not an address, or if other
        machines can reach it without a token."""
        self._host, self._port = parse_http_address(address, access)
        self._unix = unix
        self._running: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    async def start(
        self, app: Any, *, websocket_bytes: int | None = None, listening: socket.socket | None = None
    ) -> str:
        """Starts listening, on this socket if one is given; returns the address. `websocket_bytes` is the largest
        message of a WebSocket; without it WebSockets are refused."""
        listening = listening or bind_tcp(self._host, self._port, f"{self._host}:{self._port}")
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none" if websocket_bytes is None else _Socket,
                ws_max_size=websocket_bytes or 0,
                ws_per_message_deflate=False,  # a compressed packet could hold hundreds of megabytes
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        sockets = [listening, *([] if self._unix is None else [bind_unix(self._unix)])]
        self._running = asyncio.create_task(self._uvicorn.serve(sockets=sockets))
        while not self._uvicorn.started and not self._running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self._checking = asyncio.create_task(self._check())
        port = listening.getsockname()[1]
        return f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"

    async def _check(self) -> None:
        """Closes connections whose request arrives too slowly, or whose client does not read the answer."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            oldest = time.monotonic() - REQUEST_SECONDS
            for connection in list(self._uvicorn.server_state.connections):
                if isinstance(connection, _Connection | _Socket):
                    connection.close_where_older(oldest)

    async def close(self) -> None:
        if self._running is not None:
            if self._checking is not None:  # None if it was closed during the start
                self._checking.cancel()
            self._uvicorn.should_exit = True
            await self._running
            self._running = None


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the command line handles signals


class _Writing(asyncio.Protocol):
    """Records the time since when the client has not read what was sent."""

    transport: asyncio.Transport
    _unread_since: float | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def close_where_older(self, oldest: float) -> None:
        if self._unread_since is not None and self._unread_since < oldest:
            self.transport.abort()


class _Connection(_Writing, HttpToolsProtocol):
    """A connection that records when a request began to arrive, and how much of it is not content."""

    arriving_since: float | None = None
    _is_refused = False
    _fault: str | None = None
    """What is wrong with the head of the last request."""
    _extra: int | None = None
    """Bytes of the arriving request that are not content: first those of its head, then those of its body."""
    _content = 0
    """Bytes of content in the latest data."""
    _has_body_to_come = False
    """The head of a request has arrived, but not the end of its body."""
    _leave: Callable[[], None] | None = None
    """What to call if the client leaves before the request has its answer."""
    _is_lost = False

    def on_leave(self, leave: Callable[[], None]) -> None:
        if self._is_lost:
            leave()
        else:
            self._leave = leave

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost = True
        if self._leave is not None:
            self._leave()
            self._leave = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _JoinedWrites(transport)))
        self.arriving_since = time.monotonic()
        left = process_limits.count_left(transport.get_extra_info("socket").fileno())
        if left <= process_limits.RESERVED:
            open = f"{len(self.connections):,} connections are open"
            process_limits.warn_of_descriptors(f"{open}, further ones are answered with 503")
            self._is_refused = True
            self.arriving_since -= REQUEST_SECONDS  # so it is closed soon if it sends no request
            if left <= process_limits.RESERVED // 2:
                self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._content = 0
        super().data_received(data)
        if self._extra is not None:
            self._extra += len(data) - self._content
            if self._extra > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["on_leave"] = self.on_leave  # type: ignore[typeddict-unknown-key]
        self._extra = 0
        if not self._is_refused:
            self.arriving_since = time.monotonic()

    def on_headers_complete(self) -> None:
        if self._is_refused:
            raise OverflowError("no file descriptor is left")
        if len(self.pipeline) >= MOST_WAITING:
            raise OverflowError("too many requests at once")
        self._fault = _find_fault(self.headers, self.parser.get_http_version())
        if self._fault is not None:
            raise ValueError(self._fault)
        self._extra, self._has_body_to_come = 0, True
        super().on_headers_complete()
        # Trailers are ignored. The headers of an upgrade are read once more.
        self.headers = self.headers.copy() if self.parser.should_upgrade() else []

    def on_body(self, body: bytes) -> None:
        self._content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.arriving_since = self._extra = None
        self._has_body_to_come = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._leave = None
        if self._has_body_to_come and self.cycle.response_complete:
            self.transport.close()  # it was answered before it had arrived; the rest is not read

    def send_400_response(self, msg: str) -> None:
        """Answers a malformed request; also called if a callback of the parser has refused it."""
        if self._is_refused:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1")
        elif len(self.pipeline) >= MOST_WAITING:
            self._refuse(b"429 Too Many Requests\r\nretry-after: 1")
        elif self._is_answering():
            self.transport.close()
        else:
            super().send_400_response(self._fault or msg)

    def _refuse(self, status: bytes) -> None:
        if not self._is_answering():
            self.transport.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()

    def _is_answering(self) -> bool:
        """An answer is being sent, so no other may be written."""
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def close_where_older(self, oldest: float) -> None:
        super().close_where_older(oldest)
        # If reading is paused, this side makes the client wait.
        if self.arriving_since is not None and self.arriving_since < oldest and not self.flow.read_paused:
            self.transport.close()


def _find_fault(headers: list[tuple[bytes, bytes]], version: str) -> str | None:
    """Returns why a head is refused: a proxy and the server could disagree about the client, or the end of the body."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE_HEADERS:
            if name in found:
                return f"The header {name.decode()} was sent twice; send it once."
            found[name] = value
    if b"host" not in found and version == "1.1":
        return "The header host is missing; HTTP/1.1 requires it."
    if (encoding := found.get(b"transfer-encoding")) is not None:
        if version != "1.1":
            return "transfer-encoding needs HTTP/1.1; send a content-length."
        if encoding.strip().lower() != b"chunked":
            return "The only transfer-encoding is chunked; send the body without another encoding."
    return None


class _Socket(_Writing, WebSocketsSansIOProtocol):
    """A WebSocket with limits on the fragments of a message and on the data that its peer does not read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = _CLOSE_SECONDS
        self._arriving = Holding()
        """The arriving message's share of the memory for all bodies."""

    def data_received(self, data: bytes) -> None:
        if self._arriving.add(len(data)):
            super().data_received(data)
        else:
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        self._arriving.release()
        super().send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving.release()
        super().connection_lost(exc)

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) < MOST_FRAGMENTS:
            super().handle_cont(event)
        else:
            self.transport.abort()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.transport.abort()  # it pings but does not read, so each pong would be kept


class _JoinedWrites:
    """A transport that joins the writes of one round of the event loop. uvicorn writes the head of an answer, then its
    body, and two packets cost a tenth of a step."""

    __slots__ = ("_call_soon", "_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
