"""Connections that cannot be held for nothing: a request has so many seconds and bytes to arrive.

    uvicorn.Config(app, http=GuardedHttp)
    close_slow(connections)          # now and then

uvicorn itself bounds neither the head of a request nor how slowly one trickles in.
"""

from __future__ import annotations

import time
from asyncio import Transport
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from treetune.serve.http.writes import joined

REQUEST_SECONDS = 60.0
"""From the first byte of a request to its last; also for a new connection on which nothing is said."""
MOST_HEAD_BYTES = 64 << 10


class GuardedHttp(HttpToolsProtocol):
    arriving_since: float | None = None
    """When the request that is still arriving began."""
    _head_bytes: int | None = None
    """Of a head that is still arriving."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(joined(transport))
        self.arriving_since = time.monotonic()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arriving_since, self._head_bytes = time.monotonic(), 0

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.arriving_since = None
        super().on_message_complete()


def close_slow(connections: Iterable[Any]) -> None:
    """Closes those whose request has been arriving for too long."""
    oldest = time.monotonic() - REQUEST_SECONDS
    for connection in list(connections):
        if isinstance(connection, GuardedHttp) and (since := connection.arriving_since) is not None and since < oldest:
            connection.transport.close()
