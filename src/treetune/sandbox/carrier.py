"""What the runner of a shell runs in, and the stream between both; here bubblewrap, in `docker.py` a container.

    carrier = await BubblewrapCarrier.open(launcher, SandboxLimits())
    await carrier.write(request)
    header, content = await receive(carrier.reader)
    await carrier.close()

Unlike in `bubblewrap.py` the system's folders can be written (see `rootfs.py`): `setup.py` makes the root, outside and
in namespaces of its own, then becomes bubblewrap, whose first process is `runner.py`. What is written is a tmpfs of
`disk_mb`, and gone with the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import secrets
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from treetune.sandbox.launcher import (
    FIRST_UID,
    GUARD,
    LAST_THREAD,
    START_SECONDS,
    Launcher,
    Process,
    Users,
    explain_failures,
    isolate,
    list_rlimits,
    mount_devices,
)
from treetune.sandbox.limits import SandboxLimits, SandboxUnavailable
from treetune.sandbox.rootfs import Root
from treetune.sandbox.seccomp import build_filter
from treetune.sandbox.setup import HOME, RANGE, STAGE

FIRST_RANGE = FIRST_UID + LAST_THREAD
RANGES = 32_000
OUR_PROCESSES = 3
"""Bubblewrap, the runner and the shell are not counted against `processes`."""
MARSHAL = 2
"""A version that every Python reads."""
INODES_PER_MB = 512
LOOK_SECONDS = 0.1
FILE_BYTES = 64 << 20
"""The most that is taken out of a sandbox at once."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", GUARD),
)
"""As in a container; they reach no further than the sandbox's own users."""
RUNNER = ("terminal.py", "runner.py")
FUTURE = "from __future__ import annotations\n"
SETUP_MARK = "treetune-sandbox-setup"
COMPILE = """
import marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER
code = compile(sys.stdin.buffer.read(), sys.argv[1], "exec", dont_inherit=True)
sys.stdout.buffer.write(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


class Carrier(Protocol):
    @property
    def reader(self) -> asyncio.StreamReader:
        """What the runner inside answers."""

    async def write(self, content: bytes) -> None:
        """To the runner inside."""

    def exceeds_memory(self) -> bool:
        """Whether it ended because its processes used more memory than they may."""

    async def close(self) -> None:
        """End everything in it, and wait until it is gone."""


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """One answer of the runner. What is inside a sandbox is not trusted: ValueError for anything else."""
    header = json.loads(await reader.readline() or b"-")
    if not isinstance(header, dict) or not isinstance(size := header.get("size"), int) or not 0 <= size <= FILE_BYTES:
        raise ValueError("no answer of the runner")
    return header, await reader.readexactly(size)


class BubblewrapCarrier:
    def __init__(self, launcher: Launcher, limits: SandboxLimits, rootfs: str | None) -> None:
        # With one process that takes too much only that one ends, where the kernel counts.
        self._process = Process(launcher.hold_memory(limits, ("",), all_at_once=False))
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._exceeded_memory = False
        try:
            self._spawn(launcher, limits, rootfs)
        except BaseException:
            self._process.close()
            raise

    @classmethod
    async def open(cls, launcher: Launcher, limits: SandboxLimits, rootfs: str | None = None) -> Self:
        """Call it from a thread that outlives the sandbox, such as that of the event loop."""
        with explain_failures():
            carrier = cls(launcher, limits, rootfs)
            try:
                await carrier._begin()
            except BaseException:
                await asyncio.shield(carrier.close())
                raise
        return carrier

    def _spawn(self, launcher: Launcher, limits: SandboxLimits, rootfs: str | None) -> None:
        process = self._process
        root = Root.of_host(launcher.interpreter) if rootfs is None else Root.of_folder(rootfs)
        # The folder's Python may be another than ours.
        runner = process.make_file(compile_script(RUNNER, root.python if rootfs is None else None))
        setup = process.make_file(compile_script(("setup.py",), launcher.interpreter.path))
        filter_file = process.make_file(build_filter())
        plan = {
            "base": FIRST_RANGE + RANGE * secrets.randbelow(RANGES) if launcher.becomes_user else None,
            "range": launcher.users is Users.RANGE,
            "entrance": process.memory.entrance,
            **msgspec.structs.asdict(root),
            "tmpfs": f"size={limits.disk_mb << 20},nr_inodes={limits.disk_mb * INODES_PER_MB + 4096},mode=755",
            "rlimits": list_rlimits(limits, OUR_PROCESSES),
            "command": [
                launcher.tools.bwrap,
                *_list_options(launcher, limits, root),
                *(("--seccomp", str(filter_file.fileno())) if build_filter() else ()),
                *("--json-status-fd", str(process.report.fileno())),
                *("--", root.python, "-I", "-S", f"/proc/self/fd/{runner.fileno()}"),
            ],
        }
        plan_file = process.make_file(marshal.dumps(plan, MARSHAL))
        self._errors, complaints = process.make_pipe()
        ours, theirs = socket.socketpair()
        self._socket = process.keep(ours)
        with theirs:
            process.spawn(
                [
                    *(launcher.interpreter.path, "-I", "-S", f"/proc/self/fd/{setup.fileno()}"),
                    *(str(plan_file.fileno()), SETUP_MARK),
                ],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints.fileno(),
                files=[setup, plan_file, filter_file, runner],
            )
        complaints.close()

    async def _begin(self) -> None:
        self.reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=1 << 20)
        try:
            async with asyncio.timeout(START_SECONDS):
                header, _ = await receive(self.reader)
            started = "ready" in header and self._process.find_first()
        except (EOFError, ConnectionError, ValueError, TimeoutError):
            started = False
        if not started:
            self._process.kill()
            os.set_blocking(self._errors.fileno(), False)
            why = (self._errors.read(4096) or b"").decode(errors="replace").strip()
            raise SandboxUnavailable(f"no sandbox with a shell can start: {why or 'it does not say why'}")
        if not self._process.memory.KERNEL_KILLS:
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
            # Before its socket is closed, or the event loop takes the next one with its number for it.
            self._writer.transport.abort()
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    def _end(self) -> None:
        self._process.end()
        self._process.close()


def _list_options(launcher: Launcher, limits: SandboxLimits, root: Root) -> list[str]:
    prefix = launcher.interpreter.prefix if root.whole is None else None
    path = ENVIRONMENT["PATH"] if prefix is None else f"{ENVIRONMENT['PATH']}:{prefix}/bin"
    given = isolate(CAPABILITIES, {**ENVIRONMENT, "PATH": path})
    if root.whole is None:
        given += ["--bind", f"{STAGE}/root", "/"]
    for number, folder in enumerate(root.shown):
        if folder in root.overlaid:
            given += ["--bind", f"{STAGE}/merged{number}", "/" if folder == root.whole else folder]
        else:
            given += ["--ro-bind", f"{STAGE}/shown{number}", folder]
    if root.whole is not None and launcher.users is Users.SINGLE:
        given += ["--bind", HOME, "/root"]
    return [*given, *mount_devices(limits), "--chdir", "/root"]


@cache
def compile_script(names: tuple[str, ...], python: str | None) -> bytes:
    """Scripts of this folder as one, in the bytecode of the Python that runs it: compiling takes longer than starting
    Python. None, or where it cannot be compiled: its source. Python tells the two apart by their first bytes."""
    texts = [Path(__file__).with_name(name).read_text().replace(FUTURE, "") for name in names]
    source = (FUTURE + "\n".join(texts)).encode()
    if python is None:
        return source
    command = [python, "-I", "-S", "-c", COMPILE, names[-1]]
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return source
    return done.stdout or source
