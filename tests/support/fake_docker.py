"""A stand-in for a Docker engine, for machines without one: it answers the calls that shells make, and says so.

It is no proof that a real engine works. What it runs as a container is the real runner, in bubblewrap; the HTTP calls,
the upgraded connection and the frames are as the engine's API documents them. Calls are those of aiodocker, which asks
for the engine's version first and looks at a container before it attaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from treetune.sandbox import SandboxLimits, require
from treetune.sandbox.runtime import BubblewrapRuntime


class FakeDocker:
    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.configs: dict[str, dict[str, Any]] = {}
        self.images: list[str] = []
        """Of all containers that were ever asked for."""
        self.copies: dict[str, str] = {}
        """Images that were made of containers."""
        self.running: dict[str, BubblewrapRuntime] = {}
        self.attached: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.pumps: set[asyncio.Task[None]] = set()
        self.says_on_start: bytes | None = None
        """Instead of a runner, what the container prints to standard error before it ends."""

    async def __aenter__(self) -> FakeDocker:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        for id in list(self.running):
            self._end(id)
        for pump in self.pumps:
            pump.cancel()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        path = re.sub(r"^/v[\d.]+", "", path)
        size = re.search(r"content-length: (\d+)", head, re.I)
        body = await reader.readexactly(int(size[1])) if size else b""
        if "/attach" in path:
            self.attached[path.split("/")[2]] = reader, writer
            writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
            return
        status, answer = await self._answer(method, path, body)
        content = b"" if answer is None else json.dumps(answer).encode()
        kind = "Content-Type: application/json\r\n"
        head = f"HTTP/1.1 {status} x\r\n{kind}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"Version": "0.0 (a stand-in)", "ApiVersion": "1.43"}
        if path == "/containers/create":
            config = json.loads(body)
            if config["Image"] == "missing":
                return 404, {"message": "No such image: missing"}
            id = f"c{len(self.images)}"
            self.configs[id] = config
            self.images.append(config["Image"])
            return 201, {"Id": id, "Warnings": ["this is a stand-in for an engine"]}
        if path.startswith("/commit"):
            asked = parse_qs(urlsplit(path).query)
            self.copies[f"{asked['repo'][0]}:{asked['tag'][0]}"] = asked["container"][0]
            return 201, {"Id": "sha256:0"}
        id = path.split("/")[2].partition("?")[0]
        if path.startswith("/images"):
            return (200, []) if self.copies.pop(id, None) else (404, {"message": f"No such image: {id}"})
        if method == "DELETE":
            if id not in self.configs:
                return 404, {"message": f"No such container: {id}"}
            self._end(id)
            self.configs.pop(id, None)
        elif path.endswith("/json"):
            return 200, {"Id": id, "Config": self.configs[id]}
        else:
            await self._start(id)
        return 204, None

    async def _start(self, id: str) -> None:
        reader, writer = self.attached[id]
        if self.says_on_start is not None:
            writer.write(b"\2\0\0\0" + len(self.says_on_start).to_bytes(4, "big") + self.says_on_start)
            writer.close()
            return
        launcher = await asyncio.to_thread(require, shell=True)
        runtime = self.running[id] = BubblewrapRuntime(launcher, SandboxLimits())
        original = self.copies.get(self.configs[id]["Image"])
        runtime._spawn(SandboxLimits(), None if original is None else self.running[original]._process)
        inner_reader, inner_writer = await asyncio.open_unix_connection(sock=runtime._socket)
        for pump in (self._inward(id, reader, inner_writer), self._outward(inner_reader, writer)):
            self.pumps.add(asyncio.create_task(pump))

    async def _inward(self, id: str, reader: asyncio.StreamReader, inner: asyncio.StreamWriter) -> None:
        await reader.readexactly(int(self.configs[id]["Cmd"][5]))  # the runner, which runs already
        while content := await reader.read(1 << 16):
            inner.write(content)
        inner.close()  # StdinOnce
        self._end(id)

    async def _outward(self, inner: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await inner.read(1 << 16):
            half = len(content) // 2  # a frame ends anywhere
            for part in (content[:half], content[half:]):
                writer.write(b"\1\0\0\0" + len(part).to_bytes(4, "big") + part)
        writer.close()

    def _end(self, id: str) -> None:
        runtime = self.running.pop(id, None)
        if runtime is not None:
            runtime.end()
            if self.configs[id]["HostConfig"]["AutoRemove"]:
                del self.configs[id]
