"""The register of running servers over HTTP, for machines that share no folder.

    GET    /api/servers          {"servers": [{"entry": {...}, "age": 3.2}]}
    POST   /api/servers          an entry, again every few seconds
    DELETE /api/servers/ID

It is kept in memory: after a restart the servers announce themselves again within seconds.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from treetune.errors import UsageError
from treetune.serve.access import Access
from treetune.serve.http.server import parse_address
from treetune.serve.register import FORGET_SECONDS, MOST_BYTES, MOST_ENTRIES, Entry, Listed, Listing, read_entry


class RegisterServer:
    def __init__(self, address: str, access: Access) -> None:
        self._host, self._port = parse_address(address, access)
        self._token = access.token
        self._known: dict[str, tuple[Entry, float]] = {}
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._admit])
        app.add_routes(
            [
                web.get("/api/health", self._health),
                web.get("/api/servers", self._list),
                web.post("/api/servers", self._announce),
                web.delete("/api/servers/{id}", self._withdraw),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                remedy="is another server there?",
            ) from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        if origin and origin.partition("://")[2] != request.host:
            return _error(403, "a page from elsewhere may not ask here")
        given = request.headers.get("Authorization", "").encode(errors="replace")
        wanted = f"Bearer {self._token}".encode()
        if self._token and request.path != "/api/health" and not hmac.compare_digest(given, wanted):
            return _error(401, "the register's token is missing or wrong", "set TREETUNE_REGISTER_TOKEN")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _list(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        self._forget(now)
        found = [Listed(msgspec.Raw(msgspec.json.encode(entry)), now - heard) for entry, heard in self._known.values()]
        return _json(Listing(found))

    async def _announce(self, request: web.Request) -> web.Response:
        entry = read_entry(await request.read())
        if entry is None:
            return _error(422, "this is no entry of a server")
        now = time.monotonic()
        self._forget(now)
        if entry.id not in self._known and len(self._known) >= MOST_ENTRIES:
            return _error(429, f"{MOST_ENTRIES} servers are registered, as many as may be")
        self._known[entry.id] = (entry, now)
        return _json({})

    async def _withdraw(self, request: web.Request) -> web.Response:
        self._known.pop(request.match_info["id"], None)
        return _json({})

    def _forget(self, now: float) -> None:
        self._known = {id: known for id, known in self._known.items() if now - known[1] <= FORGET_SECONDS}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, error: str, remedy: str | None = None) -> web.Response:
    return _json({"error": error, "remedy": remedy}, status)
