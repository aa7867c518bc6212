"""The OpenEnv door of a server: `/ws`, where clients play, the other routes of OpenEnv, and those of ORS.

    EnvServer(taskset, doors=[OpenEnvDoor(HttpConfig(address=":8000"))])

A session plays one episode at a time. The token is checked before anything is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import parse_qs

from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import EpisodeDoor
from treetune.serve.http.wire import read_body, to_http_error
from treetune.serve.openenv import wire
from treetune.serve.openenv.ors import OrsRoutes, TaskRoutes
from treetune.serve.openenv.session import Session, SessionTable, answer_rpc, answer_rpc_body
from treetune.serve.openenv.wire import Fault, Reset, data_of, fault_of, frame
from treetune.serve.server import EnvServer
from treetune.system.folders import read_version
from treetune.system.http_app import HttpRequest, JsonApp, Receive, Route, Scope, Send
from treetune.system.http_error import HttpError, encode

API_VERSION = "1.0.0"
"""The version of OpenEnv's HTTP interface."""


class OpenEnvDoor(EpisodeDoor):
    name = "openenv"

    def __init__(self, config: HttpConfig | None = None, split: str = "train") -> None:
        """`split` is the name of the only split, which contains all tasks."""
        super().__init__(config or HttpConfig(address="127.0.0.1:8000"))
        self._split = split
        self._sweeper: asyncio.Task[None] | None = None

    # Lifecycle

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
        self._tasks = TaskRoutes(self.sessions)
        self._routes = [*own, *self._tasks.routes(), *OrsRoutes(self.sessions, self._tasks).routes()]
        return JsonApp(
            self._routes,
            self.server.config.access,
            max_bytes=self.config.max_bytes,
            to_error=to_http_error,
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
        """As in OpenEnv, each request has its own environment. This environment shows the beginning of a task."""
        asked = wire.read_reset(read_body(dict[str, Any], request.body), "body")
        return encode(await self.sessions.use_once(lambda session: session.reset(asked)))

    async def _step(self, request: HttpRequest) -> bytes:
        """Plays one answer to the next task, or to the named one."""
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
        found = {"name": self._tasks.name, "description": about or taskset.name, "readme_content": None}
        return encode({**found, "version": read_version(), "author": None, "documentation_url": None})

    async def _health(self, request: HttpRequest) -> bytes:
        self.server.refuse_stopping()
        return encode({"status": "healthy"})

    async def _mcp(self, request: HttpRequest) -> bytes:
        return encode(await answer_rpc_body(self.sessions, request.body))

    async def _openapi(self, request: HttpRequest) -> bytes:
        paths: dict[str, Any] = {}
        for route in self._routes:
            path = route.path.replace("*", "{env_name}")
            paths.setdefault(path, {})[route.method.lower()] = {"responses": {"200": {"description": "The answer."}}}
        info = {"title": self.server.taskset.name, "version": API_VERSION}
        return encode({"openapi": "3.1.0", "info": info, "paths": paths})


def _render_error(error: HttpError) -> bytes:
    """Renders an error in the form of OpenEnv and ORS."""
    return encode({"detail": getattr(error, "detail", None) or str(error)})


_WATCH_SECONDS = 0.5
"""An answer that takes this long is cancelled if the client disconnects. Watching from the start would cost every quick
step an asyncio task."""


class SessionSocket:
    def __init__(self, sessions: SessionTable, scope: Scope, receive: Receive, send: Send) -> None:
        self._sessions, self._receive, self._send = sessions, receive, send
        self._asked_id = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id", [None])[-1]
        self._waiting: list[dict[str, Any]] = []
        """The message that arrived during a step."""
        self._has_left = False
        self._stopped: str | None = None
        """Why the running answer was cancelled."""

    async def run(self) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        session: Session | None = None
        try:
            if self._asked_id is None:
                session = self._sessions.add(Session(self._sessions, stop=self.stop))
            else:
                session = self._sessions.attach(self._asked_id)
            await self._serve(session)
        except Fault as fault:
            with contextlib.suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.send", "text": frame("error", fault.data)})
        except asyncio.CancelledError:
            if self._stopped is None or self._task is None:
                raise
            self._task.uncancel()
        except OSError:
            self._has_left = True  # while the message was being answered
        finally:
            if session is not None and session.attached:
                session.attached = False  # the client that opened it closes it
            elif session is not None:
                await self._sessions.close(session)
        if not self._has_left:
            with contextlib.suppress(OSError, RuntimeError):  # the client may disconnect now
                await self._send({"type": "websocket.close", "code": 1000, "reason": self._stopped or ""})

    def stop(self, why: str) -> None:
        """Closes the connection."""
        self._stopped = why
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, session: Session) -> None:
        count = self._sessions.server.metrics.count_request
        while True:
            message = self._waiting.pop() if self._waiting else await self._receive()
            if message["type"] == "websocket.disconnect":
                self._has_left = True
                return
            began, name, code = time.perf_counter(), "openenv.other", None
            session.hear()
            try:
                if (text := message.get("text")) is None:
                    raise Fault("SESSION_ERROR", "a message is text")
                kind, said = wire.read_message(text)
                name = _NAMES.get(kind, name) if isinstance(kind, str) else name
                if kind == "step":
                    action = wire.read_action(data_of(said, required=True))
                    answer = frame("observation", await self._watched(session.answer(action)))
                elif kind == "reset":
                    asked = wire.read_reset(data_of(said))
                    answer = frame("observation", await self._watched(session.reset(asked)))
                elif kind == "state":
                    wire.refuse_data(said)
                    answer = frame("state", session.state)
                elif kind == "mcp":
                    request = data_of(said, required=True)
                    answer = frame("mcp", await self._watched(answer_rpc(self._sessions, request, session)))
                elif kind == "close":
                    wire.refuse_data(said)
                    return
                else:
                    raise Fault("UNKNOWN_TYPE", f"Unknown message type: {kind}")
            except Exception as error:
                fault = fault_of(error)
                code = str(fault.data["code"])
                if code == "SESSION_ERROR":
                    raise fault from None
                answer = frame("error", fault.data)
            count(name, time.perf_counter() - began, code)
            await self._send({"type": "websocket.send", "text": answer})

    async def _watched(self, work: Any) -> Any:
        """Returns the result of `work`, which is cancelled if it takes long and the client disconnects."""
        watcher: asyncio.Task[None] | None = None

        def watch() -> None:
            nonlocal watcher
            watcher = self._loop.create_task(self._watch())

        timer = self._loop.call_later(_WATCH_SECONDS, watch)
        try:
            return await work
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()

    async def _watch(self) -> None:
        message = await self._receive()
        self._waiting.append(message)
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            self.stop("its client has disconnected")


_NAMES = {kind: f"openenv.{kind}" for kind in ("reset", "step", "state", "mcp", "close")}
