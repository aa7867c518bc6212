"""A sandbox with a shell that lives on: commands share its files, variables, folder and background processes.

    async with await Shell.open(SandboxLimits(seconds=5)) as shell:
        await shell.execute("cd /var && x=3")
        result = await shell.execute("echo $x; pwd")
        result.text, result.exit_code    # "3\\n/var\\n", 0

Whatever commands do is a `ShellResult`. After `close` nothing of the sandbox is left; if this process is killed, its
sandboxes end too. A shell belongs to the event loop it was opened in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

import msgspec

from treetune.errors import TreetuneError, UsageError
from treetune.sandbox.diagnose import explained
from treetune.sandbox.execution import GONE_SECONDS, KILLED
from treetune.sandbox.filesystem import is_passable
from treetune.sandbox.protocol import DEFAULT_LIMITS, Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.shell_root import folder_root
from treetune.sandbox.shell_start import MARSHAL, Start, Started, spawn
from treetune.sandbox.streams import readable

START_SECONDS = 60.0
GRACE_SECONDS = 15.0
"""For the runner inside to end a command that does not end; then all of the sandbox ends."""
LOOK_SECONDS = 0.1
FILE_BYTES = 64 << 20
"""The most that is taken out of a sandbox at once."""
Watch: TypeAlias = Callable[[bytes], object]
PROGRAMS = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    *("/lib", "/lib64", "/usr/lib64", "/usr/lib/lib*", "/usr/lib/ld*", "/usr/lib/x86_64*", "/usr/lib/aarch64*"),
    *("/usr/lib/python3*", "/usr/local/lib/python3*", "/etc/python3*", "/etc/perl", "/etc/ld.so*"),
)
"""What shells, the usual tools and Python consist of; a star stands for the rest of a name."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class SandboxGone(TreetuneError):
    """A sandbox that has ended was asked for something."""


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one command in the shell ended."""

    exit_code: int | None
    """As in a shell; None where its time was over."""
    output: bytes = b""
    """What the terminal showed; of too much the beginning and the end."""
    omitted: int = 0
    """Bytes that were left out in the middle."""
    ended: Ended
    """`memory` and `killed`: the sandbox has ended with it."""
    restarted: bool = False
    """The shell itself ended (`exit`, `exec`, a deadline it would not heed) and was started anew: files and background
    processes are still there, variables and the current folder are not."""
    seconds: float

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Carrier(Protocol):
    """What a sandbox runs in: bubblewrap, or a container of an engine."""

    @property
    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To and from the runner inside."""

    def passed_memory(self) -> bool:
        """Whether its processes used more memory than they may."""

    @property
    def kernel_kills(self) -> bool:
        """Whether the kernel ends what takes too much memory, so that nobody else has to."""

    def kill(self) -> None:
        """End everything in it, without waiting."""

    async def close(self) -> None:
        """End everything in it, and wait until it is gone."""


class Shell:
    def __init__(self, carrier: Carrier, limits: SandboxLimits) -> None:
        self._carrier, self.limits = carrier, limits
        self._reader, self._writer = carrier.streams
        self._lock = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._sealed: list[str] = []
        self._ended: Ended | None = None
        self._watch = None if carrier.kernel_kills else asyncio.create_task(self._watch_memory())

    @classmethod
    async def open(
        cls, limits: SandboxLimits = DEFAULT_LIMITS, *, start: Start | None = None, rootfs: str | None = None
    ) -> Self:
        """A fresh sandbox in bubblewrap, or `SandboxUnavailable` with cause and remedy. `rootfs`: a folder with a
        system of its own, as `treetune sandbox build` makes it."""
        if rootfs is not None:
            folder_root(os.path.abspath(rootfs))  # a folder that is none is told before the machine is looked at
        if start is None:
            from treetune.sandbox.shell_probe import require_shell

            start = await require_shell()
        if rootfs is not None:
            start = msgspec.structs.replace(start, rootfs=os.path.abspath(rootfs))
        return cls(await BubblewrapCarrier.open(start, limits), limits)

    @property
    def alive(self) -> bool:
        return self._ended is None and self._closing is None

    async def execute(self, command: str, *, seconds: float | None = None, watch: Watch | None = None) -> ShellResult:
        """Run a command in the shell, as if it were typed there. `watch` is given what it writes at once, as far as
        `output_kb` goes."""
        _check(command)
        began = time.monotonic()
        seconds = seconds or self.limits.seconds
        limit = self.limits.output_kb << 10
        request = {"kind": "execute", "seconds": seconds, "output_bytes": limit, "watched": watch is not None}
        try:
            said, output = await self._ask(request, os.fsencode(command), seconds, watch)
        except _Ended as gone:
            return ShellResult(exit_code=KILLED, ended=gone.how, seconds=time.monotonic() - began)
        return ShellResult(
            exit_code=said["exit_code"],
            output=output,
            omitted=max(0, said["written"] - len(output)),
            ended=Ended(said["ended"]),
            restarted=said["restarted"],
            seconds=time.monotonic() - began,
        )

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        seconds: float | None = None,
    ) -> Result:
        """Run a program beside the shell, untouched by its variables and aliases; what it leaves in the background
        lives on."""
        for text in command:
            _check(text)
        seconds = seconds or self.limits.seconds
        began = time.monotonic()
        limit = self.limits.output_kb << 10
        request = {
            "kind": "run",
            "command": list(command),
            "cwd": cwd,
            "env": dict(env),
            "seconds": seconds,
            "output_bytes": limit,
        }
        try:
            said, output = await self._ask(request, stdin, seconds)
        except _Ended as gone:
            spent = time.monotonic() - began
            return Result(exit_code=KILLED, stdout=b"", stderr=b"", ended=gone.how, seconds=spent)
        code = said["exit_code"]
        return Result(
            exit_code=KILLED if code is None else code,
            stdout=output[: said["stdout"]],
            stderr=output[said["stdout"] :],
            stdout_truncated=said["written"] > limit,
            stderr_truncated=said["error_written"] > limit,
            ended=Ended(said["ended"]),
            seconds=said["seconds"],
        )

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file, folders above it included."""
        await self._file({"kind": "put", "path": _absolute(path), "mode": mode}, content)

    async def get(self, path: str) -> bytes:
        """Read a file, up to 64 MB of it."""
        return await self._file({"kind": "get", "path": _absolute(path), "limit": FILE_BYTES}, b"")

    async def seal(self, paths: Sequence[str] = PROGRAMS) -> None:
        """Take note of the files at and below the paths, for `broken`. By default what programs consist of."""
        self._sealed = list(paths)
        await self._file({"kind": "seal", "paths": self._sealed}, b"")

    async def broken(self) -> list[str]:
        """Of what was sealed: files that were changed or removed since then, and new ones in their way. Programs with
        names of their own may be added."""
        found = await self._file({"kind": "broken", "paths": self._sealed}, b"")
        return [os.fsdecode(path) for path in found.split(b"\0") if path]

    async def close(self) -> None:
        """End everything in the sandbox and wait until it is gone. May be called again."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._carrier.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _file(self, request: dict[str, Any], content: bytes) -> bytes:
        try:
            said, read = await self._ask(request, content, START_SECONDS)
        except _Ended:
            raise SandboxGone("the sandbox has ended", remedy="open another") from None
        if said["error"] is not None:
            raise UsageError(f"no file can be had in the sandbox: {said['error']}", remedy="look at its path")
        return read

    async def _ask(
        self, request: dict[str, Any], content: bytes, seconds: float, watch: Watch | None = None
    ) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    header = marshal.dumps({**request, "size": len(content)}, MARSHAL)
                    self._writer.write(len(header).to_bytes(4, "big") + header + content)
                    await self._writer.drain()
                    while "partial" in (answer := await receive(self._reader))[0]:
                        if watch is not None:
                            watch(answer[1])
                    return answer
            except (OSError, EOFError, ValueError, TimeoutError):
                if self._ended is None:
                    self._ended = Ended.MEMORY if self._carrier.passed_memory() else Ended.KILLED
                await self.close()
                raise _Ended(self._ended) from None
            except asyncio.CancelledError:
                # The answer would be taken for that to the next request.
                self._ended = Ended.KILLED
                await self.close()
                raise

    async def _watch_memory(self) -> None:
        """Where the kernel does not: ends the sandbox when its processes together take too much."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._carrier.passed_memory():
                self._ended = Ended.MEMORY
                return self._carrier.kill()


class _Ended(Exception):
    def __init__(self, how: Ended) -> None:
        self.how = how


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """One answer of the runner. What is inside a sandbox is not trusted: ValueError for anything else."""
    said = json.loads(await reader.readline() or b"-")
    if not isinstance(said, dict) or not isinstance(size := said.get("size"), int) or not 0 <= size <= FILE_BYTES:
        raise ValueError("no answer of the runner")
    return said, await reader.readexactly(size)


class BubblewrapCarrier:
    def __init__(self, started: Started) -> None:
        self._started = started
        self._first: int | None = None
        """A pidfd of the sandbox's first process: when it is readable, every process inside is gone."""
        self._transport: asyncio.WriteTransport | None = None
        self.kernel_kills = started.memory.KERNEL_KILLS

    @classmethod
    async def open(cls, start: Start, limits: SandboxLimits) -> Self:
        try:
            carrier = cls(spawn(start, limits))
        except OSError as error:
            raise explained(SandboxUnavailable(f"a sandbox could not be set up: {error}")) from error
        try:
            await carrier._begin()
        except BaseException:
            await asyncio.shield(carrier.close())
            raise
        return carrier

    async def _begin(self) -> None:
        self.streams = await asyncio.open_unix_connection(sock=self._started.socket, limit=1 << 20)
        self._transport = self.streams[1].transport
        try:
            async with asyncio.timeout(START_SECONDS):
                said, _ = await receive(self.streams[0])
                self._find_first()
        except (OSError, EOFError, ValueError, TimeoutError):
            said = {}
        if "ready" not in said or self._first is None:
            self._started.process.kill()
            os.set_blocking(self._started.errors, False)
            with contextlib.suppress(OSError):
                why = os.read(self._started.errors, 4096).decode(errors="replace").strip()
                raise explained(
                    SandboxUnavailable(f"no sandbox with a shell can start: {why or 'it does not say why'}")
                )

    def _find_first(self) -> None:
        said = b""
        while b"\n" not in said and readable(self._started.status, START_SECONDS):
            said += (part := os.read(self._started.status, 4096))
            if not part:
                break
        pid = json.loads(said.partition(b"\n")[0])["child-pid"]
        self._first = os.pidfd_open(pid)
        if self._started.memory.entrance is None:
            self._started.memory.attach(pid)

    def passed_memory(self) -> bool:
        return self._started.memory.passed()

    def kill(self) -> None:
        self._started.process.kill()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def close(self) -> None:
        if self._transport is not None:
            # Before its socket is closed, or the event loop takes the next one with its number for it.
            self._transport.abort()
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    def _end(self) -> None:
        if self._first is None:
            # Killed in the middle of its start, bubblewrap would leave processes that wait for it for ever.
            with contextlib.suppress(OSError, ValueError):
                self._find_first()
        self.kill()
        if self._first is not None:
            readable(self._first, GONE_SECONDS)
            os.close(self._first)
            self._first = None
        self._started.process.wait()
        self._started.memory.close()
        with contextlib.suppress(OSError):
            self._started.close()


def _check(text: str) -> None:
    if not is_passable(text):
        raise UsageError(f"{text[:80]!r} is no command", remedy="pass text without NUL")


def _absolute(path: str) -> str:
    if not is_passable(path) or not path.startswith("/"):
        raise UsageError(f"{path!r} is no path in a sandbox", remedy="give a path from / on")
    return path
