"""One session with an MCP server, for one episode.

    session = McpSession(server)
    tools = await session.open()
    result = await session.call("search", {"query": "red"})
    await session.close()

The SDK's scopes must be entered and left in one task, and whoever opens, calls and closes is seldom the same one: so
the session lives in a task of its own. A server that ends in the middle is not started again: what it knew of the
episode is lost, and a model that is not told would go on as if it were not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from treetune.errors import EnvironmentFault, MissingExtraError, ToolError, TreetuneError, format_error
from treetune.system.threads import call_apart
from treetune.tasksets.mcp.config import McpServer

if TYPE_CHECKING:
    from mcp import ClientSession

    from treetune.tasksets.mcp.process import ServerProcess

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
        """The server's tools, as the SDK has them. Raises where there is no answer in time."""
        await call_apart(load_sdk)
        opened: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(opened))
        await asyncio.wait([opened], timeout=self._server.start_timeout)
        if not opened.done():
            opened.cancel()
            raise self._fault(f"did not say which tools it has within {self._server.start_timeout:g} seconds")
        return opened.result()

    async def _run(self, opened: asyncio.Future[list[Any]]) -> None:
        from mcp import ClientSession, Implementation

        from treetune.system.package import read_version

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
        from treetune.tasksets.mcp.process import ServerProcess

        if self._server.url is None:
            self._process = await ServerProcess.start(self._server)
            try:
                yield self._process.incoming, self._process.outgoing
            finally:
                await self._process.stop()
            return
        from mcp.client.streamable_http import streamable_http_client

        from treetune.tasksets.mcp.http_client import open_client

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
        return self._fault(f"{ended} before it said which tools it has" if ended else f"failed: {format_error(error)}")

    def _fault(self, what: str) -> EnvironmentFault:
        remedy = "run that command by hand: does it speak MCP over standard input and output?"
        if self._server.url is not None:
            remedy = "is it a streamable HTTP server, at that path, and is the token right?"
        return EnvironmentFault(f"MCP server {self._server.shown} {what}{self._last_lines()}", remedy=remedy)

    def _last_lines(self) -> str:
        lines = self._process.last_lines if self._process is not None else ()
        return "".join(f"\n  | {line}" for line in lines)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the server answers to a call, as the SDK has it."""
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
        return f"the server of this tool {ended or 'has gone'}, so it can no longer be called; go on without it"

    async def close(self) -> None:
        """Ends the session, and the server where it is a process of ours."""
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
    """The first time it takes a second: not on an event loop."""
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
