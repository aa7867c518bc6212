"""An OpenEnv door in this process, and clients that say exactly what they are told to."""

from __future__ import annotations

import contextlib
import json

import aiohttp
from serving import serving

from treetune import Environment, Step, Task, Taskset, tool
from treetune.serve.http import HttpConfig
from treetune.serve.openenv.door import OpenEnvDoor


class Echo(Environment):
    """Says what was said; closes are counted."""

    closed = 0

    async def start(self):
        return f"task {self.task.prompt}"

    async def step(self, action):
        if action.text == "fail":
            raise RuntimeError("the machine is gone")
        return Step(action.text, reward=len(action.text) * 0.1, done=action.text == "end", info={"said": action.text})

    async def close(self):
        type(self).closed += 1


class Echoes(Taskset):
    """Five tasks of several turns."""

    def load_tasks(self):
        return [Task(prompt=str(number)) for number in range(5)]

    def environment(self, task):
        return Echo(task)


class Shop(Environment):
    @tool
    async def search(self, query: str, limit: int = 2) -> list[str]:
        """Find items. query: what to look for."""
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        """Buy an item, which ends it."""
        return Step("bought", reward=float(item == self.task.ground_truth))

    def step(self, action):
        return Step("Use the tools." if action.text == "hello" else "", done=action.text != "hello")


class Shopping(Taskset):
    """Three tasks with tools."""

    def load_tasks(self):
        return [Task(prompt=f"Buy red {number}.", reward_spec={"ground_truth": f"red {number}"}) for number in range(3)]

    def environment(self, task):
        return Shop(task)


class Socket:
    """One connection to `/ws`."""

    def __init__(self, connection):
        self.connection = connection

    async def tell(self, message):
        await self.connection.send_str(message if isinstance(message, str) else json.dumps(message))

    async def hear(self):
        """The next message; the code where it is that the connection was closed."""
        message = await self.connection.receive(timeout=60)
        return json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else self.connection.close_code

    async def ask(self, kind, data=None):
        await self.tell({"type": kind} if data is None else {"type": kind, "data": data})
        return await self.hear()

    async def step(self, text):
        return (await self.ask("step", {"message": text}))["data"]

    async def call(self, method, id=1, **params):
        """The response to a request of JSON-RPC."""
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        assert answer["type"] == "mcp"
        return answer["data"]


class Client:
    def __init__(self, session, door, server):
        self.session, self.door, self.server = session, door, server

    @contextlib.asynccontextmanager
    async def socket(self, path="/ws", **options):
        async with self.session.ws_connect(self.door.address + path, **options) as connection:
            yield Socket(connection)

    async def ask(self, method, path, body=None, **options):
        async with self.session.request(method, self.door.address + path, json=body, **options) as reply:
            return reply.status, await reply.json()

    @property
    def live(self):
        return self.server.host.episodes.live


@contextlib.asynccontextmanager
async def playing(taskset, *, http=None, split="train", **options):
    door = OpenEnvDoor(HttpConfig(**{"address": ":0", **(http or {})}), split)
    async with serving(taskset, doors=[door], **options) as server, aiohttp.ClientSession() as session:
        yield Client(session, door, server)
