"""Runtimes for the runner of a shell: `BubblewrapRuntime` here, a container in `docker.py`.

    runtime = await BubblewrapRuntime.open(launcher, SandboxLimits())
    await runtime.write(request)
    answer = await receive(runtime.reader)
    await runtime.close()

The first process inside is `runner.py`. There is no package to import from, so several files are sent as one script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from treetune.errors import UsageError
from treetune.sandbox import bubblewrap
from treetune.sandbox.limits import SandboxLimits, SandboxUnavailable
from treetune.sandbox.mount_root import COPY, RANGE, STAGE
from treetune.sandbox.rootfs import Root
from treetune.sandbox.runner import AS_COPY
from treetune.system import time_limit

HERE = Path(__file__).parent
LOOK_SECONDS = 0.1
MARSHAL = 2
"""A marshal version that every Python reads."""
FILE_BYTES = 64 << 20
"""The maximum size in bytes of one answer from a sandbox."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", bubblewrap.GUARD),
)
"""As in a container. They do not reach beyond the sandbox's own users."""
OUR_PROCESSES = 3
"""Bubblewrap, the runner and the shell, which do not count against `processes`."""
FIRST_RANGE, RANGES = bubblewrap.FIRST_UID + bubblewrap.LAST_THREAD, 32_000
INODES_PER_MB = 512
RUNNER = (Path(time_limit.__file__), HERE / "terminal.py", HERE / "runner.py")
MOUNTER = (HERE / "mount_root.py",)
FUTURE = "from __future__ import annotations\n"
COMPILE = """
import marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER
code = compile(sys.stdin.buffer.read(), sys.argv[1], "exec", dont_inherit=True)
sys.stdout.buffer.write(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


class Runtime(Protocol):
    """Runs the runner of a shell, and streams to and from it."""

    reader: asyncio.StreamReader
    """The answers of the runner inside."""

    async def write(self, content: bytes) -> None:
        """Send to the runner inside."""

    def exceeds_memory(self) -> bool:
        """Whether it ended because its processes used too much memory."""

    async def copy(self, limits: SandboxLimits) -> Runtime:
        """Return another runtime with the files that this one has now."""

    async def close(self) -> None:
        """End everything in it, and wait until it is gone."""


@contextlib.asynccontextmanager
async def close_on_failure(runtime: Runtime) -> AsyncIterator[None]:
    """Close a runtime if its start fails or is cancelled."""
    try:
        yield
    except BaseException:
        await asyncio.shield(runtime.close())
        raise


def join_scripts(*files: Path) -> bytes:
    """Join several files into one script, for a place without a package to import from."""
    return (FUTURE + "\n".join(file.read_text().replace(FUTURE, "") for file in files)).encode()


@cache
def compile_script(files: tuple[Path, ...], python: str | None) -> bytes:
    """Join files into one script in the bytecode of the Python that runs it: compiling takes longer than starting
    Python. Without a `python`, or if compiling fails, it returns their source. Python tells the two apart by the first
    bytes."""
    source = join_scripts(*files)
    if python is None:
        return source
    command = [python, "-I", "-S", "-c", COMPILE, files[-1].name]
    return subprocess.run(command, input=source, capture_output=True, check=False).stdout or source


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Read one answer of the runner. The inside of a sandbox is not trusted: anything invalid raises ValueError."""
    header = json.loads(await reader.readline() or b"-")
    if not isinstance(header, dict) or not isinstance(size := header.get("size"), int) or not 0 <= size <= FILE_BYTES:
        raise ValueError("no answer from the runner")
    return header, await reader.readexactly(size)


class BubblewrapRuntime:
    """A bubblewrap sandbox. Unlike in `one_shot.py`, the system's folders are writable: `mount_root.py` builds the
    root, outside and in its own namespaces, then becomes bubblewrap. Changes are in a tmpfs of `disk_mb`."""

    def __init__(self, launcher: bubblewrap.Launcher, limits: SandboxLimits, rootfs: str | None = None) -> None:
        self._launcher, self._rootfs = launcher, rootfs
        # If the kernel counts memory, only the process that takes too much ends.
        self._process = bubblewrap.Process(launcher.hold_memory(limits, ("",), all_at_once=False))
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._exceeded_memory = False
        self._is_copy = False

    @classmethod
    async def open(
        cls,
        launcher: bubblewrap.Launcher,
        limits: SandboxLimits,
        rootfs: str | None = None,
        original: bubblewrap.Process | None = None,
    ) -> Self:
        """Open it from a thread that outlives the sandbox, such as the event loop's. `original` is the sandbox that it
        copies."""
        with bubblewrap.explain_failures():
            runtime = cls(launcher, limits, rootfs)
            async with close_on_failure(runtime):
                runtime._spawn(limits, original)
                await runtime._begin()
        return runtime

    async def copy(self, limits: SandboxLimits) -> Self:
        if self._is_copy:
            raise UsageError("a copy cannot be copied", remedy="copy the original again")
        return await self.open(self._launcher, limits, self._rootfs, self._process)

    def _spawn(self, limits: SandboxLimits, original: bubblewrap.Process | None = None) -> None:
        process, launcher, rootfs = self._process, self._launcher, self._rootfs
        self._is_copy = original is not None
        root = Root.of_host(launcher.tools["python3"]) if rootfs is None else Root.of_folder(rootfs)
        # The folder's Python may have a different version from ours.
        runner = process.make_file(compile_script(RUNNER, root.python if rootfs is None else None))
        mounter = process.make_file(compile_script(MOUNTER, launcher.tools["python3"]))
        plan = {
            "base": FIRST_RANGE + RANGE * secrets.randbelow(RANGES) if launcher.becomes_user else None,
            "range": launcher.own_users,
            "original": process.give_monitor(original) if original is not None else None,
            "entrance": process.memory.entrance,
            **msgspec.structs.asdict(root),
            "bound": [host for host, _ in limits.shown],
            "tmpfs": f"size={limits.disk_mb << 20},nr_inodes={limits.disk_mb * INODES_PER_MB + 4096},mode=755",
            "rlimits": bubblewrap.list_rlimits(limits, OUR_PROCESSES),
            "command": [
                launcher.tools["bwrap"],
                *_list_options(launcher, limits, root, COPY if self._is_copy else STAGE),
                *process.list_options(),
                *("--", root.python, "-I", "-S", f"/proc/self/fd/{runner}", *([AS_COPY] if self._is_copy else [])),
            ],
        }
        plan_file = process.make_file(marshal.dumps(plan, MARSHAL))
        self._errors, complaints = process.make_pipe()
        self._socket, theirs = map(process.keep, socket.socketpair())
        python = [launcher.tools["python3"], "-I", "-S", f"/proc/self/fd/{mounter}"]
        process.spawn([*python, str(plan_file)], theirs, theirs, complaints)

    async def _begin(self) -> None:
        self.reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        try:
            async with asyncio.timeout(bubblewrap.START_SECONDS):
                header, _ = await receive(self.reader)
            started = "ready" in header and self._process.find_first()
        except (EOFError, ConnectionError, ValueError, TimeoutError):
            started = False
        if not started:
            self._process.kill()
            os.set_blocking(self._errors.fileno(), False)
            why = (self._errors.read(4096) or b"").decode(errors="replace").strip()
            raise SandboxUnavailable(f"no sandbox with a shell can start: {why or 'no reason given'}")
        if self._process.memory.entrance is None:
            self._watching = asyncio.create_task(self._watch_memory())

    async def _watch_memory(self) -> None:
        while not self._exceeded_memory:
            await asyncio.sleep(LOOK_SECONDS)
            self._exceeded_memory = self._process.memory.is_exceeded()
        self._process.kill()

    async def write(self, content: bytes) -> None:
        assert self._writer is not None
        self._writer.write(content)
        await self._writer.drain()

    def exceeds_memory(self) -> bool:
        return self._exceeded_memory or self._process.memory.is_exceeded()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._writer is not None:
            # This must happen before its socket is closed: otherwise the event loop confuses it with the next socket of
            # the same number.
            self._writer.transport.abort()
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        self._process.end()
        self._process.close()


def _list_options(launcher: bubblewrap.Launcher, limits: SandboxLimits, root: Root, stage: str) -> list[str]:
    given = bubblewrap.isolate(CAPABILITIES, ENVIRONMENT)
    if root.whole is None:
        given += ["--bind", f"{stage}/root", "/"]
    for number, folder in enumerate(root.shown):
        given += ["--bind", f"{stage}/merged{number}", "/" if folder == root.whole else folder]
    if root.whole is not None and not launcher.own_users:
        given += ["--bind", f"{stage}/home", "/root"]
    for number, (_, inside) in enumerate(limits.shown):
        given += ["--ro-bind", f"{STAGE}/bound{number}", inside]
    return [*given, *bubblewrap.mount_devices(limits), "--chdir", "/root"]
