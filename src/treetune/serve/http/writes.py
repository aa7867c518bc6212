"""Writes joined: what is written to a connection in one round of the event loop goes out as one.

    super().connection_made(joined(transport))

uvicorn writes the head of a response, then its body: two system calls and two packets, a tenth of a step's cost.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast


class _Joined:
    __slots__ = ("_call_soon", "_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def joined(transport: asyncio.Transport) -> asyncio.Transport:
    return cast(asyncio.Transport, _Joined(transport))
