"""The only HTTP stack: `JsonApp` answers requests; an `HttpListener` (`http_listener.py`) receives them.

    app = JsonApp([Route("GET", "/api/health", health)], Access(), max_bytes=8192, token_remedy="")
    print(await HttpListener("127.0.0.1:0", Access()).start(app))

The token is checked before the body is read. If the answer is an error and the body has not arrived yet, the connection
is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from treetune.system.access import Access, is_loopback
from treetune.system.http_error import HttpError, as_http_error
from treetune.system.process_limits import MOST_BYTES, Holding

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_POLITE_SECONDS, _POLITE_BYTES = 1.0, 4 << 20
"""How much of a body is read and discarded after an error. If the connection were closed before the client has sent its
body, the answer might be lost."""
JSON = b"application/json"
_CLOSE = (b"connection", b"close")


# Requests and answers


class HttpRequest:
    """One HTTP request."""

    __slots__ = ("accept", "arriving", "body", "content_type", "headers", "held", "name", "on_leave", "path", "receive")

    def __init__(self, scope: Scope, receive: Receive, arriving: bool) -> None:
        self.path, self.receive = scope["path"], receive
        self.headers: Headers = scope["headers"]
        self.on_leave: Callable[[Callable[[], None]], None] = scope["on_leave"]
        """Takes a function that is called if the client closes the connection before its answer is sent."""
        self.arriving = arriving
        """The body has not been read completely."""
        self.name = "http.other"
        """The request's name in the metrics."""
        self.held: Holding | None = None
        """Its share of the memory for all bodies, if the body came in parts."""
        self.accept = self.body = b""
        self.content_type = JSON
        """The content type of the answer."""

    async def is_abandoned(self) -> bool:
        """Returns whether the client has closed the connection. Call it after the body was read."""
        end = asyncio.ensure_future(self.receive())
        await asyncio.sleep(0)
        return end.done() or not end.cancel()


Events = AsyncGenerator[bytes]


class Parts(NamedTuple):
    """A body that is sent in parts, for example a file that is too large for memory."""

    parts: AsyncGenerator[bytes]
    content_type: bytes


Handler = Callable[[HttpRequest], Awaitable[bytes | Parts | Events]]
"""Returns the body of the answer, a body in parts, or server-sent events."""


class Route(NamedTuple):
    method: str
    path: str
    """`*` as the last part matches anything; so does `*` as the first of two parts."""
    handler: Handler
    name: str = "http.other"
    content_type: bytes = JSON
    needs_token: bool = True


class JsonApp:
    """An ASGI application with fixed routes. It checks the token, reads bodies, and turns errors into answers."""

    def __init__(
        self,
        routes: Sequence[Route],
        access: Access,
        *,
        max_bytes: int,
        token_remedy: str,
        count: Callable[[str, float, str | None], None] = lambda name, seconds, kind: None,
        websockets: Mapping[str, Asgi] = {},
        mounts: Mapping[str, Asgi] = {},
        key_header: bytes | None = None,
        to_error: Callable[[Exception], HttpError] = as_http_error,
        render_error: Callable[[HttpError], bytes] = lambda error: error.body,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`count` is called after each request with its name, its duration in seconds, and the kind of its error.
        `websockets` and `mounts` are other applications by path, called after the token was checked. The `key_header`
        may hold the token without a prefix. `headers` are sent with every answer."""
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._access = access
        self._token = access.token.encode() if access.token is not None else None
        self._max_bytes, self._token_remedy = max_bytes, token_remedy
        self._count, self._websockets, self._mounts = count, websockets, mounts
        self._key_header, self._to_error, self._render_error = key_header, to_error, render_error
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
            return
        if (mounted := self._mounts.get(scope["path"])) is not None and self._is_admitted(scope["headers"]):
            await _run_mounted(mounted, scope, receive, send)
            return
        method = scope["method"]
        request = HttpRequest(scope, receive, method == "POST")
        began, kind = time.perf_counter(), None
        status = 200
        try:
            if mounted is not None:
                self.admit(scope["headers"])  # raises if the request is not admitted
            route = self.find_route(scope)
            request.name, request.content_type = route.name, route.content_type
            request.accept = self.admit(scope["headers"], route.needs_token)
            if request.arriving:
                await self._read_body(request)
            body = await route.handler(request)
            if not isinstance(body, bytes):
                sent = body if isinstance(body, Parts) else Parts(body, b"text/event-stream")
                headers = [(b"content-type", sent.content_type), (b"cache-control", b"no-store"), *self._headers]
                await _send_parts(sent.parts, headers, send)
                self._count(request.name, time.perf_counter() - began, None)
                return
            headers = [(b"content-type", request.content_type)]
        except Exception as error:
            answer = self._to_error(error)
            status, kind, body = answer.status, answer.kind, self._render_error(answer)
            headers = [(b"content-type", JSON), *answer.headers]
        finally:
            if request.held is not None:
                request.held.release()
        self._count(request.name, time.perf_counter() - began, kind)
        headers += [*self._headers, (b"content-length", b"%d" % len(body))]
        if request.arriving:
            headers.append(_CLOSE)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if method == "HEAD" else body
        await send({"type": "http.response.body", "body": body, "more_body": request.arriving})
        if request.arriving:
            await _discard(receive)
            await send({"type": "http.response.body", "body": b""})

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve = self._websockets.get(scope["path"])
        if serve is None or not self._is_admitted(scope["headers"]):
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: the client gets HTTP 403
            return
        self._count("http.websocket", 0.0, None)
        await serve(scope, receive, send)

    def find_route(self, scope: Scope) -> Route:
        """Returns the route of a request, before its token is checked and its body is read."""
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path)
        if methods is None:
            first, _, last = path.rpartition("/")
            methods = self._routes.get(f"{first}/*")
            if methods is None and first.count("/") == 1:
                methods = self._routes.get(f"/*/{last}")
        if methods is None:
            known = ", ".join(self._routes)
            raise HttpError(404, "unknown_path", f"there is nothing at {path:.80}", remedy=f"the paths are {known}")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(f"{name}, HEAD" if name == "GET" else name for name in methods)
            raise HttpError(405, "wrong_method", f"{path:.80} accepts {' or '.join(methods)}", allow=allow)
        return route

    def admit(self, headers: Headers, needs_token: bool = True) -> bytes:
        """Returns the `accept` header. Raises HttpError for a wrong token or host, or a request from a foreign page."""
        found = dict(headers)
        given, host, origin = found.get(b"authorization", b""), found.get(b"host", b""), found.get(b"origin", b"")
        if self._token is not None:
            key = found.get(self._key_header) if self._key_header is not None else None
            if needs_token and not (self._is_token(given) or (key is not None and self._is_key(key))):
                raise HttpError(401, "denied", "the token is missing or wrong", remedy=self._token_remedy)
        elif not self._access.open and host and not _is_own(host):
            # A page in a browser can point its own host name to this machine; its requests then have no `Origin`.
            raise HttpError(
                403,
                "denied",
                f"{host.decode('latin-1'):.80} is not a name of this machine",
                remedy="use 127.0.0.1 or localhost; under other names, serve with a token or --open",
            )
        if origin and origin.partition(b"://")[2] != host:
            # Any page in a browser can post to this machine. Only our own page needs to.
            raise HttpError(
                403, "denied", "a page of another site may not send requests here", remedy="ask from a program"
            )
        return found.get(b"accept", b"")

    def _is_admitted(self, headers: Headers) -> bool:
        try:
            self.admit(headers)
        except HttpError:
            return False
        return True

    def _is_token(self, given: bytes) -> bool:
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and self._is_key(token)

    def _is_key(self, key: bytes) -> bool:
        return hmac.compare_digest(key.strip(), self._token or b"")

    async def _read_body(self, request: HttpRequest) -> None:
        receive = request.receive
        message = await receive()
        body: bytes | bytearray = message.get("body", b"")
        if message.get("more_body"):
            body = bytearray(body)  # a bytearray grows in place
            held = request.held = Holding()
            _hold(held, len(body))
            while message.get("more_body") and len(body) <= self._max_bytes:
                message = await receive()
                part = message.get("body", b"")
                _hold(held, len(part))
                body += part
        request.arriving = bool(message.get("more_body"))
        if message["type"] == "http.disconnect":
            raise HttpError(400, "bad_request", "the request ended before it was complete")
        if len(body) > self._max_bytes:
            raise HttpError(413, "too_large", f"a body may have at most {self._max_bytes} bytes")
        request.body = bytes(body)


@lru_cache(maxsize=64)
def _is_own(host: bytes) -> bool:
    """Returns whether it is a name of this machine. Without a token only these names are allowed, because other names
    could point to this machine, too."""
    try:
        name = urlsplit(f"http://{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()


def _hold(held: Holding, size: int) -> None:
    if not held.add(size):
        problem = f"the bodies of all requests together may have at most {MOST_BYTES >> 20} MB"
        raise HttpError(429, "busy", problem, remedy="retry when some requests are answered, or send less at once")


async def _run_mounted(app: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
    held = Holding()

    async def receive_counted() -> dict[str, Any]:
        message = await receive()
        _hold(held, len(message.get("body", b"")))
        return message

    try:
        await app(scope, receive_counted, send)
    except HttpError as error:  # its body would have been too large
        await send({"type": "http.response.start", "status": error.status, "headers": [*error.headers, _CLOSE]})
        await send({"type": "http.response.body", "body": error.body})
    finally:
        held.release()


async def _discard(receive: Receive) -> None:
    """Reads the rest of a body for a short time."""
    left = _POLITE_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_POLITE_SECONDS):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])


async def _send_parts(parts: AsyncGenerator[bytes], headers: Headers, send: Send) -> None:
    """Sends nothing before the first part, so an error before it is an ordinary answer."""
    start: dict[str, Any] | None = {"type": "http.response.start", "status": 200, "headers": headers}
    async with contextlib.aclosing(parts):
        async for part in parts:
            if start is not None:
                await send(start)
                start = None
            await send({"type": "http.response.body", "body": part, "more_body": True})
    if start is not None:
        await send(start)
    await send({"type": "http.response.body", "body": b""})


def format_event(name: str, data: bytes) -> bytes:
    """Formats a server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
