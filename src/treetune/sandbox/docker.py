"""Shells in containers of a Docker engine, for tasks with an image of their own.

    shell = await open_shell("python:3.12-slim", SandboxLimits(memory_mb=1024))

The engine is spoken to over its HTTP API on a unix socket. Inside runs the same runner as in bubblewrap, so a shell is
a shell; the image needs `bash` and `python3`. No network, no further privileges. A container is removed with `close`,
and also when the process that opened it ends. The engine limits memory and processes; `disk_mb` it does not.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from treetune.sandbox.memory import allowed
from treetune.sandbox.protocol import DEFAULT_LIMITS, SandboxLimits, SandboxUnavailable
from treetune.sandbox.shell import START_SECONDS, Shell, receive
from treetune.sandbox.shell_start import OUR_PROCESSES, PATH

SOCKET = "/var/run/docker.sock"
RUNNER = "/.treetune/shell_runner.py"
FRAME_HEADER = 8
STDOUT = 1
GONE = (404, 409)
"""The engine has removed it, or is about to."""
ENGINE_REMEDY = "start the engine, or name its socket with DOCKER_HOST=unix:///path; may this user open it?"


def socket_path() -> str:
    return os.environ.get("DOCKER_HOST", f"unix://{SOCKET}").removeprefix("unix://")


async def open_shell(image: str, limits: SandboxLimits = DEFAULT_LIMITS, *, socket: str | None = None) -> Shell:
    """A fresh container of an image, or `SandboxUnavailable` with cause and remedy."""
    return Shell(await DockerCarrier.open(image, limits, socket or socket_path()), limits)


class Engine:
    """The few calls that are needed."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def call(
        self, method: str, path: str, *, body: Any = None, data: bytes | None = None, tolerated: tuple[int, ...] = ()
    ) -> Any:
        connector = aiohttp.UnixConnector(self._socket)
        try:
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.request(method, f"http://docker{path}", json=body, data=data) as answer,
            ):
                content = await answer.read()
        except (OSError, aiohttp.ClientError) as error:
            raise SandboxUnavailable(f"no Docker engine answers: {error}", remedy=ENGINE_REMEDY) from error
        said = _decoded(content)
        if answer.status in tolerated:
            return None
        if answer.status >= 400:
            why = said.get("message") if isinstance(said, dict) else None
            raise SandboxUnavailable(f"the Docker engine refuses ({answer.status}): {why or content[:200]!r}")
        return said

    async def attach(self, container: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The container's standard input and output as a raw connection."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        path = f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        request = f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split(b" ", 2)[1] not in (b"101", b"200"):
            writer.close()
            raise SandboxUnavailable(f"the Docker engine does not attach: {head.splitlines()[0]!r}")
        return reader, writer


class DockerCarrier:
    kernel_kills = True

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine, self._container = engine, container
        self._said = bytearray()
        """The last that the runner wrote to standard error."""

    @classmethod
    async def open(cls, image: str, limits: SandboxLimits, socket: str) -> Self:
        engine = Engine(socket)
        try:
            made = await engine.call("POST", "/containers/create", body=container_config(image, limits))
        except SandboxUnavailable as error:
            if error.remedy is None:
                error.remedy = f"docker pull {image}, or build it"
            raise
        carrier = cls(engine, quote(made["Id"]))
        try:
            await engine.call("PUT", f"/containers/{carrier._container}/archive?path=/", data=_runner_tar())
            await carrier._begin(image)
        except BaseException:
            await asyncio.shield(carrier.close())
            raise
        return carrier

    async def _begin(self, image: str) -> None:
        raw, writer = await self._engine.attach(self._container)
        reader = asyncio.StreamReader(limit=1 << 20)
        self.streams = reader, writer
        self._demultiplexing = asyncio.create_task(self._demultiplex(raw, reader))
        await self._engine.call("POST", f"/containers/{self._container}/start")
        try:
            async with asyncio.timeout(START_SECONDS):
                await receive(reader)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            why = bytes(self._said).decode(errors="replace").strip()
            raise SandboxUnavailable(
                f"no shell starts in a container of {image}: {why or 'it does not say why'}",
                remedy="the image needs bash and python3",
            ) from error

    async def _demultiplex(self, raw: asyncio.StreamReader, out: asyncio.StreamReader) -> None:
        """Without a terminal the engine sends frames: the stream's number, a size, and so many bytes."""
        try:
            while True:
                header = await raw.readexactly(FRAME_HEADER)
                content = await raw.readexactly(int.from_bytes(header[4:], "big"))
                if header[0] == STDOUT:
                    out.feed_data(content)
                else:
                    self._said = (self._said + content)[-4096:]
        except (OSError, EOFError):
            out.feed_eof()

    def passed_memory(self) -> bool:
        return False  # the kernel kills the process that takes most, and the runner goes on

    def kill(self) -> None:
        self.streams[1].close()  # the runner ends when nobody can ask it any more

    async def close(self) -> None:
        if hasattr(self, "streams"):
            self.kill()
            self._demultiplexing.cancel()
        await self._engine.call("DELETE", f"/containers/{self._container}?force=true&v=true", tolerated=GONE)


def container_config(image: str, limits: SandboxLimits) -> dict[str, Any]:
    memory = allowed(limits)
    return {
        "Image": image,
        "Cmd": ["python3", "-I", "-S", RUNNER],
        "Entrypoint": [],
        "Env": [f"PATH={PATH}", "HOME=/root", "USER=root", "LANG=C.UTF-8"],
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Tty": False,
        "OpenStdin": True,
        # With its client the standard input ends, and with that the runner.
        "StdinOnce": True,
        **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "NetworkDisabled"), True),
        "Labels": {"treetune": "shell"},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": limits.processes + OUR_PROCESSES,
            "CapDrop": ["NET_RAW", "MKNOD"],
            "CapAdd": ["LEASE"],  # as in `shell_runner.py`
            "SecurityOpt": ["no-new-privileges"],
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        },
    }


def _runner_tar() -> bytes:
    content = Path(__file__).with_name("shell_runner.py").read_bytes()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo(RUNNER.lstrip("/"))
        info.size, info.mode = len(content), 0o444
        tar.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
