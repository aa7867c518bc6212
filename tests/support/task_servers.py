"""Task servers for the tests of what talks to one.

    python task_servers.py PORT [RECORD]      # a minimal one, in the style of a person who read one page about the API

`Scripted` answers over HTTP in this process, and can be told to fail in many ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# A minimal server: two endpoints, no turn, no info, no health, numbers as ids, text as observations.


def minimal_app(record: Path | None = None) -> web.Application:
    secrets: dict[int, int] = {}

    async def start(request: web.Request) -> web.Response:
        body = await request.json()
        episode = len(secrets) + 1
        secrets[episode] = body.get("task_index", episode) % 10
        return web.json_response({"episode_id": episode, "observation": "Guess a number from 0 to 9."})

    async def step(request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) == {"episode_id", "action"}, body  # it was told of nothing else
        secret = secrets[body["episode_id"]]
        if record is not None:
            with record.open("a") as file:
                file.write(f"{body['action']}\n")
        if body["action"] == "die":
            os.kill(os.getpid(), 9)
        digits = [int(letter) for letter in body["action"] if letter.isdigit()]
        if not digits:
            return web.json_response({"observation": "A number, please.", "reward": 0, "done": False})
        if digits[-1] == secret:
            return web.json_response({"observation": "Right.", "reward": 1, "done": True})
        hint = "higher" if secret > digits[-1] else "lower"
        return web.json_response({"observation": f"It is {hint}.", "reward": 0, "done": False})

    app = web.Application()
    app.router.add_post("/api/episode/start", start)
    app.router.add_post("/api/episode/step", step)
    return app


@contextlib.contextmanager
def process(*arguments: str, url: str, path: str = "/") -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, from when it answers anything at all until the end."""
    running = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(url + path, timeout=5).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert running.poll() is None, f"{arguments} ended with {running.returncode}"
                time.sleep(0.05)
        yield running
    finally:
        running.kill()
        running.wait()


@contextlib.contextmanager
def minimal(record: Path | None = None, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with process(__file__, str(port), *([str(record)] if record else []), url=url) as running:
        yield url, running


# A server that can be told how to fail.


class Scripted:
    """Counts to three and ends. `faults` maps a path to what happens to its next requests, one each."""

    def __init__(self, features: list[str] | None = None, token: str | None = None) -> None:
        self.features = ["turn", "request_id"] if features is None else features
        self.token = token
        self.faults: dict[str, list[Any]] = {}
        self.seen: Counter[str] = Counter()
        self.played: list[tuple[str, int]] = []
        """The turns that were really played, by episode."""
        self.cancelled: list[str] = []
        self.most = 1000
        self.tools: list[Any] = []
        """What its episodes say can be called."""
        self.info: dict[str, Any] = {"name": "scripted", "num_tasks": 5}
        self._answers: dict[tuple[str, int], Any] = {}
        self.turns: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rpartition("/")[2]
        self.seen[path] += 1
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        fault = self.faults[path].pop(0) if self.faults.get(path) else None
        if fault == "drop":  # before anything is done
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(fault, dict):  # what to answer instead
            return web.Response(**fault)
        answer = await self.answer(path, await request.json() if request.can_read_body else {})
        if fault == "lose":  # after it was done
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer

    async def answer(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "info":
            return web.json_response({**self.info, "features": self.features})
        if path == "health":
            return web.json_response({"status": "ok"})
        if path == "cancel":
            self.cancelled.append(body["episode_id"])
            self.turns[body["episode_id"]] = 3
            return web.json_response({"episode_id": body["episode_id"], "cancelled": True})
        status, answer = {"start": self._start, "step": self._step}[path](body)
        headers = {"Retry-After": "0"} if status == 429 else None
        return web.json_response(answer, status=status, headers=headers)

    def _start(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body.get("request_id")
        if name is not None and name in self._requests:
            return 200, self._requests[name]
        if len(self.turns) >= self.most:
            self.most += 1  # there is room the next time
            return 429, {"error": "no room", "kind": "busy", "status": 429}
        id = f"e-{len(self.turns)}"
        self.turns[id] = 0
        index = body.get("task_index")
        answer = {
            "episode_id": id,
            "observation": {"type": "text", "content": f"task {index}"},
            "info": {"task": index},
            "tools": self.tools,
        }
        if name is not None:
            self._requests[name] = answer
        return 200, answer

    def _step(self, body: dict[str, Any]) -> tuple[int, Any]:
        id, turn = body["episode_id"], body.get("turn")
        if id not in self.turns:
            return 404, {"error": "unknown episode", "kind": "unknown_episode", "status": 404}
        if (id, turn) in self._answers:
            return 200, self._answers[id, turn]
        now = self.turns[id]
        if now == 3:
            return 410, {"error": "this episode is over", "kind": "finished", "status": 410}
        self.turns[id] += 1
        self.played.append((id, now))
        content = {"type": "text", "content": f"{body['action']} at {now}"}
        done = now == 2
        answer = {
            "observation": content,
            "reward": float(done),
            "done": done,
            "info": {"success": True} if done else {},
        }
        self._answers[id, now] = answer
        return 200, answer

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


@contextlib.asynccontextmanager
async def scripted(**options: Any) -> AsyncIterator[Scripted]:
    server = Scripted(**options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def read_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


async def _serve(port: int, record: Path | None) -> None:
    runner = web.AppRunner(minimal_app(record))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
