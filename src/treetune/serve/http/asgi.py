"""The one HTTP stack: `JsonApp` answers requests, `Listener` serves an ASGI application with uvicorn.

    app = JsonApp([Route("GET", "/api/health", health)], Access(), max_bytes=8192, token_remedy="")
    listener = Listener("127.0.0.1:0", Access())
    print(await listener.start(app))

uvicorn bounds neither the head of a request nor how slowly one arrives, so the `Listener` does. It uses undocumented
names of uvicorn: `pyproject.toml` bounds the version, and `tests/serve/test_uvicorn.py` says what changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from treetune.errors import UsageError
from treetune.serve.access import Access, is_loopback, parse_http_address
from treetune.serve.http.wire import HttpError, to_http_error

log = logging.getLogger("treetune.serve")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

REQUEST_SECONDS = 60.0
"""From the first byte of a request to its last; also for a new connection that stays silent."""
MOST_HEAD_BYTES = 64 << 10
_CHECK_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 75
_LAST_SECONDS = 2
"""For answers that are being sent when the listener closes."""
JSON = b"application/json"


# Requests and answers


class HttpRequest:
    """One request, as its handler sees it."""

    __slots__ = ("accept", "body", "content_type", "name", "path", "receive")

    def __init__(self, path: str, receive: Receive) -> None:
        self.path, self.receive = path, receive
        self.name = "http.other"
        """What it is counted as."""
        self.accept = self.body = b""
        self.content_type = JSON
        """Of the answer."""

    async def is_abandoned(self) -> bool:
        """Whether the caller has closed the connection, once the body was read."""
        end = asyncio.ensure_future(self.receive())
        await asyncio.sleep(0)
        return end.done() or not end.cancel()


Events = AsyncGenerator[bytes]
Handler = Callable[[HttpRequest], Awaitable[bytes | Events]]
"""Gives the body of the answer, or the server-sent events that it consists of."""


class Route(NamedTuple):
    method: str
    path: str
    """A last part `*` stands for any."""
    handler: Handler
    name: str = "http.other"
    content_type: bytes = JSON
    needs_token: bool = True


class JsonApp:
    """An ASGI application of fixed routes: it checks who asks, reads bodies, and turns errors into answers."""

    def __init__(
        self,
        routes: Sequence[Route],
        access: Access,
        *,
        max_bytes: int,
        token_remedy: str,
        count: Callable[[str, float, str | None], None] = lambda name, seconds, kind: None,
        websockets: Mapping[str, Callable[[Receive, Send], Awaitable[None]]] = {},
    ) -> None:
        """`count` is called after each request with its name, its seconds, and the kind of its error; `websockets` has
        by its path what serves a connection."""
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._access = access
        self._bearer = f"Bearer {access.token}".encode() if access.token is not None else None
        self._max_bytes, self._token_remedy = max_bytes, token_remedy
        self._count, self._websockets = count, websockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
            return
        began, request, kind = time.perf_counter(), HttpRequest(scope["path"], receive), None
        status, headers = 200, [(b"content-type", JSON)]
        try:
            route = self._find_route(request.path, scope["method"])
            request.name, request.content_type = route.name, route.content_type
            request.accept = self.admit(scope["headers"], route.needs_token)
            if route.method == "POST":
                request.body = await self._read_body(receive)
            body = await route.handler(request)
            if not isinstance(body, bytes):
                await _send_events(body, send)
                self._count(request.name, time.perf_counter() - began, None)
                return
            headers = [(b"content-type", request.content_type)]
        except Exception as error:
            answer = to_http_error(error)
            status, kind, body = answer.status, answer.kind, answer.body
            headers += answer.headers
        self._count(request.name, time.perf_counter() - began, kind)
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = self._websockets.get(scope["path"])
        try:
            self.admit(scope["headers"])
        except HttpError:
            serve = None
        if serve is None:
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: HTTP 403
            return
        self._count("http.websocket", 0.0, None)
        await serve(receive, send)

    def _find_route(self, path: str, method: str) -> Route:
        methods = self._routes.get(path) or self._routes.get(path.rpartition("/")[0] + "/*")
        if methods is None:
            known = ", ".join(self._routes)
            raise HttpError(404, "unknown_path", f"there is nothing at {path:.80}", remedy=f"the paths are {known}")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(f"{name}, HEAD" if name == "GET" else name for name in methods)
            raise HttpError(405, "wrong_method", f"{path:.80} is asked with {' or '.join(methods)}", allow=allow)
        return route

    def admit(self, headers: list[tuple[bytes, bytes]], needs_token: bool = True) -> bytes:
        """The kind of answer that is asked for. Raises where there may be none."""
        found = dict(headers)
        given, host, origin = found.get(b"authorization", b""), found.get(b"host", b""), found.get(b"origin", b"")
        if self._bearer is not None and needs_token and not hmac.compare_digest(given, self._bearer):
            raise HttpError(401, "denied", "the token is missing or wrong", remedy=self._token_remedy)
        if origin and (origin.partition(b"://")[2] != host or not self._is_own(host)):
            # Any page that a person visits can post to this machine. Only our own has a reason to.
            raise HttpError(403, "denied", "a page from elsewhere may not ask here", remedy="ask from a program")
        return found.get(b"accept", b"")

    def _is_own(self, host: bytes) -> bool:
        """Without a token only names of this machine: any other could be made to point here."""
        if self._bearer is not None or self._access.open:
            return True
        return is_loopback(urlsplit(f"http://{host.decode('latin-1')}").hostname or "")

    async def _read_body(self, receive: Receive) -> bytes:
        message = await receive()
        body: bytes | bytearray = message.get("body", b"")
        if message.get("more_body"):
            body = bytearray(body)  # which grows in place
        while message.get("more_body") and len(body) <= self._max_bytes:
            message = await receive()
            body += message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise HttpError(400, "bad_request", "the request was not sent to its end")
        if len(body) > self._max_bytes:
            raise HttpError(413, "too_large", f"a body may have {self._max_bytes} bytes")
        return bytes(body)


async def _send_events(events: Events, send: Send) -> None:
    """Nothing is sent before the first event: a failure until then is an ordinary answer."""
    begun = False
    async with contextlib.aclosing(events):
        async for event in events:
            if not begun:
                begun = True
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


# Listening


class Listener:
    """Serves an ASGI application on the running event loop."""

    def __init__(self, address: str, access: Access) -> None:
        """Refuses what is no address, and one that is open to everybody without a token."""
        self._host, self._port = parse_http_address(address, access)
        self._running: asyncio.Task[None] | None = None

    async def start(self, app: Any, *, websocket_bytes: int | None = None) -> str:
        """Listens; gives the address. `websocket_bytes` is the largest message of a WebSocket; without it there are
        none."""
        listening = _bind(self._host, self._port)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none" if websocket_bytes is None else "websockets-sansio",
                ws_max_size=websocket_bytes or 0,
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
        self._running = asyncio.create_task(self._uvicorn.serve(sockets=[listening]))
        while not self._uvicorn.started and not self._running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self._checking = asyncio.create_task(self._close_slow())
        port = listening.getsockname()[1]
        return f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"

    async def _close_slow(self) -> None:
        """Closes connections whose request has been arriving for too long."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            oldest = time.monotonic() - REQUEST_SECONDS
            for connection in list(self._uvicorn.server_state.connections):
                since = getattr(connection, "arriving_since", None)  # a WebSocket has none
                if since is not None and since < oldest:
                    connection.transport.close()

    async def close(self) -> None:
        if self._running is not None:
            self._checking.cancel()
            self._uvicorn.should_exit = True
            await self._running
            self._running = None


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the command line handles signals


class _Connection(HttpToolsProtocol):
    """A connection that knows since when a request has been arriving, and how large its head is so far."""

    arriving_since: float | None = None
    _head_bytes: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _JoinedWrites(transport)))
        self.arriving_since = time.monotonic()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arriving_since, self._head_bytes = time.monotonic(), 0

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.arriving_since = None
        super().on_message_complete()


class _JoinedWrites:
    """A transport that sends what is written in one round of the event loop at once: uvicorn writes the head of an
    answer, then its body, and two packets cost a tenth of a step."""

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

    def _flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}", remedy="is another server there?") from None
    listening.setblocking(False)
    return listening
