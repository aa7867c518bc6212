"""The doors of a server that speak HTTP: the episode routes, and the metrics for Prometheus.

EnvServer(taskset, doors=[HttpDoor(HttpConfig(address=":5000"))])
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec

from treetune.play.episode_table import LiveEpisode, SessionLimits
from treetune.play.host import info_of
from treetune.serve.http import HttpConfig, wire
from treetune.serve.http.episodes import SOCKET_PATH, EpisodeSocket, HttpEpisodes, stream_step
from treetune.serve.http.wire import read_body, to_http_error
from treetune.serve.server import Door, EnvServer
from treetune.system.http_app import JSON, Asgi, Events, HttpRequest, JsonApp, Route
from treetune.system.http_error import encode
from treetune.system.http_listener import HttpListener
from treetune.system.prometheus import CONTENT_TYPE


class EpisodeDoor(Door):
    """A door that plays episodes over HTTP: an application with its own listener."""

    terms: SessionLimits

    def __init__(self, config: HttpConfig) -> None:
        self.config, self.address = config, config.address

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._listener = HttpListener(self.address, server.config.access)
        if server.config.capacity is None:
            server.capacity = max(server.capacity, self.config.max_episodes)

    async def open(self) -> None:
        self.address = await self._listener.start(self.make_app(), websocket_bytes=self.config.max_bytes)

    def make_app(self) -> JsonApp:
        raise NotImplementedError

    @property
    def live(self) -> dict[str, LiveEpisode]:
        """The episodes of the server."""
        return self.server.host.episodes.live

    def under_way(self) -> int:
        return self.terms.live + self.terms.starting

    async def close(self) -> None:
        await self.server.host.episodes.close(self.terms)
        await self._listener.close()

    def gauges(self) -> dict[str, float]:
        return {f"{self.name}_episodes": self.terms.live}


class HttpDoor(EpisodeDoor):
    name = "http"

    def __init__(self, config: HttpConfig | None = None, mounts: Mapping[str, Asgi] = {}) -> None:
        """`mounts` are other applications by path. The token is checked before they are called."""
        super().__init__(config or HttpConfig())
        self._mounts = mounts

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._episodes = HttpEpisodes(server, self.config)
        self.terms = self._episodes.terms

    def make_app(self) -> JsonApp:
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
            Route("GET", "/metrics", self._metrics, "http.metrics", CONTENT_TYPE),
            Route("GET", "/", self._page, "http.page", html, needs_token=False),
        ]
        return JsonApp(
            routes,
            self.server.config.access,
            max_bytes=self.config.max_bytes,
            to_error=to_http_error,
            token_remedy="send `Authorization: Bearer TOKEN`; probe and trainers' bridges take TREETUNE_TOKEN",
            count=self.server.metrics.count_request,
            websockets={SOCKET_PATH: lambda scope, receive, send: EpisodeSocket(self._episodes, receive, send).run()},
            mounts=self._mounts,
        )

    # Requests

    async def _start(self, request: HttpRequest) -> bytes:
        return await self._start_watched(read_body(wire.StartBody, request.body), request)

    async def _start_watched(self, body: wire.StartBody, request: HttpRequest) -> bytes:
        """Ends the episode if the client has disconnected, unless the client can name it."""
        answer = await self._episodes.start(body)
        if body.request_id is None and await request.is_abandoned():
            await self._episodes.cancel(wire.decode(wire.CancelBody, answer).episode_id)
        return answer

    async def _step(self, request: HttpRequest) -> bytes | Events:
        body = read_body(wire.StepBody, request.body)
        if b"text/event-stream" in request.accept:
            request.name = "http.step_stream"
            return stream_step(self._episodes, body)
        return await self._episodes.step(body)

    async def _cancel(self, request: HttpRequest) -> bytes:
        return await self._episodes.cancel(read_body(wire.CancelBody, request.body).episode_id)

    async def _start_batch(self, request: HttpRequest) -> bytes:
        async def start(part: Any) -> bytes:
            return await self._start_watched(wire.read_part(wire.StartBody, part), request)

        parts = read_body(wire.StartBatchBody, request.body).episodes
        return encode(wire.StartBatchAnswer(await _answer_each(map(start, parts))))

    async def _step_batch(self, request: HttpRequest) -> bytes:
        async def step(part: Any) -> bytes:
            return await self._episodes.step(wire.read_part(wire.StepBody, part))

        parts = read_body(wire.StepBatchBody, request.body).steps
        return encode(wire.StepBatchAnswer(await _answer_each(map(step, parts))))

    async def _info(self, request: HttpRequest) -> bytes:
        info, config = info_of(self.server.streams), self.config
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
                contract=await self._episodes.contract(),
            )
        )

    async def _health(self, request: HttpRequest) -> bytes:
        self.server.refuse_stopping()
        return encode(wire.HealthAnswer(episodes=self.terms.live, workers=self.server.host.stats()["workers"]))

    async def _openapi(self, request: HttpRequest) -> bytes:
        return wire.describe_api(needs_token=self.server.config.access.token is not None)

    async def _metrics(self, request: HttpRequest) -> bytes:
        if JSON in request.accept:  # `treetune top`
            request.content_type = JSON
            return encode({"name": self.server.taskset.name, **self.server.metrics.stats()})
        return self.server.metrics.render()

    async def _page(self, request: HttpRequest) -> bytes:
        """Serves a page on which a person can play an episode."""
        return resources.files("treetune.serve.http").joinpath("page.html").read_bytes()


class MetricsDoor(Door):
    """Serves the metrics for Prometheus at a separate address. The token is checked here, too."""

    name = "metrics"

    def __init__(self, address: str) -> None:
        self.address = address

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._listener = HttpListener(self.address, server.config.access)

    async def open(self) -> None:
        routes = [Route("GET", "/metrics", self._render, content_type=CONTENT_TYPE)]
        remedy = "send `Authorization: Bearer TOKEN`; of Prometheus that is `authorization: {credentials: TOKEN}`"
        app = JsonApp(routes, self.server.config.access, max_bytes=0, token_remedy=remedy)
        self.address = f"{await self._listener.start(app)}/metrics"

    async def _render(self, request: HttpRequest) -> bytes:
        return self.server.metrics.render()

    async def close(self) -> None:
        await self._listener.close()


async def _answer_each(answers: Iterable[Awaitable[bytes]]) -> list[msgspec.Raw]:
    """Returns every answer of a batch. An error takes the place of its answer and does not fail the others."""
    found = await asyncio.gather(*answers, return_exceptions=True)
    return [msgspec.Raw(one if isinstance(one, bytes) else to_http_error(one).body) for one in found]
