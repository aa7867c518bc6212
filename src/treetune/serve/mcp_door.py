"""The MCP door of a server. It offers tools that start and answer tasks, and the tools of their environments.

    EnvServer(taskset, doors=[McpDoor(keep_standard_streams())])     # standard input and output, one session
    door = McpDoor()
    EnvServer(taskset, doors=[HttpDoor(mounts={"/mcp": door}), door])

A session plays one episode at a time; the episode ends with the session. Requests without a session (HTTP, from
protocol version 2026 on) name the episode that `start` returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Annotated, Any

import anyio
import msgspec
from mcp import MCPError, stdio_server
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import INVALID_PARAMS, CallToolResult, ImageContent, ListToolsResult, TextContent, Tool

from treetune.chat.calls import call_message
from treetune.core.environment import Step
from treetune.core.task import Task
from treetune.errors import TreetuneError, UsageError, format_error
from treetune.play.episode_table import SessionLimits
from treetune.play.protocol import Started
from treetune.play.toolbox import parts_of
from treetune.serve.http.wire import read_content
from treetune.serve.server import Door, EnvServer
from treetune.system.folders import read_version
from treetune.system.http_error import encode

SESSION_HEADER = "mcp-session-id"
_STDIO = "stdio"
_MOST_BYTES = 8 << 20
MANY_ENDED = 256
log = logging.getLogger("treetune.serve")
INSTRUCTIONS = (
    "Tasks to solve. `start` begins a task and returns its prompt; then call the tools that it offers, or `answer`. "
    "Results contain `reward` and `done`; after `done`, `start` begins the next task."
)
_EPISODE = {"type": "string", "description": "The episode that `start` named. Only needed without a session."}


def _own(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name=name, description=description, input_schema=schema)


_INDEX = {"type": "integer", "minimum": 0, "description": "The index of the task; by default, the next one."}
_TEXT = {"type": "string", "description": "What you say."}
OWN = [
    _own("start", "Begin a task; returns its prompt. A task in progress is abandoned.", {"task_index": _INDEX}, []),
    _own("answer", "Send a text to the task in progress.", {"text": _TEXT, "episode": _EPISODE}, ["text"]),
    _own("close", "Abandon the task in progress.", {"episode": _EPISODE}, []),
]
OWN_NAMES = {tool.name for tool in OWN}
_CLASH = "env_"
"""The prefix of an environment's tool whose name clashes with one of the door's tools."""


class _StartArguments(msgspec.Struct, forbid_unknown_fields=True):
    task_index: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _NoEpisode(UsageError):
    def __init__(self, *, needs_name: bool) -> None:
        remedy = "call `start`, and pass the `episode` that it returns" if needs_name else "call `start` first"
        super().__init__("no task is in progress", remedy=remedy)


class McpDoor(Door):
    name = "mcp"

    def __init__(
        self, streams: tuple[int, int] | None = None, *, idle_seconds: float = 300.0, max_sessions: int = 1024
    ) -> None:
        """`streams` are the descriptors to read and write. Without them, the door is mounted in the HTTP door, with at
        most `max_sessions` open sessions."""
        self.address = "/mcp" if streams is None else "standard input and output"
        self._streams, self._max_sessions = streams, max_sessions
        self.terms = SessionLimits(idle_seconds, render=lambda step: step)
        self._episodes: dict[str, Started] = {}
        """The episode of each session."""
        self._offered: list[dict[str, Any]] | None = None
        """The tools of the last episode, listed for sessions without an episode; None: not known yet."""
        self._looking = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._manager: StreamableHTTPSessionManager | None = None
        self._ending = asyncio.Event()
        self.ended = None if streams is None else asyncio.Event()

    # Lifecycle

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        self._server: Server[Any] = Server(
            "treetune",
            version=read_version(),
            instructions=INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )

    async def open(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Runs in its own task: the SDK's scopes must be exited in the task that entered them.
        self._running = asyncio.create_task(self._serve(ready))
        await ready

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            await (self._serve_http(ready) if self._streams is None else self._serve_streams(*self._streams, ready))
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve_streams(self, reads: int, writes: int, ready: asyncio.Future[None]) -> None:
        options = self._server.create_initialization_options(NotificationOptions(tools_changed=True))
        output = anyio.wrap_file(os.fdopen(writes, "w", encoding="utf-8"))
        lines: Any = await _Lines.open(reads)
        try:
            async with stdio_server(lines, output) as (incoming, outgoing):
                ready.set_result(None)
                await self._server.run(incoming, outgoing, options)
        finally:
            assert self.ended is not None
            self.ended.set()

    async def _serve_http(self, ready: asyncio.Future[None]) -> None:
        idle = self.terms.idle_seconds
        manager = StreamableHTTPSessionManager(
            self._server,
            session_idle_timeout=2 * idle,
            max_request_body_size=_MOST_BYTES,
            max_sessions=self._max_sessions,
        )
        async with manager.run():
            self._manager = manager
            ready.set_result(None)
            await self._ending.wait()
            self._manager = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles a request from the HTTP door, which has checked the token."""
        if (manager := self._manager) is None:
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"1")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await manager.handle_request(scope, receive, send)
        if scope["method"] == "DELETE":
            given = dict(scope["headers"]).get(SESSION_HEADER.encode(), b"").decode("latin-1")
            await self._end_session(given)

    def under_way(self) -> int:
        # Clients may never return to their episode, so only running steps are waited for.
        live = self.server.host.episodes.live.values()
        return self.terms.starting + sum(one.playing is not None for one in live if one.terms is self.terms)

    async def close(self) -> None:
        await self.server.host.episodes.close(self.terms)
        self._ending.set()
        if self._running is not None:
            if self._streams is not None:
                self._running.cancel()
            await asyncio.wait([self._running], timeout=5)

    def gauges(self) -> dict[str, float]:
        return {"mcp_episodes": self.terms.live}

    # Requests

    async def _list_tools(self, context: Any, params: Any) -> ListToolsResult:
        session = self._session_of(context)
        episode = self._episodes.get(session) if session is not None else None
        offered = episode.tools if episode is not None else None
        if offered is None:
            async with self._looking:
                offered = self._offered = await self._look() if self._offered is None else self._offered
        return ListToolsResult(tools=[*OWN, *(_describe_tool(one, session is None) for one in offered)])

    async def _look(self) -> list[dict[str, Any]]:
        """Returns the tools of the first task: many clients list tools once, before the first episode. No cursor
        moves."""
        streams, host = self.server.streams, self.server.host
        try:
            # A generator has no task at a given index.
            return [] if streams.sequential else await host.look_at_tools(await host.fetch(streams.draw_at(0)))
        except Exception as error:  # starting the task reports the error
            log.warning("the tools of the first task cannot be listed: %s", format_error(error))
            return []

    async def _call_tool(self, context: Any, params: Any) -> CallToolResult:
        session = self._session_of(context)
        arguments = dict(params.arguments or {})
        try:
            if params.name == "start":
                return await self._start(context, session, arguments)
            episode = self._find_episode(params.name, session, arguments)
            if params.name == "close":
                await self.server.host.episodes.cancel(episode, self.terms)
                self._forget(episode)
                return _text_result("closed", {"episode": episode, "done": True})
            action = _read_action(params.name, arguments)
            step = await self.server.host.step(episode, action, terms=self.terms)
        except TreetuneError as error:
            return _error_result(error)
        if step.done:
            self._forget(episode)
        return _step_result(step, episode)

    async def _start(self, context: Any, session: str | None, arguments: dict[str, Any]) -> CallToolResult:
        try:
            asked = msgspec.convert(arguments, _StartArguments)
        except msgspec.ValidationError as error:
            raise MCPError(code=INVALID_PARAMS, message=f"start: {error}") from None
        self.server.refuse_beyond_end(asked.task_index)
        if session is not None:
            await self._end_session(session)
        started, task, index = await self.server.start_episode(asked.task_index, self.terms)
        self._forget_ended()
        listed = self._offered
        self._offered = started.tools
        if session is not None:
            self._episodes[session] = started
        if listed != started.tools:
            with contextlib.suppress(Exception):  # the client may not support it
                await context.session.send_tool_list_changed()
        return _start_result(started, index, task)

    def _find_episode(self, tool: str, session: str | None, arguments: dict[str, Any]) -> str:
        """Returns the session's episode, or the episode that the call names."""
        mine = self._episodes.get(session) if session is not None else None
        named = arguments.pop("episode", None) if session is None or tool in OWN_NAMES else None
        if session is None and isinstance(named, str):
            return named
        if mine is None:
            raise _NoEpisode(needs_name=session is None)
        return mine.episode

    def _session_of(self, context: Any) -> str | None:
        """Standard input is one session. Over HTTP the header names the session; None if it is missing."""
        if self._streams is not None:
            return _STDIO
        headers = context.request.headers if context.request is not None else {}
        found: str | None = headers.get(SESSION_HEADER)
        return found

    async def _end_session(self, session: str) -> None:
        if (started := self._episodes.pop(session, None)) is not None:
            await self.server.host.episodes.cancel(started.episode, self.terms)

    def _forget_ended(self) -> None:
        """Removes ended episodes once there are many."""
        live = self.server.host.episodes.live
        if len(self._episodes) > 2 * self.terms.live + MANY_ENDED:
            self._episodes = {session: one for session, one in self._episodes.items() if one.episode in live}

    def _forget(self, episode: str) -> None:
        self._episodes = {session: one for session, one in self._episodes.items() if one.episode != episode}


class _Lines:
    """The lines of standard input. The SDK would read them in a thread, which cannot be stopped with the server."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    @classmethod
    async def open(cls, descriptor: int) -> _Lines:
        reader = asyncio.StreamReader(limit=_MOST_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
        return cls(reader)

    def __aiter__(self) -> _Lines:
        return self

    async def __anext__(self) -> str:
        try:
            line = await self._reader.readline()
        except ValueError:
            return "{}"  # too long; the rest of the line is not a message either
        if not line:
            raise StopAsyncIteration
        return line.decode(errors="replace")


def keep_standard_streams() -> tuple[int, int]:
    """Returns the descriptors of standard input and output, which carry the protocol. From then on, user code and
    worker processes print to standard error, so call it before any process is started."""
    kept = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return kept


def _describe_tool(schema: dict[str, Any], names_episode: bool) -> Tool:
    """Describes a tool of an environment. Without sessions, a call names the episode."""
    function = schema["function"]
    name = f"{_CLASH}{function['name']}" if function["name"] in OWN_NAMES else function["name"]
    parameters = dict(function["parameters"])
    if names_episode and "episode" not in (parameters.get("properties") or {}):
        parameters["properties"] = {**(parameters.get("properties") or {}), "episode": _EPISODE}
        parameters["required"] = [*parameters.get("required", []), "episode"]
    return Tool(name=name, description=function.get("description", ""), input_schema=parameters)


def _read_action(name: str, arguments: dict[str, Any]) -> Any:
    """Converts a call to an episode's action: text, or a message that calls one of its tools."""
    if name == "answer":
        text = arguments.get("text")
        if not isinstance(text, str):
            raise UsageError("answer: `text` is missing or is not text", remedy='call it with {"text": "..."}')
        return text
    if name.removeprefix(_CLASH) in OWN_NAMES:
        name = name.removeprefix(_CLASH)
    return call_message(name, arguments)


def _start_result(started: Started, index: int, task: Task) -> CallToolResult:
    found = {
        "episode": started.episode,
        "task_index": index,
        "data_source": task.data_source,
        "tools": started.tools,
        "done": False,
    }
    return _result(parts_of(started.observation.messages()), found)


def _step_result(step: Step, episode: str) -> CallToolResult:
    found = {"episode": episode, "reward": step.reward, "done": step.done, "info": step.info}
    failed = [call.error for call in step.calls if call.error is not None]
    parts = parts_of(step.observation.messages())
    if step.done:
        parts.append({"type": "text", "text": f"done, reward {step.reward:g}"})
    return _result(parts, found, is_error=bool(failed))


def _text_result(text: str, found: dict[str, Any]) -> CallToolResult:
    return _result([{"type": "text", "text": text}], found)


def _error_result(error: TreetuneError) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)


def _result(parts: list[dict[str, Any]], found: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    plain = msgspec.json.decode(encode(found))  # `info` may hold anything
    return CallToolResult(content=list(map(_block, parts)), structured_content=plain, is_error=is_error)


def _block(part: dict[str, Any]) -> TextContent | ImageContent:
    content = read_content(part)
    if isinstance(content, str):
        return TextContent(type="text", text=content)
    return ImageContent(type="image", data=content[1], mime_type=content[0])
