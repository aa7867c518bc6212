"""Sessions, in which clients of OpenEnv and ORS play one episode at a time, the table of a door's sessions, and the
tools of a session's task over JSON-RPC.

    session = sessions.add(Session(sessions))
    await session.reset(Reset(seed=3))        # the first observation
    step = await session.play("42")

In OpenEnv an environment exists as soon as its client has connected. So a step or a call before the first reset starts
the next task, and a reset that does not name another task shows the one that was started.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from treetune.chat.calls import call_message
from treetune.core.environment import Step
from treetune.errors import UsageError
from treetune.play.episode_table import LiveEpisode, SessionLimits
from treetune.serve.http import HttpConfig
from treetune.serve.http.wire import check_info, read_body
from treetune.serve.openenv.wire import (
    Fault,
    ListTools,
    Reset,
    ToolAction,
    describe_tool,
    fault_of,
    observed,
    show,
    stepped,
)
from treetune.serve.server import EnvServer, StartedTask
from treetune.system.http_error import HttpError

_SILENT_SECONDS = 900.0
"""A session without an episode is closed if its client sends nothing for this long."""
_SWEEP_SECONDS = 5.0


class Session:
    def __init__(
        self, sessions: SessionTable, id: str | None = None, stop: Callable[[str], None] | None = None
    ) -> None:
        """`stop` closes the connection when the session ends; None for a session without a connection."""
        self._sessions, self._server = sessions, sessions.server
        self.id, self.stop = id or str(uuid.uuid4()), stop
        self.heard = time.monotonic()
        """When its client sent its last message."""
        self.attached = False
        """Whether a WebSocket plays the session without having opened it."""
        self.first: StartedTask | None = None
        """The task of its episode, and the episode's first observation."""
        self.turn = 0
        self._episode: str | None = None
        """None before the first episode; empty if the last one could not be started."""
        self._label = self.id
        self._is_fresh = False
        """The episode was started without a reset, and its first observation has not been shown yet."""
        self._starting = asyncio.Lock()

    @property
    def _live(self) -> LiveEpisode | None:
        return self._server.host.episodes.live.get(self._episode or "")

    @property
    def is_live(self) -> bool:
        """Its episode has not ended."""
        return self._live is not None

    def hear(self) -> None:
        """Records a message from its client: the episode counts as just stepped."""
        self.heard = time.monotonic()
        if (live := self._live) is not None:
            live.heard = self.heard

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": self._label, "step_count": self.turn}

    async def reset(self, asked: Reset) -> dict[str, Any]:
        """Starts an episode; returns its first observation."""
        async with self._starting:
            self._sessions.check_split(asked.split)
            index = asked.task(self._server.streams.count)
            if index is not None or not self._is_fresh or not self.is_live:
                await self._start(index)
            self._label = asked.episode_id or self._label
            self._is_fresh = False
        assert self.first is not None
        started, task, index = self.first
        metadata: dict[str, Any] = {"task_index": index, "data_source": task.data_source}
        if started.tools:
            metadata["tools"] = started.tools
        return observed(show(started.observation), None, False, metadata)

    async def play(self, action: Any) -> Step:
        """Takes one step of its episode."""
        if not self._episode:
            await self.ensure_started()
        assert self._episode is not None
        step: Step = await self._server.host.step(self._episode, action, terms=self._sessions.terms)
        self.turn += 1
        self._is_fresh = False
        return step

    async def answer(self, action: Any) -> dict[str, Any]:
        """Returns the observation and the reward for an action of OpenEnv."""
        if isinstance(action, ListTools):
            tools = (await self.ensure_started()).started.tools
            return observed({"tools": [describe_tool(tool, "input_schema") for tool in tools]}, None, False, {})
        if isinstance(action, ToolAction):
            return stepped(await self.play(action.value), action.name)
        return stepped(await self.play(action))

    async def ensure_started(self) -> StartedTask:
        """Returns the first observation of its episode. Starts the next task if there was no episode."""
        async with self._starting:
            if self._episode is None:
                await self._start(None)
                self._is_fresh = True
        if self.first is None:
            raise UsageError("the last reset failed", remedy="reset again")
        return self.first

    async def _start(self, index: int | None) -> None:
        await self.end()
        self._episode, self.first = "", None
        self.first = await self._server.start_episode(index, self._sessions.terms)
        started = self.first.started
        self._episode, self._label, self.turn = started.episode, started.episode, 0
        self._sessions.offered = started.tools

    async def end(self) -> None:
        """Ends its episode if it has one."""
        if self._episode:
            await self._server.host.episodes.cancel(self._episode, self._sessions.terms)


S = TypeVar("S", bound=Session)


class SessionTable:
    def __init__(self, server: EnvServer, config: HttpConfig, split: str) -> None:
        """`split` is the name of the only split, which contains all tasks."""
        self.server, self._config, self.split = server, config, split
        self.terms = SessionLimits(config.idle_seconds, config.deadline_seconds, check_info)
        self.by_id: dict[str, Session] = {}
        self.offered: list[dict[str, Any]] | None = None
        """The tools of the last episode that was started."""

    def add(self, session: S) -> S:
        active, most = len(self.by_id), self._config.max_episodes
        if active >= most or self.server.stopping:
            problem = f"Server at capacity: {active}/{most} sessions active. Cannot accept new connections."
            raise Fault("CAPACITY_REACHED", problem, active_sessions=active, max_sessions=most)
        self.by_id[session.id] = session
        return session

    def attach(self, id: str) -> Session:
        """Lets a WebSocket play a session that was opened over HTTP."""
        session = self.by_id.get(id)
        if session is None or session.stop is not None:
            raise Fault("SESSION_ERROR", f"Unknown session_id: {id:.80}")
        if session.attached:
            raise Fault("SESSION_ERROR", f"Session {id} already has an attached WebSocket")
        session.attached = True
        return session

    def check_split(self, split: str | None) -> None:
        if split is not None and split != self.split:
            raise HttpError(400, "usage", f"Invalid split: there is only {self.split!r}")

    async def close(self, session: Session) -> None:
        self.by_id.pop(session.id, None)
        await session.end()

    async def use_once(self, play: Callable[[Session], Any]) -> Any:
        """Calls `play` with a session that is closed afterwards, and returns its result."""
        session = self.add(Session(self))
        try:
            return await play(session)
        finally:
            await self.close(session)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools of the last episode. Before the first one, an episode of the first task is started and
        closed; this moves a cursor only if tasks have no numbers."""
        if self.offered is None:
            seed = None if self.server.streams.sequential else 0
            await self.use_once(lambda session: session.reset(Reset(seed=seed)))
        return self.offered or []

    async def sweep(self) -> None:
        """Closes sessions of silent clients. Their episodes have already ended."""
        silent = max(_SILENT_SECONDS, self._config.idle_seconds)
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest = time.monotonic() - silent
            for session in list(self.by_id.values()):
                if session.heard < oldest and not session.is_live and not session.attached:
                    if session.stop is not None:
                        session.stop(f"no message for {silent:g} seconds")
                    else:
                        await self.close(session)


# Tools over JSON-RPC: `tools/list`, `tools/call`, and sessions that are opened over HTTP

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000
ANSWER = "answer"
"""The tool for the model's text, for clients that can only call tools."""


class RpcRequest(msgspec.Struct, forbid_unknown_fields=True):
    jsonrpc: str
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None

    def __post_init__(self) -> None:
        if self.jsonrpc != "2.0":
            raise ValueError("jsonrpc must be '2.0'")


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


async def answer_rpc_body(sessions: SessionTable, body: bytes) -> dict[str, Any]:
    """Answers a request over HTTP."""
    try:
        request = read_body(dict[str, Any], body)
    except HttpError as error:
        return _error(None, RpcError(PARSE_ERROR, "Parse error", str(error)))
    return await answer_rpc(sessions, request)


async def answer_rpc(sessions: SessionTable, request: dict[str, Any], session: Session | None = None) -> dict[str, Any]:
    """Returns the response to a request; `session` is the session of its WebSocket."""
    id: str | int | None = None
    try:
        try:
            asked = msgspec.convert(request, RpcRequest)
        except msgspec.ValidationError as error:
            raise RpcError(INVALID_REQUEST, f"Invalid request: {error}") from None
        id = asked.id
        return {"jsonrpc": "2.0", "id": id, "result": await _handle(sessions, asked, session)}
    except RpcError as error:
        return _error(id, error)
    except Exception as error:
        fault = fault_of(error).data
        code = SERVER_ERROR if fault["code"] == "CAPACITY_REACHED" else INTERNAL_ERROR
        return _error(id, RpcError(code, fault["message"]))


def _error(id: str | int | None, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": error.error}


async def _handle(sessions: SessionTable, asked: RpcRequest, session: Session | None) -> Any:
    named = asked.params.get("session_id")
    if asked.method == "openenv/session/create":
        return {"session_id": (session or _open(sessions)).id}
    if asked.method == "openenv/session/close":
        return await _close(sessions, named, session)
    if session is None and named:
        if (session := sessions.by_id.get(named) if isinstance(named, str) else None) is None:
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {named}")
        session.hear()
    if session is not None:
        return await _use_tools(asked, session)
    session = _open(sessions)  # used for this one request only
    try:
        return await _use_tools(asked, session)
    finally:
        await sessions.close(session)


def _open(sessions: SessionTable) -> Session:
    try:
        return sessions.add(Session(sessions))
    except Fault as fault:
        further = {key: value for key, value in fault.data.items() if key not in ("message", "code")}
        raise RpcError(SERVER_ERROR, str(fault), further) from None


async def _close(sessions: SessionTable, named: Any, session: Session | None) -> dict[str, Any]:
    if not named:
        raise RpcError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
    if session is not None and session.id == named:
        raise RpcError(INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method")
    if (found := sessions.by_id.get(named) if isinstance(named, str) else None) is None:
        raise RpcError(INVALID_PARAMS, f"Unknown session_id: {named}")
    await sessions.close(found)
    return {"session_id": named, "closed": True}


async def _use_tools(asked: RpcRequest, session: Session) -> Any:
    params = asked.params
    if asked.method == "tools/list":
        return {"tools": [describe_tool(tool, "inputSchema") for tool in with_answer(await _tools_of(session))]}
    if asked.method != "tools/call":
        raise RpcError(METHOD_NOT_FOUND, f"Method not found: {asked.method}")
    name, arguments = params.get("name"), params.get("arguments", {})
    if not name:
        raise RpcError(INVALID_PARAMS, "Missing 'name' in params")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RpcError(INVALID_PARAMS, "'name' must be a text and 'arguments' an object")
    tools = await _tools_of(session)
    if not has_tool(with_answer(tools), name):
        raise RpcError(INVALID_PARAMS, f"Tool not found: {name}")
    return _result(await session.play(action_of_call(name, arguments, tools)))


async def _tools_of(session: Session) -> list[dict[str, Any]]:
    tools = (await session.ensure_started()).started.tools
    if not tools:
        raise RpcError(INTERNAL_ERROR, "Environment does not support MCP")
    return tools


def has_tool(tools: list[dict[str, Any]], name: str) -> bool:
    return any(tool["function"]["name"] == name for tool in tools)


def with_answer(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a task plus `answer`, unless one of them has that name."""
    if has_tool(tools, ANSWER):
        return tools
    text = {"type": "string", "description": "What you say."}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"], "additionalProperties": False}
    function = {"name": ANSWER, "description": "Send a text, such as the answer.", "parameters": parameters}
    return [*tools, {"type": "function", "function": function}]


def action_of_call(name: str, arguments: dict[str, Any], tools: list[dict[str, Any]]) -> Any:
    """Converts a call to an episode's action: a call of one of its tools, or text."""
    text = arguments.get("text")
    if name == ANSWER and not has_tool(tools, ANSWER) and isinstance(text, str) and len(arguments) == 1:
        return text
    return call_message(name, arguments)


def _result(step: Step) -> dict[str, Any]:
    """Converts a step to the result of a call, as in MCP. OpenEnv's own client returns `data`."""
    text = show(step.observation)["text"]
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": {"reward": step.reward, "done": step.done, "info": step.info},
        "is_error": any(call.error is not None for call in step.calls),
        "data": text,
    }
