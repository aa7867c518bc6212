"""A Link speaks JSON over HTTP with one task server: one request, one answer, no retries.

    link = Link("http://127.0.0.1:5000", token=None)
    answer = await link.ask("POST", "/api/episode/start", {}, timeout=10)

It follows no redirect (a token belongs to the address it was given for) and reads no more than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from treetune.errors import UsageError, described
from treetune.serve.errors import Denied, ServeError, Unreachable

if TYPE_CHECKING:
    import aiohttp

MOST_BYTES = 64 << 20
CONNECT_SECONDS = 10.0
_LONGEST_WAIT = 60.0


class Refusal(ServeError):
    """An answer that says no."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        reason: str = "",
        remedy: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after: float | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class Link:
    def __init__(self, url: str, token: str | None = None, max_connections: int = 1024) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a task server", remedy="write http://127.0.0.1:5000")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, method: str, path: str, body: Any, timeout: float) -> Answer:
        import aiohttp

        began = time.perf_counter()
        try:
            async with self._opened().request(
                method,
                self.url + path,
                data=None if body is None else _encoded(body),
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS),
                allow_redirects=False,
            ) as response:
                content = await _content(response)
                wait = _seconds(response.headers.get("Retry-After"))
                return Answer(response.status, content, wait, time.perf_counter() - began)
        except TimeoutError:
            raise Unreachable(
                f"{self.url}{path} did not answer within {timeout:g} seconds", remedy="allow more, or see what it does"
            ) from None
        except (aiohttp.InvalidURL, UnicodeError):  # the latter from the name's own rules
            raise UsageError(f"{self.url!r} is no address", remedy="write http://127.0.0.1:5000") from None
        except (aiohttp.ClientError, OSError) as error:
            remedy = "is a task server running there? `treetune serve TARGET --http :PORT` starts one"
            raise Unreachable(f"{self.url}{path}: {described(error)}", remedy=remedy) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


class ErrorBody(msgspec.Struct):
    """What Treetune's own server says of an error; others say what they like."""

    error: str
    kind: str = ""
    remedy: str | None = None


def error_of(url: str, answer: Answer) -> ServeError:
    """An answer that is not good, as an error."""
    text = answer.body[:300].decode(errors="replace")
    kind, remedy = "", None
    try:
        told = msgspec.json.decode(answer.body, type=ErrorBody)
        text, kind, remedy = told.error, told.kind, told.remedy
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    if answer.status in (401, 403):
        return Denied(f"{url} answered {answer.status}: {text}", remedy=remedy or "give the server's token")
    if 300 <= answer.status < 400:
        remedy = "redirects are not followed: give the address that it leads to"
    return Refusal(
        f"{url} answered {answer.status}: {text}",
        status=answer.status,
        reason=kind,
        remedy=remedy,
        retry_after=answer.retry_after,
    )


async def _content(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None and response.content_length <= MOST_BYTES:
        return await response.read()
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > MOST_BYTES:
            raise ServeError(f"{response.url} sent more than {MOST_BYTES >> 20} MB")
    return bytes(content)


def _encoded(body: Any) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, OverflowError):  # half of a surrogate pair; an integer beyond 64 bits
        return json.dumps(msgspec.to_builtins(body)).encode()


def _seconds(header: str | None) -> float | None:
    try:
        return min(_LONGEST_WAIT, max(0.0, float(header))) if header else None
    except ValueError:
        return None
