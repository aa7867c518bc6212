"""The HTTP door of a server: its paths, and what a start, a step and a cancel mean to the server's host.

EnvServer(taskset, doors=[HttpDoor(HttpConfig(address=":5000"))])
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec

from treetune.core.environment import Step
from treetune.errors import UsageError
from treetune.play.episode_table import EpisodeEnded, LiveEpisode, SessionLimits
from treetune.play.host import info_of
from treetune.serve.errors import Busy
from treetune.serve.http import HttpConfig, wire
from treetune.serve.http.asgi import JSON, Asgi, Events, HttpRequest, JsonApp, Route
from treetune.serve.http.listener import Listener
from treetune.serve.http.streaming import SOCKET_PATH, EpisodeSocket, stream_step
from treetune.serve.http.wire import encode, read_body, to_http_error
from treetune.serve.server import Door, EnvServer
from treetune.serve.uid_index import UidIndex

_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
_MOST_KEPT_BYTES = 256 << 10
"""Replies of one live episode that are kept; the latest always is."""


class HttpDoor(Door):
    name = "http"

    def __init__(self, config: HttpConfig | None = None, mounts: Mapping[str, Asgi] = {}) -> None:
        """`mounts` are other applications, by their paths; who asks is checked before."""
        self.config = config = config or HttpConfig()
        self._mounts = mounts
        self.address = config.address
        self._terms = SessionLimits(config.idle_seconds, config.deadline_seconds, _render, _MOST_KEPT_BYTES)

    # Its life

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._uids = UidIndex(server)
        self._listener = Listener(self.address, server.config.access)
        if server.config.capacity is None:
            server.capacity = max(server.capacity, self.config.max_episodes)

    async def open(self) -> None:
        self.address = await self._listener.start(self.make_app(), websocket_bytes=self.config.max_bytes)

    def make_app(self) -> Any:
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
            Route("GET", "/metrics", self._metrics, "http.metrics", _PROMETHEUS),
            Route("GET", "/", self._page, "http.page", html, needs_token=False),
        ]
        return JsonApp(
            routes,
            self.server.config.access,
            max_bytes=self.config.max_bytes,
            token_remedy="send `Authorization: Bearer TOKEN`; probe and trainers' bridges take TREETUNE_TOKEN",
            count=self.server.metrics.count_request,
            websockets={SOCKET_PATH: lambda scope, receive, send: EpisodeSocket(self, receive, send).run()},
            mounts=self._mounts,
        )

    def under_way(self) -> int:
        return self._terms.live + self._terms.starting

    async def close(self) -> None:
        await self.server.host.episodes.close(self._terms)
        await self._listener.close()

    def gauges(self) -> dict[str, float]:
        return {"http_episodes": self._terms.live}

    @property
    def live(self) -> dict[str, LiveEpisode]:
        """The episodes of the server."""
        return self.server.host.episodes.live

    # What is asked of the host

    async def start(self, body: wire.StartBody) -> bytes:
        if body.request_id is None:
            return await self._begin(body)
        asked = body.task_index, body.step, body.uid
        return await self.server.host.episodes.start_once(body.request_id, asked, lambda: self._begin(body))

    async def _begin(self, body: wire.StartBody) -> bytes:
        self.server.refuse_stopping()
        most = self.config.max_episodes
        if self.under_way() >= most:
            remedy = "ask again when some have ended, or serve with a larger --max-episodes"
            raise Busy(f"{most} episodes are live, as many as may be", remedy=remedy)
        try:
            index = body.task_index if body.uid is None else await self._find(body.uid, body.task_index)
            started, task, index = await self.server.start_episode(
                index, self._terms, step=body.step, name=body.request_id
            )
        except UsageError as error:
            raise to_http_error(error, path="$.task_index") from None
        info = {"task_index": index, "data_source": task.data_source}
        info |= {key: value for key in ("ability", "env_class") if (value := getattr(task, key))}
        return encode(wire.StartAnswer(started.episode, started.observation, info, started.tools))

    async def _find(self, uid: str, near: int | None) -> int:
        index = await self._uids.find(uid, near)
        if index is None:
            problem = f"there is no task with the uid {uid!r:.80}" + (
                "" if near is None else f", at {near} or elsewhere"
            )
            remedy = "serve the tasks that its row was built from; of tasks without end, name its task_index too"
            raise wire.HttpError(404, wire.UNKNOWN_TASK, problem, path="$.uid", remedy=remedy)
        return index

    async def step(self, body: wire.StepBody) -> bytes:
        """The answer to an action; that of a turn which was played is given again, and nothing is played twice."""
        # A caller that goes away does not stop its step: uvicorn does not tell us, and it may come back for it.
        answer: bytes = await self.server.host.step(body.episode_id, body.value, body.turn, terms=self._terms)
        return answer

    async def cancel(self, id: str) -> bytes:
        book = self.server.host.episodes
        if not await book.cancel(id, self._terms):
            raise EpisodeEnded(id, book.ended.why(id))
        return encode(wire.CancelAnswer(id))

    # Requests

    async def _start(self, request: HttpRequest) -> bytes:
        return await self._start_watched(read_body(wire.StartBody, request.body), request)

    async def _start_watched(self, body: wire.StartBody, request: HttpRequest) -> bytes:
        """Where its caller has left meanwhile the episode ends, unless the caller can name it."""
        answer = await self.start(body)
        if body.request_id is None and await request.is_abandoned():
            await self.cancel(wire.decode(wire.CancelBody, answer).episode_id)
        return answer

    async def _step(self, request: HttpRequest) -> bytes | Events:
        body = read_body(wire.StepBody, request.body)
        if b"text/event-stream" in request.accept:
            request.name = "http.step_stream"
            return stream_step(self, body)
        return await self.step(body)

    async def _cancel(self, request: HttpRequest) -> bytes:
        return await self.cancel(read_body(wire.CancelBody, request.body).episode_id)

    async def _start_batch(self, request: HttpRequest) -> bytes:
        async def start(part: Any) -> bytes:
            return await self._start_watched(wire.read_part(wire.StartBody, part), request)

        parts = read_body(wire.StartBatchBody, request.body).episodes
        return encode(wire.StartBatchAnswer(await _answer_each(map(start, parts))))

    async def _step_batch(self, request: HttpRequest) -> bytes:
        async def step(part: Any) -> bytes:
            return await self.step(wire.read_part(wire.StepBody, part))

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
                max_turns=self.server.config.limits.max_turns,
            )
        )

    async def _health(self, request: HttpRequest) -> bytes:
        self.server.refuse_stopping()
        return encode(wire.HealthAnswer(episodes=self._terms.live, workers=self.server.host.stats()["workers"]))

    async def _openapi(self, request: HttpRequest) -> bytes:
        return wire.describe_api(needs_token=self.server.config.access.token is not None)

    async def _metrics(self, request: HttpRequest) -> bytes:
        if JSON in request.accept:  # `treetune top`
            request.content_type = JSON
            return encode({"name": self.server.taskset.name, **self.server.metrics.stats()})
        return self.server.metrics.render()

    async def _page(self, request: HttpRequest) -> bytes:
        """On which a person can play an episode."""
        return resources.files("treetune.serve.http").joinpath("page.html").read_bytes()


class MetricsDoor(Door):
    """The figures of a server for Prometheus, at an address of their own. A token that is set is checked here too."""

    name = "metrics"

    def __init__(self, address: str) -> None:
        self.address = address

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._listener = Listener(self.address, server.config.access)

    async def open(self) -> None:
        routes = [Route("GET", "/metrics", self._render, content_type=_PROMETHEUS)]
        remedy = "send `Authorization: Bearer TOKEN`; of Prometheus that is `authorization: {credentials: TOKEN}`"
        app = JsonApp(routes, self.server.config.access, max_bytes=0, token_remedy=remedy)
        self.address = f"{await self._listener.start(app)}/metrics"

    async def _render(self, request: HttpRequest) -> bytes:
        return self.server.metrics.render()

    async def close(self) -> None:
        await self._listener.close()


async def _answer_each(answers: Iterable[Awaitable[bytes]]) -> list[msgspec.Raw]:
    """Every answer of a batch, an error in its place: one that fails does not fail the others."""
    found = await asyncio.gather(*answers, return_exceptions=True)
    return [msgspec.Raw(one if isinstance(one, bytes) else to_http_error(one).body) for one in found]


def _render(step: Step) -> bytes:
    wire.check_info(step)
    return encode(wire.StepAnswer(step.observation, step.reward, step.done, step.info, step.calls or msgspec.UNSET))
