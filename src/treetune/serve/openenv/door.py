"""The OpenEnv door of a server: `/ws`, where its clients play, and the routes beside it; those of ORS too.

    EnvServer(taskset, doors=[OpenEnvDoor(HttpConfig(address=":8000"))])

A session plays one episode at a time. The token is checked before anything is read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from treetune.serve.http import HttpConfig
from treetune.serve.http.asgi import HttpRequest, JsonApp, Route
from treetune.serve.http.door import EpisodeDoor
from treetune.serve.http.wire import HttpError, encode, read_body
from treetune.serve.openenv import rpc, wire
from treetune.serve.openenv.ors import OrsRoutes
from treetune.serve.openenv.session import Session, SessionTable
from treetune.serve.openenv.socket import SessionSocket
from treetune.serve.openenv.wire import Reset
from treetune.serve.server import EnvServer
from treetune.system.folders import read_version

API_VERSION = "1.0.0"
"""Of OpenEnv's HTTP interface."""


class OpenEnvDoor(EpisodeDoor):
    name = "openenv"

    def __init__(self, config: HttpConfig | None = None, split: str = "train") -> None:
        """`split` is the name of the one split that all tasks are in."""
        super().__init__(config or HttpConfig(address="127.0.0.1:8000"))
        self._split = split
        self._sweeper: asyncio.Task[None] | None = None

    # Its life

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self.sessions = SessionTable(server, self.config, self._split)
        self.terms = self.sessions.terms

    async def open(self) -> None:
        await super().open()
        self._sweeper = asyncio.create_task(self.sessions.sweep())

    def make_app(self) -> JsonApp:
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
        self._routes = [*own, *self.sessions.tasks.routes(), *OrsRoutes(self.sessions).routes()]
        return JsonApp(
            self._routes,
            self.server.config.access,
            max_bytes=self.config.max_bytes,
            token_remedy="send `Authorization: Bearer TOKEN` (ORS: `X-API-Key: TOKEN`)",
            count=self.server.metrics.count_request,
            websockets={"/ws": lambda scope, receive, send: SessionSocket(self.sessions, scope, receive, send).run()},
            key_header=b"x-api-key",
            render_error=_render_error,
        )

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().close()

    def gauges(self) -> dict[str, float]:
        return {**super().gauges(), "openenv_sessions": len(self.sessions.by_id)}

    # Requests

    async def _reset(self, request: HttpRequest) -> bytes:
        """As in OpenEnv, a request has an environment of its own: this one shows how a task begins."""
        asked = wire.read_reset(read_body(dict[str, Any], request.body), "body")
        return encode(await self.sessions.use_once(lambda session: session.reset(asked)))

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

        return encode(await self.sessions.use_once(play))

    async def _state(self, request: HttpRequest) -> bytes:
        return encode(Session(self.sessions).state)

    async def _schema(self, request: HttpRequest) -> bytes:
        return wire.schemas()

    async def _metadata(self, request: HttpRequest) -> bytes:
        taskset = self.server.taskset
        about = (type(taskset).__doc__ or "").partition("\n")[0]
        found = {"name": self.sessions.tasks.name, "description": about or taskset.name, "readme_content": None}
        return encode({**found, "version": read_version(), "author": None, "documentation_url": None})

    async def _health(self, request: HttpRequest) -> bytes:
        self.server.refuse_stopping()
        return encode({"status": "healthy"})

    async def _mcp(self, request: HttpRequest) -> bytes:
        return encode(await rpc.answer_body(self.sessions, request.body))

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
