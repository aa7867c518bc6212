"""HttpServer: the second door of an `EnvServer`, for all that speak HTTP. The same taskset, cursor and workers.

    http = HttpServer(server, HttpConfig(address=":5000"))
    await server.start()
    await http.start()
    print(http.url)

It runs on the event loop of the server. `EpisodeApp` names the paths; `episodes.py` knows what a start or a step means.
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
from treetune.serve.access import parse_http_address
from treetune.serve.http import wire
from treetune.serve.http.asgi import JSON, Events, HttpRequest, JsonApp, Listener, Receive, Route, Scope, Send
from treetune.serve.http.episodes import Episodes, HttpConfig
from treetune.serve.http.streaming import SOCKET_PATH, EpisodeSocket, stream_step
from treetune.serve.http.wire import HttpError, encode, read_body, to_http_error
from treetune.serve.server import EnvServer

log = logging.getLogger("treetune.serve")


class HttpServer:
    def __init__(self, server: EnvServer, config: HttpConfig | None = None) -> None:
        self.config = config or HttpConfig()
        self._server = server
        self._listener: Listener | None = None
        self.url = ""
        # A wrong address is refused before anything is loaded.
        self._host, self._port = parse_http_address(self.config.address, server.config.access)
        if server.config.capacity is None:
            server.capacity = max(server.capacity, self.config.max_episodes)

    async def start(self) -> None:
        """Listens. The server behind it has been started."""
        self.episodes = Episodes(self._server, self.config)
        app = EpisodeApp(self._server, self.episodes)
        listener = Listener(app, self._host, self._port, websocket_bytes=self.config.max_bytes)
        await listener.start()
        self.url, self._listener = listener.url, listener
        gauges = self._server.metrics.gauges
        self._server.metrics.gauges = lambda: {**gauges(), "http_episodes": self.episodes.count}

    async def stop(self) -> None:
        """Starts no more episodes, lets those that live end, and closes. Before the server behind it stops."""
        await self.drain()
        await self.close()

    async def drain(self) -> None:
        """Starts no more episodes, and lets those that live end."""
        if self._listener is not None:
            await self.episodes.drain(self._server.config.drain_seconds)

    async def close(self) -> None:
        if self._listener is not None:
            await self.episodes.close()
            await self._listener.close()
            self._listener = None


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
            count=server.metrics.count_request,
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

    async def _start(self, request: HttpRequest) -> bytes:
        body = read_body(wire.StartBody, request.body)
        with _watch_caller(request) as has_left:
            return await self._episodes.start(body, has_left)

    async def _step(self, request: HttpRequest) -> bytes | Events:
        body = read_body(wire.StepBody, request.body)
        if b"text/event-stream" in request.accept:
            request.name = "http.step_stream"
            return stream_step(self._episodes, body)
        return await self._episodes.step(body)

    async def _cancel(self, request: HttpRequest) -> bytes:
        return await self._episodes.cancel(read_body(wire.CancelBody, request.body).episode_id)

    async def _start_batch(self, request: HttpRequest) -> bytes:
        bodies = read_body(wire.StartBatchBody, request.body).episodes
        _refuse_indices(bodies)
        with _watch_caller(request) as has_left:
            answers = await _answer_each(self._episodes.start(body, has_left) for body in bodies)
        return encode(wire.StartBatchAnswer(answers))

    async def _step_batch(self, request: HttpRequest) -> bytes:
        bodies = read_body(wire.StepBatchBody, request.body).steps
        return encode(wire.StepBatchAnswer(await _answer_each(self._episodes.step(body) for body in bodies)))

    async def _info(self, request: HttpRequest) -> bytes:
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

    async def _health(self, request: HttpRequest) -> bytes:
        if self._episodes.stopping:
            raise HttpError(503, "stopping", "the server is stopping", retry_after=1)
        workers = self._server.executor.stats().get("workers", 0)
        return encode(wire.HealthAnswer(episodes=self._episodes.count, workers=workers))

    async def _openapi(self, request: HttpRequest) -> bytes:
        return wire.describe_api(needs_token=self._server.config.access.token is not None)

    async def _metrics(self, request: HttpRequest) -> bytes:
        if JSON in request.accept:  # `treetune top`
            request.content_type = JSON
            return encode({"name": self._server.taskset.name, **self._server.metrics.stats()})
        return self._server.metrics.render()

    async def _page(self, request: HttpRequest) -> bytes:
        return _load_page()


@contextmanager
def _watch_caller(request: HttpRequest) -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether the caller of a request has left."""
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
            raise to_http_error(error, path=f"$.episodes[{number}].task_index") from None


async def _answer_each(answers: Iterable[Awaitable[bytes]]) -> list[msgspec.Raw]:
    """Every answer of a batch, an error in its place: one that fails does not fail the others."""

    async def answer_one(answer: Awaitable[bytes]) -> msgspec.Raw:
        try:
            return msgspec.Raw(await answer)
        except Exception as error:
            if not isinstance(error, HttpError):
                log.exception("one of a batch failed")
            return msgspec.Raw(to_http_error(error).body)

    return list(await asyncio.gather(*map(answer_one, answers)))


@cache
def _load_page() -> bytes:
    """The page at `/`, on which a person can play an episode."""
    return resources.files("treetune.serve.http").joinpath("page.html").read_bytes()
