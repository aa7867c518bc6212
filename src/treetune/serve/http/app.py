"""The HTTP episode server as a bare ASGI application: paths, bodies, tokens, status codes.

    app = App(server, episodes)          # uvicorn, or any other ASGI server, runs it

It only translates: what a start or a step means is `http_episodes.py`'s to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import msgspec

from treetune.errors import UsageError
from treetune.host import info_of
from treetune.order import checked_index
from treetune.serve.access import is_loopback
from treetune.serve.http.episodes import Episodes
from treetune.serve.http.event_stream import step_events
from treetune.serve.http.openapi import openapi
from treetune.serve.http.websocket import SOCKET_PATH, EpisodeSocket
from treetune.serve.http.wire import (
    CancelBody,
    HealthAnswer,
    HttpError,
    InfoAnswer,
    StartBatchAnswer,
    StartBatchBody,
    StartBody,
    StepBatchAnswer,
    StepBatchBody,
    StepBody,
    encode,
    http_error,
    read_body,
)
from treetune.serve.zmq.server import EnvServer

log = logging.getLogger("treetune.serve")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[[bytes, Receive], Awaitable[bytes]]
"""Takes the body; whoever wants to know whether the caller is still there goes on to receive."""

_JSON = (b"content-type", b"application/json")
_OPEN = {"/", "/api/health", "/openapi.json"}
"""What is answered without the token: nothing in it is secret."""

_start_body = msgspec.json.Decoder(StartBody)
_step_body = msgspec.json.Decoder(StepBody)
_cancel_body = msgspec.json.Decoder(CancelBody)
_start_batch_body = msgspec.json.Decoder(StartBatchBody)
_step_batch_body = msgspec.json.Decoder(StepBatchBody)


class App:
    def __init__(self, server: EnvServer, episodes: Episodes) -> None:
        self._server = server
        self._episodes = episodes
        token = server.config.access.token
        self._bearer = f"Bearer {token}".encode() if token is not None else None
        self._most = episodes.config.max_bytes
        self._routes: dict[str, tuple[str, str, Handler]] = {
            "/api/episode/step": ("POST", "http.step", self._step),
            "/api/episode/start": ("POST", "http.start", self._start),
            "/api/episode/cancel": ("POST", "http.cancel", self._cancel),
            "/api/episode/start_batch": ("POST", "http.start_batch", self._start_batch),
            "/api/episode/step_batch": ("POST", "http.step_batch", self._step_batch),
            "/api/task/info": ("GET", "http.info", self._info),
            "/api/health": ("GET", "http.health", self._health),
            "/openapi.json": ("GET", "http.openapi", self._openapi),
            "/metrics": ("GET", "http.metrics", self._metrics),
            "/": ("GET", "http.page", self._page),
        }
        self._types = {"/": b"text/html; charset=utf-8", "/metrics": b"text/plain; version=0.0.4; charset=utf-8"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        began, path, name, kind = time.perf_counter(), scope["path"], "http.other", None
        status, headers = 200, [_JSON]
        try:
            method, name, handler = self._route(path, scope["method"])
            accept = self._admit(path, scope["headers"])
            if name == "http.step" and b"text/event-stream" in accept:
                await self._stream(receive, send)
                self._server.metrics.request("http.step_stream", time.perf_counter() - began)
                return
            body = await handler(await self._body(receive) if method == "POST" else b"", receive)
            if path in self._types:
                headers = [(b"content-type", self._types[path])]
        except HttpError as error:
            status, kind, body = error.status, error.kind, error.body
            headers = [_JSON, *_error_headers(error)]
        except Exception as error:
            log.exception("%s failed", path)
            told = http_error(error)
            status, kind, body = told.status, told.kind, told.body
        self._server.metrics.request(name, time.perf_counter() - began, kind)
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _stream(self, receive: Receive, send: Send) -> None:
        begun = False
        body = read_body(_step_body, await self._body(receive))
        async with contextlib.aclosing(step_events(self._episodes, body)) as events:
            async for event in events:
                if not begun:
                    begun = True
                    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != SOCKET_PATH:
                raise HttpError(404, "unknown_path", f"the WebSocket is at {SOCKET_PATH}")
            self._admit(scope["path"], scope["headers"])
        except HttpError:
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: HTTP 403
            return
        self._server.metrics.request("http.websocket", 0.0)
        await EpisodeSocket(self._episodes, receive, send).run()

    # Who may ask what

    def _route(self, path: str, method: str) -> tuple[str, str, Handler]:
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            raise HttpError(404, "unknown_path", f"there is nothing at {path:.80}", remedy=f"the paths are {known}")
        if method != route[0] and (method, route[0]) != ("HEAD", "GET"):
            allow = "GET, HEAD" if route[0] == "GET" else route[0]
            raise HttpError(405, "wrong_method", f"{path} is asked with {route[0]}", allow=allow)
        return route

    def _admit(self, path: str, headers: list[tuple[bytes, bytes]]) -> bytes:
        """What kind of answer is asked for, once it is clear that there may be one."""
        given = host = origin = accept = b""
        for key, value in headers:
            if key == b"authorization":
                given = value
            elif key == b"host":
                host = value
            elif key == b"origin":
                origin = value
            elif key == b"accept":
                accept = value
        if self._bearer is not None and path not in _OPEN and not hmac.compare_digest(given, self._bearer):
            remedy = "send `Authorization: Bearer TOKEN`; probe and trainers' bridges take TREETUNE_TOKEN"
            raise HttpError(401, "denied", "the token is missing or wrong", remedy=remedy)
        if origin and (origin.partition(b"://")[2] != host or not self._is_own(host)):
            # Any page that a person visits can post to this machine; none but ours has a reason to.
            raise HttpError(403, "denied", "a page from elsewhere may not play here", remedy="ask from a program")
        return accept

    def _is_own(self, host: bytes) -> bool:
        """Without a token only names of this machine: any other could be made to point here."""
        if self._bearer is not None or self._server.config.access.open:
            return True
        return is_loopback(urlsplit(f"http://{host.decode('latin-1')}").hostname or "")

    async def _body(self, receive: Receive) -> bytes:
        message = await receive()
        body: bytes | bytearray = message.get("body", b"")
        if message.get("more_body"):
            body = bytearray(body)  # which grows in place
        while message.get("more_body") and len(body) <= self._most:
            message = await receive()
            body += message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise HttpError(400, "bad_request", "the request was not sent to its end")
        if len(body) > self._most:
            raise HttpError(413, "too_large", f"a body may have {self._most} bytes")
        return bytes(body)

    # What is answered

    async def _start(self, data: bytes, receive: Receive) -> bytes:
        with _Caller(receive) as caller:
            return await self._episodes.start(read_body(_start_body, data), caller.has_left)

    async def _step(self, data: bytes, receive: Receive) -> bytes:
        return await self._episodes.step(read_body(_step_body, data))

    async def _cancel(self, data: bytes, receive: Receive) -> bytes:
        return await self._episodes.cancel(read_body(_cancel_body, data).episode_id)

    async def _start_batch(self, data: bytes, receive: Receive) -> bytes:
        bodies = read_body(_start_batch_body, data).episodes
        _refuse_indices(bodies)
        with _Caller(receive) as caller:
            return encode(StartBatchAnswer(await _each(self._episodes.start(body, caller.has_left) for body in bodies)))

    async def _step_batch(self, data: bytes, receive: Receive) -> bytes:
        bodies = read_body(_step_batch_body, data).steps
        return encode(StepBatchAnswer(await _each(self._episodes.step(body) for body in bodies)))

    async def _info(self, data: bytes, receive: Receive) -> bytes:
        info, config = info_of(self._server.streams), self._episodes.config
        return encode(
            InfoAnswer(
                name=info.name,
                num_tasks=info.num_tasks,
                cursor=info.cursor,
                by_index=info.by_index,
                fingerprint=info.fingerprint,
                max_episodes=config.max_episodes,
                idle_seconds=config.idle_seconds,
                deadline_seconds=config.deadline_seconds,
                max_turns=self._server.config.limits.max_turns,
            )
        )

    async def _health(self, data: bytes, receive: Receive) -> bytes:
        if self._episodes.stopping:
            raise HttpError(503, "stopping", "the server is stopping", retry_after=1)
        workers = self._server.crew.stats().get("workers", 0)
        return encode(HealthAnswer(episodes=len(self._episodes.live), workers=workers))

    async def _openapi(self, data: bytes, receive: Receive) -> bytes:
        return openapi(needs_token=self._bearer is not None)

    async def _metrics(self, data: bytes, receive: Receive) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self._server.metrics)
        return generate_latest(registry)

    async def _page(self, data: bytes, receive: Receive) -> bytes:
        return page()


class _Caller:
    """Within it, `has_left` tells whether the connection of a request has ended meanwhile."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def __enter__(self) -> _Caller:
        self._end = asyncio.ensure_future(self._receive())
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.cancel()

    def has_left(self) -> bool:
        return self._end.done()


def _refuse_indices(bodies: list[StartBody]) -> None:
    """A batch with an index that no task can have is refused whole, as one that is no number is."""
    for number, body in enumerate(bodies):
        try:
            checked_index(body.task_index or 0)
        except UsageError as error:
            raise http_error(error, path=f"$.episodes[{number}].task_index") from None


async def _each(answers: Any) -> list[msgspec.Raw]:
    """Every answer of a batch, an error in its place: one that fails does not fail the others."""

    async def one(answer: Awaitable[bytes]) -> msgspec.Raw:
        try:
            return msgspec.Raw(await answer)
        except Exception as error:
            if not isinstance(error, HttpError):
                log.exception("one of a batch failed")
            return msgspec.Raw(http_error(error).body)

    return list(await asyncio.gather(*(one(answer) for answer in answers)))


def _error_headers(error: HttpError) -> list[tuple[bytes, bytes]]:
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if error.allow is not None:
        headers.append((b"allow", error.allow.encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not wanted
    return headers


@cache
def page() -> bytes:
    """The page at `/`, on which a person can play an episode."""
    return resources.files("treetune.serve.http").joinpath("page.html").read_bytes()
