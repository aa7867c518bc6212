"""An HTTP door in this process, and a client that shows its status codes."""

from __future__ import annotations

import contextlib

import aiohttp
import pytest
from serving import serving

from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.zmq.door import ZmqDoor

BOTH = pytest.mark.parametrize("workers", [0, 1])
"""In one process and through a pool."""


class Client:
    def __init__(self, session, http, server):
        self.session, self.http, self.server = session, http, server

    async def get(self, path, **options):
        async with self.session.get(self.http.address + path, **options) as reply:
            return reply.status, await reply.json()

    async def post(self, path, body=None, **options):
        options = {"json": body, **options} if "data" not in options else options
        async with self.session.post(f"{self.http.address}/api/episode/{path}", **options) as reply:
            self.headers = reply.headers
            return reply.status, await reply.json()

    async def good(self, path, body=None):
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def begun(self, **body):
        return (await self.good("start", body))["episode_id"]

    async def step(self, episode, action, turn=None):
        return await self.post("step", {"episode_id": episode, "action": action, "turn": turn})


@contextlib.asynccontextmanager
async def playing(taskset, *, workers=0, http=None, **options):
    door = HttpDoor(HttpConfig(**{"address": ":0", **(http or {})}))
    doors = [ZmqDoor(options.pop("address")), door] if "address" in options else [door]
    async with (
        serving(taskset, workers=workers, doors=doors, **options) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, door, server)
