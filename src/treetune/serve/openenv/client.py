"""OpenEnvClient plays environments on an OpenEnv server, whoever wrote it.

    async with OpenEnvClient("http://127.0.0.1:8000") as client:
        session, first = await client.start({"seed": 3})
        await session.ask("step", {"message": "42"})
        await session.close()

Many servers have room for one session only: `start` waits until one is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any, Self

import aiohttp

from treetune.errors import format_error
from treetune.serve.errors import Busy, Denied, ServeError, Unreachable
from treetune.serve.http.transport import CONNECT_SECONDS, HttpTransport
from treetune.system.http_body import MOST_BYTES, BodyTooLarge, check_values

_REMEDY = "is an OpenEnv server running there?"
FIRST_PAUSE, LAST_PAUSE = 0.1, 3.0
_ALIVE_SECONDS = 20.0
"""How often a silent server is asked whether it is there."""
_CLOSE_SECONDS = 5.0
_CLOSED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


class Refused(ServeError):
    """An error that the server answers with; `code` says which."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the server answered {code}: {message}")
        self.code = code


class OpenEnvClient:
    def __init__(self, url: str, token: str | None = None, *, timeout: float = 300.0, patience: float = 600.0) -> None:
        """An answer may take `timeout` seconds; `patience` is how long a free session is waited for."""
        self.transport = HttpTransport(url, token, _REMEDY)
        self._token, self._timeout, self._patience = token, timeout, patience
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.transport.close()
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, body: Any = None) -> Any:
        """What the server answers over HTTP; None where it has no such path, or says that it has no answer."""
        reply = await self.transport.ask("GET" if body is None else "POST", path, body, self._timeout)
        return None if reply.status in (404, 405, 501) else reply.read(object)

    async def start(self, reset: dict[str, Any]) -> tuple[OpenEnvSession, Any]:
        """A session of its own, and what it shows first."""
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            session = await self._connect()
            try:
                return session, await session.ask("reset", reset)
            except Refused as error:
                await session.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() + pause > until:
                    remedy = "play fewer at once (--max-concurrent), or give the server more sessions"
                    raise Busy(f"{self.transport.url} had no free session: {error}", remedy=remedy) from None
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE, 2 * pause)

    async def _connect(self) -> OpenEnvSession:
        if self._session is None or self._session.closed:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        url = f"{self.transport.url}/ws"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await self._session.ws_connect(url, heartbeat=_ALIVE_SECONDS, max_msg_size=MOST_BYTES)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise Denied(f"{url} answered {error.status}", remedy="set TREETUNE_TOKEN to the server's") from None
            raise ServeError(f"{url} answered {error.status}", remedy="is it an OpenEnv server?") from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url}: {format_error(error)}", remedy=_REMEDY) from error
        return OpenEnvSession(socket, url, self._timeout)


class OpenEnvSession:
    """One connection, which is one session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._socket, self._url, self._timeout = socket, url, timeout

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> Any:
        """The data of the answer. After one that did not come the session is of no use, and is closed."""
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with contextlib.suppress(ConnectionError):  # it may have been told why already
                await self._socket.send_str(json.dumps(message))
            answer = await self._hear()
        except (TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            await self._socket.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{self._url} did not answer within {self._timeout:g} seconds") from None
            raise ServeError(f"{self._url} has closed the session: {format_error(error)}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise ServeError(f"{self._url} sent something else than its answer: {answer!r:.200}")
        if answer.get("type") == "error":
            told = answer["data"]
            raise Refused(str(told.get("code", "ERROR")), str(told.get("message", "")))
        return answer["data"]

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """The result of a request over JSON-RPC."""
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        if (error := answer.get("error")) is not None:
            raise Refused(str(error.get("code", "ERROR")), str(error.get("message", "")))
        return answer.get("result")

    async def _hear(self) -> Any:
        async with asyncio.timeout(self._timeout):
            message = await self._socket.receive()
        if message.type in _CLOSED:
            raise ConnectionError(f"closed with {self._socket.close_code}")
        try:
            check_values(self._url, message.data.encode() if isinstance(message.data, str) else message.data)
            return json.loads(message.data)
        except BodyTooLarge as error:
            raise ServeError(error.message) from None
        except (ValueError, RecursionError):
            raise ServeError(f"{self._url} sent no JSON: {message.data!r:.200}") from None

    async def close(self) -> None:
        """Ends the session there too."""
        with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                if not self._socket.closed:
                    await self._socket.send_str('{"type": "close"}')
                await self._socket.close()
