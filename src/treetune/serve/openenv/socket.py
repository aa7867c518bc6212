"""`/ws`: one session over one WebSocket. Its episode ends with the connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import parse_qs

from treetune.serve.http.asgi import Receive, Scope, Send
from treetune.serve.openenv import rpc, wire
from treetune.serve.openenv.session import Session, SessionTable
from treetune.serve.openenv.wire import Fault, data_of, fault_of, frame

_WATCH_SECONDS = 0.5
"""An answer that takes so long is given up where the client leaves meanwhile. To look from the beginning would cost
every quick step a task."""


class SessionSocket:
    def __init__(self, sessions: SessionTable, scope: Scope, receive: Receive, send: Send) -> None:
        self._sessions, self._receive, self._send = sessions, receive, send
        self._asked_id = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id", [None])[-1]
        self._waiting: list[dict[str, Any]] = []
        """What came while a step was under way: one message at most."""
        self._has_left = False
        self._stopped: str | None = None
        """Why the answer under way was given up."""

    async def run(self) -> None:
        await self._receive()  # that somebody connects
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
            self._has_left = True  # while it was answered
        finally:
            if session is not None and session.attached:
                session.attached = False  # the client that opened it closes it
            elif session is not None:
                await self._sessions.close(session)
        if not self._has_left:
            with contextlib.suppress(OSError, RuntimeError):  # it may leave just now
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
                    answer = frame("mcp", await self._watched(rpc.answer(self._sessions, request, session)))
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
        """What `work` gives. Where it takes long, and the client leaves meanwhile, it is cancelled."""
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
            self.stop("its client has left")


_NAMES = {kind: f"openenv.{kind}" for kind in ("reset", "step", "state", "mcp", "close")}
