"""HttpTransport speaks JSON over HTTP with one server: one request, one reply, no retries.

    async with HttpTransport("http://127.0.0.1:5000") as transport:
        reply = await transport.ask("POST", "/api/episode/start", {}, timeout=10)
        reply.read(dict)                  # its body; raises for an error

It does not follow redirects, because the token is meant for one address only. `system/http_body.py` limits the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from treetune.errors import UsageError, format_error
from treetune.serve.errors import Denied, ServeError, Unreachable
from treetune.serve.http.wire import decode
from treetune.system.http_body import BodyTooLarge, read_body, retry_after
from treetune.system.http_error import encode

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 10.0
_LONGEST_WAIT = 60.0
_MOST_CONNECTIONS = 1024
_START_ONE = "is a task server running there? `treetune serve TARGET --http :PORT` starts one"
R = TypeVar("R")


class Refusal(ServeError):
    """A reply with an error status."""

    def __init__(self, message: str, reply: HttpReply, reason: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.status, self.reason, self.retry_after = reply.status, reason, reply.retry_after


class _ErrorBody(msgspec.Struct):
    """The body of an error from a Treetune server; other servers send other bodies."""

    error: str = ""
    kind: str = ""
    remedy: str | None = None
    detail: Any = ""
    """The message of FastAPI's errors, which OpenEnv and ORS use."""


class HttpReply(NamedTuple):
    url: str
    status: int
    body: bytes
    retry_after: float | None = None

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    def read(self, kind: type[R]) -> R:
        """Reads the body as a `kind`. Raises ServeError for an error status or any other body."""
        if not self.good:
            raise self.error()
        try:
            return decode(kind, self.body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ServeError(f"{self.url} sent an unexpected answer: {error}: {self.body[:200]!r}") from None

    def error(self) -> ServeError:
        """Converts a reply with an error status to an error."""
        body = _ErrorBody(self.body[:300].decode(errors="replace"))
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = msgspec.json.decode(self.body, type=_ErrorBody)
            body = found if found.error or found.detail else body
        message, remedy = f"{self.url} answered {self.status}: {body.error or body.detail}", body.remedy
        if self.status in (401, 403):
            return Denied(message, remedy=remedy or "pass the token of the server")
        if 300 <= self.status < 400:
            remedy = "redirects are not followed: pass the address that it redirects to"
        return Refusal(message, self, body.kind, remedy)


class HttpTransport:
    def __init__(self, url: str, token: str | None = None, remedy: str = _START_ONE) -> None:
        """`remedy` is shown in the error if no server answers."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not the address of a task server", remedy="write http://127.0.0.1:5000")
        self.url, self.remedy = url.rstrip("/"), remedy
        json = "application/json"
        self.headers = {"Accept": json, "Content-Type": json, "Accept-Encoding": "identity"}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """aiohttp's session, opened on first use."""
        import aiohttp

        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                connector=aiohttp.TCPConnector(limit=_MOST_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def ask(
        self, method: str, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        import aiohttp

        url = self.url + path
        data = None if body is None else encode(body, strict=True)
        seconds = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        asking = self.session.request(method, url, data=data, timeout=seconds, headers=headers, allow_redirects=False)
        try:
            async with asking as response:
                content = await read_body(response)
                wait = retry_after(response, _LONGEST_WAIT)
                return HttpReply(url, response.status, content, wait)
        except BodyTooLarge as error:
            raise ServeError(error.message) from None
        except TimeoutError:
            raise Unreachable(
                f"{url} did not answer within {timeout:g} seconds", remedy="allow more, or see what it does"
            ) from None
        except (aiohttp.InvalidURL, UnicodeError):  # UnicodeError: an invalid host name
            raise UsageError(f"{self.url!r} is not an address", remedy="write http://127.0.0.1:5000") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url}: {format_error(error)}", remedy=self.remedy) from error
