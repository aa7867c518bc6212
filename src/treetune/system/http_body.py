"""Reads the body of an HTTP reply up to a limit. All HTTP clients of the package use this module.

    async with session.get(url) as response:
        content = await read_body(response)

A server may send endlessly, or send little that decodes to a lot. A body is refused (`BodyTooLarge`) if it exceeds
`MOST_BYTES`, if all bodies being read in this process exceed `MOST_TOGETHER`, or if its JSON has more than
`MOST_VALUES` values.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from treetune.errors import TreetuneError

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from aiohttp import ClientResponse

MOST_BYTES = 64 << 20
MOST_TOGETHER = 256 << 20
MOST_VALUES = 4_000_000
"""Counts lists, objects and the values in them. 64 MB of empty lists would take 1.4 GB."""
_SMALL = 4 << 20
"""A body up to this size is never refused because of others."""
_PLAIN = 1 << 20
"""A body with a known length up to this size passes every limit."""
_UNKNOWN = _PLAIN + 1
_CHUNK = 1 << 16
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_under_way: dict[object, int] = {}
"""The bytes read so far of each body. Event loops in several threads share it."""


class BodyTooLarge(TreetuneError, code="too-large"):
    """A reply exceeds a limit. A retry would not help."""

    @classmethod
    def of(cls, url: str, most: int) -> BodyTooLarge:
        return cls(f"{url} sent more than {most >> 20} MB in one reply")


async def read_body(response: ClientResponse) -> bytes:
    """The body of an aiohttp response; raises `BodyTooLarge`."""
    if (response.content_length or _UNKNOWN) <= _PLAIN and "Content-Encoding" not in response.headers:
        return await response.read()  # aiohttp reads no more than this length
    with _Body(str(response.url)) as body:
        async for piece in response.content.iter_any():
            body.add(piece)
        return body.finish()


def retry_after(response: ClientResponse, most: float) -> float | None:
    """The seconds, at most `most`, that a server asks its clients to wait; None if it names none."""
    try:
        return min(most, max(0.0, float(response.headers["Retry-After"])))
    except (KeyError, ValueError):
        return None


def read_blocking(response: HTTPResponse, seconds: float) -> bytes:
    """The body of a `urllib` response, read within a time limit; raises `BodyTooLarge` or `TimeoutError`."""
    until = time.monotonic() + seconds
    with _Body(response.url) as body:
        while piece := response.read1(_CHUNK):
            body.add(piece)
            if time.monotonic() > until:
                raise TimeoutError(f"{response.url} did not finish its reply within {seconds:g} seconds")
        return body.finish()


class _Body:
    """A body that is being read."""

    def __init__(self, url: str) -> None:
        self._url, self._content, self._key = url, bytearray(), object()

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *exception: object) -> None:
        _under_way.pop(self._key, None)

    def add(self, piece: bytes) -> None:
        self._content += piece
        size = len(self._content)
        if size > MOST_BYTES:
            raise BodyTooLarge.of(self._url, MOST_BYTES)
        _under_way[self._key] = size
        if size > _SMALL and sum(list(_under_way.values())) > MOST_TOGETHER:
            raise BodyTooLarge(
                f"{self._url} sent {size >> 20} MB, and all replies in progress exceed {MOST_TOGETHER >> 20} MB"
            )

    def finish(self) -> bytes:
        content = bytes(self._content)
        check_values(self._url, content)
        return content


def check_values(url: str, content: bytes) -> None:
    """Raise for JSON that is small in bytes but large when decoded."""
    if len(content) <= MOST_VALUES or _count(content) <= MOST_VALUES:
        return
    if _count(strip_strings(content)) > MOST_VALUES:
        raise BodyTooLarge(f"{url} sent more than {MOST_VALUES:,} values in one reply")


def strip_strings(content: bytes) -> bytes:
    """Remove strings from JSON, because brackets and commas in them do not count."""
    return _STRINGS.sub(b"", content)


def _count(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{") + content.count(b",")
