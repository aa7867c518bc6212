"""Shells in containers of a Docker engine, for tasks that have their own image.

    shell = await open_shell("python:3.12-slim", SandboxLimits(memory_mb=1024))

The same runner as in bubblewrap runs inside, so shells behave the same; the image needs `bash` and `python3`. There is
no network and no extra privilege. `close` removes the container; so does the end of the process that opened it. The
engine limits memory and processes, but not `disk_mb`. A copy is a container of an image that the engine makes from the
original (`docker commit`) and removes with the copy. This needs the package `aiodocker`, the extra `docker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from treetune.sandbox.bubblewrap import GUARD, START_SECONDS
from treetune.sandbox.limits import DEFAULT_LIMITS, SandboxLimits, SandboxUnavailable
from treetune.sandbox.runner import AS_COPY
from treetune.sandbox.runtime import ENVIRONMENT, OUR_PROCESSES, RUNNER, close_on_failure, compile_script, receive
from treetune.sandbox.shell import Shell

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

LOADER = "import sys; exec(open(0, 'rb', closefd=False).read(int(sys.argv[1])))"
"""Reads the runner from standard input and runs it. The argument is its size; the rest of the input is for the
runner."""
COPIES = "treetune-copy"
"""The repository name for images of copies."""
STDOUT = 1
UNREACHABLE = 900
"""The library's status for an engine that does not respond."""
GONE = (404, 409)
"""The statuses of objects that the engine has removed or is about to remove."""
ENGINE_REMEDY = "start the engine, or name its socket with DOCKER_HOST=unix:///path; check that this user may open it"


async def open_shell(image: str, limits: SandboxLimits = DEFAULT_LIMITS) -> Shell:
    """Open a fresh container of an image. Raises `SandboxUnavailable` with cause and remedy."""
    runtime = DockerRuntime()
    async with close_on_failure(runtime):
        await runtime.begin(image, limits)
    return Shell(runtime, limits)


async def describe_engine() -> str:
    async with connect() as engine:
        version = await engine.version()
    return f"engine {version.get('Version')}, API {version.get('ApiVersion')}"


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[Docker]:
    """Connect to the engine at DOCKER_HOST or in its usual place."""
    try:
        import aiodocker
    except ImportError:
        raise SandboxUnavailable("aiodocker is not installed", remedy="pip install 'treetune[docker]'") from None
    with _translate_errors():
        async with aiodocker.Docker(url=os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")) as engine:
            yield engine


@contextlib.contextmanager
def _translate_errors(remedy: str | None = None) -> Iterator[None]:
    import aiodocker

    try:
        yield
    except (aiodocker.DockerError, OSError, ValueError) as error:
        status, said = getattr(error, "status", UNREACHABLE), getattr(error, "message", error)
        if status == UNREACHABLE:
            raise SandboxUnavailable(f"no Docker engine answers: {said}", remedy=ENGINE_REMEDY) from error
        raise SandboxUnavailable(f"the Docker engine refused the request ({status}): {said}", remedy=remedy) from error


class DockerRuntime:
    def __init__(self) -> None:
        self._held = contextlib.AsyncExitStack()
        self.reader = asyncio.StreamReader(limit=1 << 20)
        self._errors = b""
        """The end of what the runner wrote to standard error."""

    async def copy(self, limits: SandboxLimits) -> DockerRuntime:
        copied = DockerRuntime()
        async with close_on_failure(copied):
            await copied.begin(await copied._commit(self.container), limits, AS_COPY)
        return copied

    async def _commit(self, original: DockerContainer) -> str:
        """Make an image of a container's files, which is removed together with this container; return its name."""
        engine = await self._held.enter_async_context(connect())
        name = f"{COPIES}:{secrets.token_hex(8)}"
        commit = original.commit(repository=COPIES, tag=name.partition(":")[2], changes="LABEL treetune=copy")
        # The engine makes the image even after a cancellation, so wait for it before the image is removed.
        committing = asyncio.ensure_future(asyncio.wait_for(commit, START_SECONDS))
        self._held.push_async_callback(_remove_image, engine, name, committing)
        with _translate_errors():
            await asyncio.shield(committing)
        return name

    async def begin(self, image: str, limits: SandboxLimits, *arguments: str) -> None:
        """Start it. If that fails, `close` removes what was created. `arguments` are passed to the runner."""
        engine = await self._held.enter_async_context(connect())
        with _translate_errors(remedy=f"docker pull {image}, or build it; it needs bash and python3"):
            container = self.container = await engine.containers.create(container_config(image, limits, *arguments))
            self._held.push_async_callback(_remove, container)
            self.stream = container.attach(stdin=True, stdout=True, stderr=True)
            self._held.push_async_callback(self._disconnect)
            await self.stream.__aenter__()
            self._held.callback(asyncio.create_task(self._read()).cancel)
            await container.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                with contextlib.suppress(ConnectionError):  # without python3 it has ended; its error is read next
                    await self.write(compile_script(RUNNER, None))
                await receive(self.reader)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            said = self._errors.decode(errors="replace").strip() or "it gave no reason"
            why = f"no shell starts in a container of {image}: {said}"
            raise SandboxUnavailable(why, remedy="the image needs bash and python3") from error

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
        except (RuntimeError, AssertionError) as error:  # how the library reports a lost connection
            raise ConnectionResetError("the container has ended") from error

    def exceeds_memory(self) -> bool:
        return False  # the kernel kills the largest process, and the runner continues

    async def close(self) -> None:
        await self._held.aclose()

    async def _disconnect(self) -> None:
        with contextlib.suppress(AssertionError):  # the connection is already gone
            await self.stream.close()


async def _remove(container: DockerContainer) -> None:
    with _translate_removal():
        await container.delete(force=True, v=True)


async def _remove_image(engine: Docker, name: str, committing: asyncio.Future[Any]) -> None:
    await asyncio.wait([committing])
    with _translate_removal():
        await engine.images.delete(name, force=True)


@contextlib.contextmanager
def _translate_removal() -> Iterator[None]:
    try:
        with _translate_errors():
            yield
    except SandboxUnavailable as error:
        if getattr(error.__cause__, "status", None) not in GONE:
            raise


def container_config(image: str, limits: SandboxLimits, *arguments: str) -> dict[str, Any]:
    return {
        "Image": image,
        "Cmd": ["python3", "-I", "-S", "-c", LOADER, str(len(compile_script(RUNNER, None))), *arguments],
        "Entrypoint": [],
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Tty": False,
        "OpenStdin": True,
        # Closing the client ends standard input, and with it the runner.
        "StdinOnce": True,
        **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "NetworkDisabled"), True),
        "Labels": {"treetune": "shell"},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none",
            "Binds": [f"{host}:{inside}:ro" for host, inside in limits.shown],
            "Memory": limits.all_memory,
            "MemorySwap": limits.all_memory,
            "PidsLimit": limits.processes + OUR_PROCESSES,
            "CapDrop": ["NET_RAW", "MKNOD"],
            "CapAdd": [GUARD],
            "SecurityOpt": ["no-new-privileges"],
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        },
    }
