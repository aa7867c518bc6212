"""Offers the tools of an MCP server as tools of an episode.

tools: [calculator, {mcp: {command: [python, server.py]}}]      # in a config
McpTools(task, url="http://127.0.0.1:8000/mcp")                 # in `tools_for` of a taskset

Each episode has one session with the server. The SDK's scopes must be entered and left in one task, but opening, calls
and closing come from several, so the session runs in its own task. A server that ends during an episode is not
restarted, because its state is lost; the model reads an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from treetune.config.structs import convert
from treetune.core.task import Task
from treetune.core.tool import Tool, ToolSource
from treetune.errors import (
    EnvironmentFault,
    MissingExtraError,
    ToolError,
    TreetuneError,
    UsageError,
    did_you_mean,
    format_error,
)
from treetune.system.threads import call_apart
from treetune.tasksets.mcp import McpServer

if TYPE_CHECKING:
    from mcp import ClientSession

    from treetune.tasksets.mcp.transports import ServerProcess

_CLOSE_SECONDS = 20.0
_MOST_PAGES = 100


class McpSession:
    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._process: ServerProcess | None = None
        self._session: ClientSession | None = None
        self._running: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> list[Any]:
        """Return the server's tools in the SDK's form. Raises if there is no answer in time."""
        await call_apart(load_sdk)
        opened: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(opened))
        await asyncio.wait([opened], timeout=self._server.start_timeout)
        if not opened.done():
            opened.cancel()
            raise self._fault(f"did not list its tools within {self._server.start_timeout:g} seconds")
        return opened.result()

    async def _run(self, opened: asyncio.Future[list[Any]]) -> None:
        from mcp import ClientSession, Implementation

        from treetune.system.folders import read_version

        client = Implementation(name="treetune", version=read_version())
        try:
            async with (
                self._connect() as (incoming, outgoing),
                ClientSession(incoming, outgoing, client_info=client) as session,
            ):
                await session.initialize()
                tools = await _list_tools(session)
                self._session = session
                if not opened.done():
                    opened.set_result(tools)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(self._explain(error))
        finally:
            self._session = None

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[tuple[Any, Any]]:
        from treetune.tasksets.mcp.transports import ServerProcess

        if self._server.url is None:
            self._process = await ServerProcess.start(self._server)
            try:
                yield self._process.incoming, self._process.outgoing
            finally:
                await self._process.stop()
            return
        from mcp.client.streamable_http import streamable_http_client

        from treetune.tasksets.mcp.transports import open_client

        async with (
            open_client(self._server) as client,
            streamable_http_client(self._server.url, http_client=client) as (incoming, outgoing),
        ):
            yield incoming, outgoing

    def _explain(self, error: BaseException) -> TreetuneError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TreetuneError):
            return error
        ended = self._process.ended if self._process is not None else None
        return self._fault(f"{ended} before it listed its tools" if ended else f"failed: {format_error(error)}")

    def _fault(self, what: str) -> EnvironmentFault:
        remedy = "run that command by hand: does it speak MCP over standard input and output?"
        if self._server.url is not None:
            remedy = "is it a streamable HTTP server, at that path, and is the token right?"
        return EnvironmentFault(f"MCP server {self._server.shown} {what}{self._last_lines()}", remedy=remedy)

    def _last_lines(self) -> str:
        lines = self._process.last_lines if self._process is not None else ()
        return "".join(f"\n  | {line}" for line in lines)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the server's answer to a call in the SDK's form."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._session is None:
            raise ToolError(await self._describe_loss())
        try:
            return await self._session.call_tool(name, arguments)
        except MCPError as error:
            lost = error.code == CONNECTION_CLOSED and error.message == "Connection closed"  # servers use that code too
            raise ToolError(await self._describe_loss() if lost else error.message) from None

    async def _describe_loss(self) -> str:
        ended = await self._process.wait_for_end() if self._process is not None else None
        return f"the server of this tool {ended or 'has gone'}, so it can no longer be called; continue without it"

    async def close(self) -> None:
        """End the session, and the server if we started it."""
        if (running := self._running) is None:
            return
        if self._session is None:
            running.cancel()  # it is starting, or has failed
        self._closing.set()
        await asyncio.wait([running], timeout=_CLOSE_SECONDS)
        if not running.done():
            running.cancel()
            await asyncio.wait([running], timeout=_CLOSE_SECONDS)


def load_sdk() -> None:
    """Load the SDK. The first call takes a second: do not make it on an event loop."""
    try:
        import mcp.client.streamable_http  # noqa: F401
    except ImportError:
        raise MissingExtraError.of("the MCP SDK", "mcp") from None


async def _list_tools(session: ClientSession) -> list[Any]:
    from mcp_types import PaginatedRequestParams

    tools: list[Any] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64
"""The longest function name in OpenAI's API."""


class McpTools(ToolSource):
    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task)
        self._server = _read_settings(settings)
        self._session = McpSession(self._server)

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        _read_settings(settings)

    @classmethod
    def require(cls) -> None:
        load_sdk()

    async def open(self) -> list[Tool]:
        offered = {tool.name: tool for tool in await self._session.open()}
        for name in self._server.only or ():
            if name not in offered:
                problem = f"MCP server {self._server.shown} has no tool {name!r}{did_you_mean(name, offered)}"
                raise UsageError(problem, remedy=f"correct tools.mcp.only; available: {', '.join(offered)}")
        return [self._make(offered[name]) for name in self._server.only or offered]

    def _make(self, offered: Any) -> Tool:
        name = _UNUSABLE.sub("_", f"{self._server.prefix}{offered.name}")[:_LONGEST_NAME]
        description = offered.description or offered.title or ""
        run = partial(self._call, offered.name)
        return Tool(name, description, dict(offered.input_schema), run, timeout=self._server.timeout)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        result = await self._session.call(name, arguments)
        shown = read_result(result)
        if result.is_error:
            raise ToolError(shown if isinstance(shown, str) and shown else f"failed: {shown}")
        return shown

    async def close(self) -> None:
        await self._session.close()


def _read_settings(settings: Mapping[str, Any]) -> McpServer:
    if not settings:
        remedy = "a config or code says which server: tools: [{mcp: {command: [python, server.py]}}]"
        raise UsageError("the tool 'mcp' does not name a server", remedy=remedy)
    return convert(settings, McpServer, path="tools.mcp")


def read_result(result: Any) -> Any:
    """Return what the model sees of a result: text, or parts if it has images. The structured content repeats it, and
    is used only if there is nothing else."""
    parts = [_read_part(block) for block in result.content]
    if not parts:
        return "" if result.structured_content is None else result.structured_content
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_part(block: Any) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}}
    return {"type": "text", "text": _text_of(block)}


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return f"[resource {block.resource.uri}]" if text is None else str(text)
    if block.type == "resource_link":
        return f"[resource {block.uri}] {block.description or block.name}"
    return f"[{block.type}, which cannot be shown]"
