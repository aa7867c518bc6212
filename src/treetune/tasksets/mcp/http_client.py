"""The HTTP client of a session with an MCP server. It bounds replies, which the SDK collects whatever their size.

async with open_client(server) as client:
    streamable_http_client(server.url, http_client=client)

A reply has at most `MOST_BYTES`. In a stream of events, each event has: a session may be long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2

from treetune.system.http_body import BodyTooLarge
from treetune.tasksets.mcp.config import McpServer
from treetune.tasksets.mcp.process import MOST_BYTES


def open_client(server: McpServer) -> httpx2.AsyncClient:
    seconds = httpx2.Timeout(server.start_timeout, read=max(server.timeout, 300.0))
    headers = {"Accept-Encoding": "identity", **server.all_headers()}
    return httpx2.AsyncClient(headers=headers, timeout=seconds, event_hooks={"response": [_bound]})


async def _bound(response: httpx2.Response) -> None:
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        await response.aclose()
        raise BodyTooLarge(f"{response.url} sent a reply with Content-Encoding {encoding}, which was not asked for")
    by_event = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _BoundedStream(response.stream, str(response.url), by_event)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, url: str, by_event: bool) -> None:
        self._stream, self._url, self._by_event = stream, url, by_event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, end = 0, b""
        async for piece in self._stream:
            size += len(piece)
            if self._by_event:
                # An event ends with an empty line. What follows the last one in this piece begins the next.
                text = (end + piece).replace(b"\r", b"")
                if (at := text.rfind(b"\n\n")) >= 0:
                    size = len(text) - at - 2
                end = text[-1:]
            if size > MOST_BYTES:
                raise BodyTooLarge.of(self._url, MOST_BYTES)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
