"""OrsClient plays environments on an ORS server, whoever wrote it.

async with OrsClient("http://127.0.0.1:8080") as client:
    session = await client.create("my-env", {"split": "train", "index": 3})
    output = await session.call("submit", {"answer": "42"})
    await session.delete()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import quote

from treetune.serve.errors import ServeError
from treetune.serve.http.transport import HttpTransport

_PING_SECONDS = 60.0
_QUICK_SECONDS = 10.0


class CallRefused(ServeError):
    """The server says that a call was wrong: no such tool, no such input."""


class OrsClient:
    def __init__(self, url: str, token: str | None = None, *, timeout: float = 300.0) -> None:
        self._transport = HttpTransport(url, token, "is an ORS server running there?")
        self._headers = {"X-API-Key": token} if token else {}
        self._timeout = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    async def ask(self, method: str, path: str, body: Any = None, session: str | None = None) -> Any:
        """What the server answers; None where it says that it has no answer."""
        reply = await self._ask(method, path, body, session)
        return None if reply.status == 501 else reply.read(object)

    async def _ask(self, method: str, path: str, body: Any, session: str | None) -> Any:
        headers = self._headers | ({"X-Session-ID": session} if session is not None else {})
        return await self._transport.ask(method, path, body, self._timeout, headers)

    async def create(self, environment: str, task: dict[str, Any]) -> OrsSession:
        session = OrsSession(self, environment, str(uuid.uuid4()))
        try:
            await self.ask("POST", "/create", {"env_name": environment, **task}, session.id)
        except BaseException:
            await session.delete()  # it may have been made all the same
            raise
        session.keep_alive()
        return session

    async def call(self, path: str, body: dict[str, Any], session: str) -> Any:
        """What the server sends as events."""
        reply = await self._ask("POST", path, body, session)
        if not reply.good:
            raise reply.error()
        parts: list[str] = []
        for event, data in _read_events(reply.body.decode(errors="replace")):
            if event == "error":
                raise ServeError(f"{reply.url} failed: {data or 'it does not say why'}")
            if event in ("chunk", "end"):
                parts.append(data)
            if event == "end":
                break
        else:
            raise ServeError(f"{reply.url} ended before its result")
        try:
            return json.loads("".join(parts))
        except ValueError:
            raise ServeError(f"{reply.url} sent no JSON: {''.join(parts)!r:.200}") from None


class OrsSession:
    """An environment of one task, there until it is deleted."""

    def __init__(self, client: OrsClient, environment: str, id: str) -> None:
        self._client, self.id = client, id
        self._path = f"/{quote(environment, safe='')}"
        self._pinging: asyncio.Task[None] | None = None

    def keep_alive(self) -> None:
        """The server closes what it hears nothing of."""
        self._pinging = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_SECONDS)
            with contextlib.suppress(ServeError):  # the next call tells
                await self._client.ask("POST", "/ping", {}, self.id)

    async def prompt(self) -> list[Any]:
        return list(await self._client.ask("GET", f"{self._path}/prompt", None, self.id))

    async def tools(self) -> list[Any]:
        return list((await self._client.ask("GET", f"{self._path}/task_tools", None, self.id))["tools"])

    async def call(self, name: str, input: dict[str, Any]) -> dict[str, Any]:
        """What a tool gave: `blocks`, `reward`, `finished`, `metadata`."""
        result = await self._client.call(f"{self._path}/call", {"name": name, "input": input}, self.id)
        if isinstance(result, dict) and result.get("ok") and isinstance(result.get("output"), dict):
            output: dict[str, Any] = result["output"]
            return output
        if isinstance(result, dict) and isinstance(result.get("error"), str):
            raise CallRefused(result["error"])
        raise ServeError(f"{self._path}/call sent something else than its result: {result!r:.200}")

    async def delete(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        with contextlib.suppress(ServeError, TimeoutError):
            async with asyncio.timeout(_QUICK_SECONDS):
                await self._client.ask("POST", "/delete", {}, self.id)


def _read_events(text: str) -> Iterator[tuple[str, str]]:
    for block in text.replace("\r\n", "\n").split("\n\n"):
        event, data = "", []
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data":
                data.append(value.removeprefix(" "))
        if event:
            yield event, "\n".join(data)
