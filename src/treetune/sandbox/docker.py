"""Shells in containers of a Docker engine, for tasks with an image of their own.

    shell = await open_shell("python:3.12-slim", SandboxLimits(memory_mb=1024))

Inside runs the same runner as in bubblewrap, so a shell is a shell; the image needs `bash` and `python3`. No network,
no further privileges. A container is removed with `close`, and also when the process that opened it ends. The engine
limits memory and processes; `disk_mb` it does not. Needs the package `aiodocker`, the extra `docker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Self

from treetune.sandbox.bubblewrap import GUARD, START_SECONDS
from treetune.sandbox.limits import DEFAULT_LIMITS, SandboxLimits, SandboxUnavailable
from treetune.sandbox.shell import ENVIRONMENT, OUR_PROCESSES, RUNNER, Shell, compile_script, receive

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

SOCKET = "/var/run/docker.sock"
LOADER = "import sys; exec(open(0, 'rb', closefd=False).read(int(sys.argv[1])))"
"""Runs the runner, the first that comes on the standard input. It is told the size; what follows is the runner's."""
STDOUT = 1
UNREACHABLE = 900
"""The status that the library gives to an engine that does not answer."""
GONE = (404, 409)
"""The engine has removed it, or is about to."""
ENGINE_REMEDY = "start the engine, or name its socket with DOCKER_HOST=unix:///path; may this user open it?"


async def open_shell(image: str, limits: SandboxLimits = DEFAULT_LIMITS, *, socket: str | None = None) -> Shell:
    """A fresh container of an image, or `SandboxUnavailable` with cause and remedy. `socket` is the engine's."""
    return Shell(await DockerRuntime.open(image, limits, socket), limits)


async def describe_engine() -> str:
    async with connect() as engine:
        version = await engine.version()
    return f"engine {version.get('Version')}, API {version.get('ApiVersion')}"


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[Docker]:
    """The engine at DOCKER_HOST, or where it usually is."""
    engine = _make_client(None)
    try:
        with _translate_errors():
            yield engine
    finally:
        await engine.close()


def _make_client(socket: str | None) -> Docker:
    try:
        import aiodocker
    except ImportError:
        raise SandboxUnavailable("aiodocker is not installed", remedy="pip install 'treetune[docker]'") from None
    with _translate_errors():
        return aiodocker.Docker(url=f"unix://{socket}" if socket else os.environ.get("DOCKER_HOST", f"unix://{SOCKET}"))


@contextlib.contextmanager
def _translate_errors(remedy: str | None = None) -> Iterator[None]:
    import aiodocker

    try:
        yield
    except (aiodocker.DockerError, OSError, ValueError) as error:
        status, said = getattr(error, "status", UNREACHABLE), getattr(error, "message", error)
        if status == UNREACHABLE:
            raise SandboxUnavailable(f"no Docker engine answers: {said}", remedy=ENGINE_REMEDY) from error
        raise SandboxUnavailable(f"the Docker engine refuses ({status}): {said}", remedy=remedy) from error


class DockerRuntime:
    def __init__(self, engine: Docker, container: DockerContainer) -> None:
        self._engine, self._container = engine, container
        self.reader = asyncio.StreamReader(limit=1 << 20)
        self.stream = container.attach(stdin=True, stdout=True, stderr=True)
        self._errors = b""
        """The last that the runner wrote to standard error."""
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, image: str, limits: SandboxLimits, socket: str | None) -> Self:
        engine = _make_client(socket)
        try:
            with _translate_errors(remedy=f"docker pull {image}, or build it"):
                container = await engine.containers.create(container_config(image, limits))
        except BaseException:
            await asyncio.shield(engine.close())
            raise
        runtime = cls(engine, container)
        try:
            with _translate_errors():
                await runtime.stream.__aenter__()
                runtime._reading = asyncio.create_task(runtime._read())
                await container.start()
            async with asyncio.timeout(START_SECONDS):
                with contextlib.suppress(ConnectionError):  # without python3 it has ended; what it says comes next
                    await runtime.write(compile_script(RUNNER, None))
                await receive(runtime.reader)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            await runtime.close()
            why = runtime._errors.decode(errors="replace").strip() or "it does not say why"
            raise SandboxUnavailable(
                f"no shell starts in a container of {image}: {why}", remedy="the image needs bash and python3"
            ) from error
        except BaseException:
            await asyncio.shield(runtime.close())
            raise
        return runtime

    async def _read(self) -> None:
        try:
            while (message := await self.stream.read_out()) is not None:
                if message.stream == STDOUT:
                    self.reader.feed_data(message.data)
                else:
                    self._errors = (self._errors + message.data)[-4096:]
        finally:
            self.reader.feed_eof()

    async def write(self, content: bytes) -> None:
        try:
            await self.stream.write_in(content)
        except (RuntimeError, AssertionError) as error:  # how the library says that the connection is gone
            raise ConnectionResetError("the container has ended") from error

    def exceeds_memory(self) -> bool:
        return False  # the kernel kills the process that takes most, and the runner goes on

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(AssertionError):  # the connection is gone already
            await self.stream.close()
        try:
            with _translate_errors():
                await self._container.delete(force=True, v=True)
        except SandboxUnavailable as error:
            if getattr(error.__cause__, "status", None) not in GONE:
                raise
        finally:
            await self._engine.close()


def container_config(image: str, limits: SandboxLimits) -> dict[str, Any]:
    return {
        "Image": image,
        "Cmd": ["python3", "-I", "-S", "-c", LOADER, str(len(compile_script(RUNNER, None)))],
        "Entrypoint": [],
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
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
            "Memory": limits.all_memory,
            "MemorySwap": limits.all_memory,
            "PidsLimit": limits.processes + OUR_PROCESSES,
            "CapDrop": ["NET_RAW", "MKNOD"],
            "CapAdd": [GUARD],
            "SecurityOpt": ["no-new-privileges"],
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        },
    }
