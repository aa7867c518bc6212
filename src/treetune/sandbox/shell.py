"""A sandbox with a shell that lives on: commands share its files, variables, folder and background processes.

    async with await Shell.open(SandboxLimits(seconds=5)) as shell:
        await shell.execute("cd /var && x=3")
        result = await shell.execute("echo $x; pwd")
        result.text, result.exit_code    # "3\\n/var\\n", 0

Whatever commands do is a `ShellResult`. After `close` nothing of the sandbox is left; if this process is killed, its
sandboxes end too. A shell belongs to the event loop it was opened in. A `Machine` says what system it is on; a
`ShellPool` starts shells before they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from treetune.errors import TreetuneError, UsageError
from treetune.sandbox.carrier import FILE_BYTES, MARSHAL, BubblewrapCarrier, Carrier, receive
from treetune.sandbox.launcher import START_SECONDS, Interpreter, Launcher, is_passable
from treetune.sandbox.limits import DEFAULT_LIMITS, KILLED, Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.probe import require
from treetune.sandbox.rootfs import Root

GRACE_SECONDS = 15.0
"""For the runner inside to end a command that does not end; then all of the sandbox ends."""
Watch: TypeAlias = Callable[[bytes], object]
PROGRAMS = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    *("/lib", "/lib64", "/usr/lib64", "/usr/lib/lib*", "/usr/lib/ld*", "/usr/lib/x86_64*", "/usr/lib/aarch64*"),
    *("/usr/lib/python3*", "/usr/local/lib/python3*", "/etc/python3*", "/etc/perl", "/etc/ld.so*"),
)
"""What shells, the usual tools and Python consist of; a star stands for the rest of a name."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
POOL_SIZE = 2


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


class Shell:
    def __init__(self, carrier: Carrier, limits: SandboxLimits) -> None:
        self._carrier, self.limits = carrier, limits
        self._lock = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._ended: Ended | None = None

    @classmethod
    async def open(
        cls, limits: SandboxLimits = DEFAULT_LIMITS, *, launcher: Launcher | None = None, rootfs: str | None = None
    ) -> Self:
        """A fresh sandbox in bubblewrap, or `SandboxUnavailable` with cause and remedy. `rootfs`: a folder with a
        system of its own, as `treetune sandbox build` makes it."""
        if rootfs is not None:
            rootfs = os.path.abspath(rootfs)
            Root.of_folder(rootfs)  # a folder that is none is told before the machine is looked at
        if launcher is None:
            launcher = await asyncio.to_thread(require, shell=True)
        return cls(await BubblewrapCarrier.open(launcher, limits, rootfs), limits)

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
            header, output = await self._ask(request, os.fsencode(command), seconds, watch)
        except _SandboxEnded as gone:
            return ShellResult(exit_code=KILLED, ended=gone.how, seconds=time.monotonic() - began)
        return ShellResult(
            exit_code=header["exit_code"],
            output=output,
            omitted=max(0, header["written"] - len(output)),
            ended=Ended(header["ended"]),
            restarted=header["restarted"],
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
            header, output = await self._ask(request, stdin, seconds)
        except _SandboxEnded as gone:
            spent = time.monotonic() - began
            return Result(exit_code=KILLED, stdout=b"", stderr=b"", ended=gone.how, seconds=spent)
        code = header["exit_code"]
        return Result(
            exit_code=KILLED if code is None else code,
            stdout=output[: header["stdout"]],
            stderr=output[header["stdout"] :],
            stdout_truncated=header["written"] > limit,
            stderr_truncated=header["error_written"] > limit,
            omitted=max(0, header["written"] - header["stdout"]),
            ended=Ended(header["ended"]),
            seconds=header["seconds"],
        )

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file, folders above it included."""
        await self._ask_file({"kind": "put", "path": _check_path(path), "mode": mode}, content)

    async def get(self, path: str) -> bytes:
        """Read a file, up to 64 MB of it."""
        return await self._ask_file({"kind": "get", "path": _check_path(path), "limit": FILE_BYTES})

    async def record_files(self, paths: Sequence[str] = PROGRAMS) -> None:
        """Take note of the files at and below the paths, for `find_tampered`. By default what programs consist of."""
        await self._ask_file({"kind": "record", "paths": list(paths)})

    async def find_tampered(self) -> list[str]:
        """Of what was recorded: files that were changed or removed since then, and new ones in their way. Programs with
        names of their own may be added."""
        found = await self._ask_file({"kind": "tampered"})
        return [os.fsdecode(path) for path in found.split(b"\0") if path]

    async def kill_processes(self) -> None:
        """End every process in the sandbox, the shell among them. Files stay, and the next command has a new shell."""
        await self._ask_file({"kind": "kill"})

    async def close(self) -> None:
        """End everything in the sandbox and wait until it is gone. May be called again."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._carrier.close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask_file(self, request: dict[str, Any], content: bytes = b"") -> bytes:
        try:
            header, read = await self._ask(request, content, START_SECONDS)
        except _SandboxEnded:
            raise SandboxGone("the sandbox has ended", remedy="open another") from None
        if header["error"] is not None:
            raise UsageError(f"no file can be had in the sandbox: {header['error']}", remedy="look at its path")
        return read

    async def _ask(
        self, request: dict[str, Any], content: bytes, seconds: float, watch: Watch | None = None
    ) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    packed = marshal.dumps({**request, "size": len(content)}, MARSHAL)
                    await self._carrier.write(len(packed).to_bytes(4, "big") + packed + content)
                    while "partial" in (answer := await receive(self._carrier.reader))[0]:
                        if watch is not None:
                            watch(answer[1])
                    return answer
            except (OSError, EOFError, ValueError, TimeoutError):
                if self._ended is None:
                    self._ended = Ended.MEMORY if self._carrier.exceeds_memory() else Ended.KILLED
                await self.close()
                raise _SandboxEnded(self._ended) from None
            except asyncio.CancelledError:
                # The answer would be taken for that to the next request.
                self._ended = Ended.KILLED
                await self.close()
                raise


class _SandboxEnded(Exception):
    def __init__(self, how: Ended) -> None:
        self.how = how


def _check(text: str) -> None:
    if not is_passable(text):
        raise UsageError(f"{text[:80]!r} is no command", remedy="pass text without NUL")


def _check_path(path: str) -> str:
    if not is_passable(path) or not path.startswith("/"):
        raise UsageError(f"{path!r} is no path in a sandbox", remedy="give a path from / on")
    return path


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The host's own system, unless it says otherwise."""

    rootfs: str | None = None
    """A folder with a system of its own, in the place of the host's."""
    image: str | None = None
    """An image of a Docker engine; then there is no bubblewrap."""

    async def open(self, limits: SandboxLimits) -> Shell:
        if self.image is not None:
            from treetune.sandbox.docker import open_shell

            return await open_shell(self.image, limits)
        return await Shell.open(limits, rootfs=self.rootfs)

    @property
    def python(self) -> str:
        """The Python inside, for commands that want one."""
        return Interpreter.find().path if self.image is None and self.rootfs is None else "python3"


HOST = Machine()


class ShellPool:
    def __init__(
        self, limits: SandboxLimits = DEFAULT_LIMITS, machine: Machine = HOST, *, size: int = POOL_SIZE
    ) -> None:
        self._limits, self._machine, self._size = limits, machine, size
        self._ready: deque[Shell] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self.keeper: AsyncGenerator[None, None] | None = None

    async def take(self) -> Shell:
        """A fresh shell; the caller closes it."""
        shell = None
        while self._ready and (shell is None or not shell.alive):
            shell = self._ready.popleft()
        self._refill()
        if shell is not None and shell.alive:
            return shell
        return await self._machine.open(self._limits)

    async def fill(self) -> None:
        """Wait until as many as wanted are ready."""
        self._refill()
        while self._starting:
            await asyncio.gather(*self._starting)

    async def close(self) -> None:
        self._closed = True
        for starting in list(self._starting):
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(shell.close() for shell in self._ready))
        self._ready.clear()

    def _refill(self) -> None:
        while not self._closed and len(self._ready) + len(self._starting) < self._size:
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        # Where none can start, whoever takes one is told so.
        with contextlib.suppress(SandboxUnavailable):
            shell = await self._machine.open(self._limits)
            if self._closed:
                await shell.close()
            else:
                self._ready.append(shell)


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[SandboxLimits, Machine], ShellPool]] = (
    WeakKeyDictionary()
)


def share_pool(limits: SandboxLimits, machine: Machine = HOST) -> ShellPool:
    """The pool of this event loop for such limits and such a machine; it is closed when the loop ends."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    if (pool := pools.get((limits, machine))) is None:
        pool = pools[limits, machine] = ShellPool(limits, machine)
        pool.keeper = _close_at_end(pool)
        with contextlib.suppress(StopIteration):
            pool.keeper.__anext__().send(None)
    return pool


async def _close_at_end(pool: ShellPool) -> AsyncGenerator[None, None]:
    """Once begun, it is known to the event loop, which ends such generators at its own end."""
    try:
        yield
    finally:
        await pool.close()
