"""The OpenEnv door of a server: `/ws`, where its clients play, and the routes beside it; those of ORS too.

    EnvServer(taskset, doors=[OpenEnvDoor(HttpConfig(address=":8000"))])

A session plays one episode at a time. Who asks is checked before anything is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from treetune.play.episode_table import SessionLimits
from treetune.serve.http import HttpConfig
from treetune.serve.http.asgi import HttpRequest, JsonApp, Route
from treetune.serve.http.listener import Listener
from treetune.serve.http.wire import HttpError, check_info, encode, read_body
from treetune.serve.openenv import rpc, wire
from treetune.serve.openenv.session import Session
from treetune.serve.openenv.socket import SessionSocket
from treetune.serve.openenv.tasks import TaskRoutes
from treetune.serve.openenv.wire import Fault, Reset
from treetune.serve.ors.routes import OrsRoutes
from treetune.serve.server import Door, EnvServer
from treetune.system.folders import read_version

API_VERSION = "1.0.0"
"""Of OpenEnv's HTTP interface."""
_SILENT_SECONDS = 900.0
"""A session that has no episode, and whose client says nothing for so long, is closed."""
_SWEEP_SECONDS = 5.0
S = TypeVar("S", bound=Session)


class OpenEnvDoor(Door):
    name = "openenv"

    def __init__(self, config: HttpConfig | None = None, split: str = "train") -> None:
        """`split` is how the tasks are called to those who ask for splits."""
        self.config = config = config or HttpConfig(address="127.0.0.1:8000")
        self.address = config.address
        self.terms = SessionLimits(config.idle_seconds, config.deadline_seconds, check_info)
        self.tasks = TaskRoutes(self, split)
        self.sessions: dict[str, Session] = {}
        self._stops: dict[str, Callable[[str], None]] = {}
        """By session, what closes its connection, where it has one of its own."""
        self.offered: list[dict[str, Any]] | None = None
        """The tools of the last episode that was begun."""
        self._sweeper: asyncio.Task[None] | None = None

    # Its life

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._listener = Listener(self.address, server.config.access)
        if server.config.capacity is None:
            server.capacity = max(server.capacity, self.config.max_episodes)

    async def open(self) -> None:
        self.address = await self._listener.start(self._make_app(), websocket_bytes=self.config.max_bytes)
        self._sweeper = asyncio.create_task(self._sweep())

    def _make_app(self) -> JsonApp:
        own = [
            Route("POST", "/reset", self._reset, "openenv.http_reset"),
            Route("POST", "/step", self._step, "openenv.http_step"),
            Route("GET", "/state", self._state, "openenv.http_state"),
            Route("GET", "/schema", self._schema, "openenv.schema"),
            Route("GET", "/metadata", self._metadata, "openenv.metadata"),
            Route("GET", "/health", self._health, "openenv.health", needs_token=False),
            Route("POST", "/mcp", self._mcp, "openenv.http_mcp"),
            Route("GET", "/openapi.json", self._openapi, "openenv.openapi", needs_token=False),
        ]
        self._routes = [*own, *self.tasks.routes(), *OrsRoutes(self).routes()]
        return JsonApp(
            self._routes,
            self.server.config.access,
            max_bytes=self.config.max_bytes,
            token_remedy="send `Authorization: Bearer TOKEN` (ORS: `X-API-Key: TOKEN`)",
            count=self.server.metrics.count_request,
            websockets={"/ws": lambda scope, receive, send: SessionSocket(self, scope, receive, send).run()},
            key_header=b"x-api-key",
            render_error=_render_error,
        )

    def under_way(self) -> int:
        return self.terms.live + self.terms.starting

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.server.host.episodes.close(self.terms)
        await self._listener.close()

    def gauges(self) -> dict[str, float]:
        return {"openenv_episodes": self.terms.live, "openenv_sessions": len(self.sessions)}

    # Sessions

    @overload
    def open_session(self, stop: Callable[[str], None] | None = None) -> Session: ...
    @overload
    def open_session(self, *, id: str, kind: type[S]) -> S: ...
    def open_session(
        self, stop: Callable[[str], None] | None = None, id: str | None = None, kind: type[Any] = Session
    ) -> Any:
        """`stop` closes the connection that the session ends with; without one it has no connection of its own."""
        active, most = len(self.sessions), self.config.max_episodes
        if active >= most or self.server.stopping:
            problem = f"Server at capacity: {active}/{most} sessions active. Cannot accept new connections."
            raise Fault("CAPACITY_REACHED", problem, active_sessions=active, max_sessions=most)
        session = kind(self, id)
        self.sessions[session.id] = session
        if stop is not None:
            self._stops[session.id] = stop
        return session

    def attach_session(self, id: str) -> Session:
        """A session that was opened over HTTP, for a WebSocket that plays it."""
        session = self.sessions.get(id)
        if session is None or id in self._stops:
            raise Fault("SESSION_ERROR", f"Unknown session_id: {id:.80}")
        if session.attached:
            raise Fault("SESSION_ERROR", f"Session {id} already has an attached WebSocket")
        session.attached = True
        return session

    async def close_session(self, session: Session) -> None:
        self.sessions.pop(session.id, None)
        self._stops.pop(session.id, None)
        await session.end()

    async def learn_tools(self) -> list[dict[str, Any]]:
        """What the last episode offered. Before the first one is begun for it, and given up."""
        if self.offered is None:
            await self._with_session(lambda session: session.reset(Reset(seed=self._first_seed())))
        return self.offered or []

    def _first_seed(self) -> int | None:
        """Of the first task, which moves no cursor; None where tasks have no numbers."""
        return None if self.server.streams.sequential else 0

    async def _sweep(self) -> None:
        """Closes sessions whose clients are silent. Their episodes have ended before."""
        silent = max(_SILENT_SECONDS, self.config.idle_seconds)
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest = time.monotonic() - silent
            for session in list(self.sessions.values()):
                if session.heard < oldest and not session.is_live and not session.attached:
                    if (stop := self._stops.get(session.id)) is not None:
                        stop(f"nothing was said for {silent:g} seconds")
                    else:
                        await self.close_session(session)

    # Requests

    async def _reset(self, request: HttpRequest) -> bytes:
        """As in OpenEnv, a request has an environment of its own: this one shows how a task begins."""
        asked = wire.read_reset(read_body(dict[str, Any], request.body), "body")
        return encode(await self._with_session(lambda session: session.reset(asked)))

    async def _step(self, request: HttpRequest) -> bytes:
        """One answer to the next task, or to the one that is named."""
        body = read_body(dict[str, Any], request.body)
        action = body.get("action")
        if not isinstance(action, dict):
            is_given, at = "action" in body, ("body", "action")
            wrong = wire.Wrong.kind("dict", action, *at) if is_given else wire.Wrong.missing(body, *at)
            raise wire.invalid([wrong])
        asked, value = wire.read_reset(body, "body"), wire.read_action(action)

        async def play(session: Session) -> dict[str, Any]:
            await session.reset(Reset(asked.seed, None, asked.index, asked.task_index, asked.split))
            return await session.answer(value)

        return encode(await self._with_session(play))

    async def _with_session(self, play: Callable[[Session], Any]) -> Any:
        session = self.open_session()
        try:
            return await play(session)
        finally:
            await self.close_session(session)

    async def _state(self, request: HttpRequest) -> bytes:
        return encode(Session(self).state)

    async def _schema(self, request: HttpRequest) -> bytes:
        return encode(wire.schemas())

    async def _metadata(self, request: HttpRequest) -> bytes:
        taskset = self.server.taskset
        about = (type(taskset).__doc__ or "").partition("\n")[0]
        found = {"name": self.tasks.name, "description": about or taskset.name, "readme_content": None}
        return encode({**found, "version": read_version(), "author": None, "documentation_url": None})

    async def _health(self, request: HttpRequest) -> bytes:
        self.server.refuse_stopping()
        return encode({"status": "healthy"})

    async def _mcp(self, request: HttpRequest) -> bytes:
        return encode(await rpc.answer_body(self, request.body))

    async def _openapi(self, request: HttpRequest) -> bytes:
        paths: dict[str, Any] = {}
        for route in self._routes:
            path = route.path.replace("*", "{env_name}")
            paths.setdefault(path, {})[route.method.lower()] = {"responses": {"200": {"description": "The answer."}}}
        info = {"title": self.server.taskset.name, "version": API_VERSION}
        return encode({"openapi": "3.1.0", "info": info, "paths": paths})


def _render_error(error: HttpError) -> bytes:
    """As OpenEnv and ORS have it."""
    return encode({"detail": getattr(error, "detail", None) or str(error)})
