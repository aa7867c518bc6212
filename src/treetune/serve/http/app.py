"""The HTTP episode server as an ASGI application: its paths, and which part of the server answers each.

    app = EpisodeApp(server, episodes)
    await Listener(app, "127.0.0.1", 5000).start()

It only translates: `episodes.py` knows what a start or a step means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources

import msgspec

from treetune.errors import UsageError
from treetune.host import info_of
from treetune.order import checked_index
from treetune.serve.http import wire
from treetune.serve.http.asgi import JSON, Events, JsonApp, Receive, Request, Route, Scope, Send
from treetune.serve.http.episodes import Episodes
from treetune.serve.http.openapi import openapi
from treetune.serve.http.streaming import SOCKET_PATH, EpisodeSocket, step_events
from treetune.serve.http.wire import HttpError, encode, http_error, read_body
from treetune.serve.server import EnvServer

log = logging.getLogger("treetune.serve")

_start_body = msgspec.json.Decoder(wire.StartBody)
_step_body = msgspec.json.Decoder(wire.StepBody)
_cancel_body = msgspec.json.Decoder(wire.CancelBody)
_start_batch_body = msgspec.json.Decoder(wire.StartBatchBody)
_step_batch_body = msgspec.json.Decoder(wire.StepBatchBody)


class EpisodeApp(JsonApp):
    def __init__(self, server: EnvServer, episodes: Episodes) -> None:
        text = b"text/plain; version=0.0.4; charset=utf-8"
        html = b"text/html; charset=utf-8"
        routes = [
            Route("POST", "/api/episode/step", self._step, "http.step"),
            Route("POST", "/api/episode/start", self._start, "http.start"),
            Route("POST", "/api/episode/cancel", self._cancel, "http.cancel"),
            Route("POST", "/api/episode/start_batch", self._start_batch, "http.start_batch"),
            Route("POST", "/api/episode/step_batch", self._step_batch, "http.step_batch"),
            Route("GET", "/api/task/info", self._info, "http.info"),
            Route("GET", "/api/health", self._health, "http.health", needs_token=False),
            Route("GET", "/openapi.json", self._openapi, "http.openapi", needs_token=False),
            Route("GET", "/metrics", self._metrics, "http.metrics", text),
            Route("GET", "/", self._page, "http.page", html, needs_token=False),
        ]
        super().__init__(
            routes,
            server.config.access,
            max_bytes=episodes.config.max_bytes,
            token_remedy="send `Authorization: Bearer TOKEN`; probe and trainers' bridges take TREETUNE_TOKEN",
            count=server.metrics.request,
        )
        self._server, self._episodes = server, episodes

    async def serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != SOCKET_PATH:
                raise HttpError(404, "unknown_path", f"the WebSocket is at {SOCKET_PATH}")
            self.admit(scope["headers"])
        except HttpError:
            await super().serve_websocket(scope, receive, send)  # before it was accepted: HTTP 403
            return
        self._count("http.websocket", 0.0, None)
        await EpisodeSocket(self._episodes, receive, send).run()

    async def _start(self, request: Request) -> bytes:
        body = read_body(_start_body, request.body)
        with _watch_caller(request) as has_left:
            return await self._episodes.start(body, has_left)

    async def _step(self, request: Request) -> bytes | Events:
        body = read_body(_step_body, request.body)
        if b"text/event-stream" in request.accept:
            request.name = "http.step_stream"
            return step_events(self._episodes, body)
        return await self._episodes.step(body)

    async def _cancel(self, request: Request) -> bytes:
        return await self._episodes.cancel(read_body(_cancel_body, request.body).episode_id)

    async def _start_batch(self, request: Request) -> bytes:
        bodies = read_body(_start_batch_body, request.body).episodes
        _refuse_indices(bodies)
        with _watch_caller(request) as has_left:
            answers = await _answer_each(self._episodes.start(body, has_left) for body in bodies)
        return encode(wire.StartBatchAnswer(answers))

    async def _step_batch(self, request: Request) -> bytes:
        bodies = read_body(_step_batch_body, request.body).steps
        return encode(wire.StepBatchAnswer(await _answer_each(self._episodes.step(body) for body in bodies)))

    async def _info(self, request: Request) -> bytes:
        info, config = info_of(self._server.streams), self._episodes.config
        return encode(
            wire.InfoAnswer(
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

    async def _health(self, request: Request) -> bytes:
        if self._episodes.stopping:
            raise HttpError(503, "stopping", "the server is stopping", retry_after=1)
        workers = self._server.executor.stats().get("workers", 0)
        return encode(wire.HealthAnswer(episodes=self._episodes.count, workers=workers))

    async def _openapi(self, request: Request) -> bytes:
        return openapi(needs_token=self._server.config.access.token is not None)

    async def _metrics(self, request: Request) -> bytes:
        if JSON in request.accept:  # `treetune top`
            request.content_type = JSON
            return encode({"name": self._server.taskset.name, **self._server.metrics.stats()})
        return self._server.metrics.render()

    async def _page(self, request: Request) -> bytes:
        return page()


@contextmanager
def _watch_caller(request: Request) -> Iterator[Callable[[], bool]]:
    """Gives what tells whether the caller of a request has left meanwhile."""
    end = asyncio.ensure_future(request.receive())
    try:
        yield end.done
    finally:
        end.cancel()


def _refuse_indices(bodies: list[wire.StartBody]) -> None:
    """A batch with an index that no task can have is refused whole, as one that is no number is."""
    for number, body in enumerate(bodies):
        try:
            checked_index(body.task_index or 0)
        except UsageError as error:
            raise http_error(error, path=f"$.episodes[{number}].task_index") from None


async def _answer_each(answers: Iterable[Awaitable[bytes]]) -> list[msgspec.Raw]:
    """Every answer of a batch, an error in its place: one that fails does not fail the others."""

    async def answer_one(answer: Awaitable[bytes]) -> msgspec.Raw:
        try:
            return msgspec.Raw(await answer)
        except Exception as error:
            if not isinstance(error, HttpError):
                log.exception("one of a batch failed")
            return msgspec.Raw(http_error(error).body)

    return list(await asyncio.gather(*map(answer_one, answers)))


@cache
def page() -> bytes:
    """The page at `/`, on which a person can play an episode."""
    return resources.files("treetune.serve.http").joinpath("page.html").read_bytes()
