"""A sandbox with a persistent shell: commands share its files, variables, folder and background processes.

    async with await Shell.open(SandboxLimits(seconds=5)) as shell:
        await shell.execute("cd /var && x=3")
        result = await shell.execute("echo $x; pwd")
        result.text, result.exit_code    # "3\\n/var\\n", 0

However a command ends, a `Result` is returned. After `close`, nothing of the sandbox is left; if this process is
killed, its sandboxes end too. A shell belongs to the event loop in which it was opened.

The first process inside is `runner.py`. It runs in a `Runtime`: bubblewrap, or a Docker container.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

from treetune.errors import TreetuneError, UsageError
from treetune.sandbox import bubblewrap
from treetune.sandbox.limits import DEFAULT_LIMITS, KILLED, Ended, Result, SandboxLimits
from treetune.sandbox.probe import require
from treetune.sandbox.rootfs import Root
from treetune.sandbox.runtime import FILE_BYTES, MARSHAL, BubblewrapRuntime, Runtime, receive
from treetune.system.time_limit import CLOCK_FACTOR

Watch: TypeAlias = Callable[[bytes], object]
GRACE_SECONDS = 15.0
"""Extra seconds for the runner inside to end a command; after that the whole sandbox ends."""


class SandboxGone(TreetuneError, code="sandbox-ended"):
    """Raised if a sandbox that has ended is used."""


class Shell:
    def __init__(self, runtime: Runtime, limits: SandboxLimits) -> None:
        self.runtime, self.limits = runtime, limits
        self._lock = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._ended: Ended | None = None

    @classmethod
    async def open(cls, limits: SandboxLimits = DEFAULT_LIMITS, *, rootfs: str | None = None) -> Self:
        """Open a fresh sandbox in bubblewrap. Raises `SandboxUnavailable` with cause and remedy. `rootfs`: a folder
        with its own system, as built by `treetune sandbox build`."""
        if rootfs is not None:
            rootfs = os.path.abspath(rootfs)
            Root.of_folder(rootfs)  # a wrong folder fails before the machine is tried
        launcher = await asyncio.to_thread(require, shell=True)
        return cls(await BubblewrapRuntime.open(launcher, limits, rootfs), limits)

    @property
    def alive(self) -> bool:
        return self._ended is None and self._closing is None

    async def execute(self, command: str, *, seconds: float | None = None, watch: Watch | None = None) -> Result:
        """Run a command in the shell, as if it were typed there. `watch` gets its output immediately, up to
        `output_kb`."""
        _check(command)
        request = {"kind": "execute", "watched": watch is not None}
        return await self._ask_command(request, os.fsencode(command), seconds, watch)

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Result:
        """Run a program outside the shell, without its variables and aliases. Its background processes keep running."""
        for text in command:
            _check(text)
        request = {"kind": "run", "command": list(command), "cwd": cwd, "env": dict(env or {})}
        return await self._ask_command(request, stdin, seconds)

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file, creating parent folders."""
        await self._ask_file({"kind": "put", "path": _check_path(path), "mode": mode}, content)

    async def get(self, path: str) -> bytes:
        """Read a file, up to 64 MB of it."""
        return await self._ask_file({"kind": "get", "path": _check_path(path), "limit": FILE_BYTES})

    async def record_files(self) -> None:
        """Record the files of programs, for `find_tampered`."""
        await self._ask_file({"kind": "record"})

    async def find_tampered(self) -> list[str]:
        """Return recorded files that were changed or removed since, and new files that would be found before them. New
        programs with other names are allowed."""
        found = await self._ask_file({"kind": "tampered"})
        return [os.fsdecode(path) for path in found.split(b"\0") if path]

    async def list_processes(self) -> list[str]:
        """Return the commands that run in the sandbox, without our own and the shell."""
        found = await self._ask_file({"kind": "processes"})
        return [os.fsdecode(command) for command in found.split(b"\0") if command]

    async def kill_processes(self) -> None:
        """End every process in the sandbox, including the shell. Files stay, and the next command gets a new shell."""
        await self._ask_file({"kind": "kill"})

    async def copy(self) -> Shell:
        """Return another sandbox with this one's current files, but without its processes. The caller closes it."""
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            return Shell(await self.runtime.copy(self.limits), self.limits)

    async def close(self) -> None:
        """End everything in the sandbox and wait until it is gone. May be called again."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.runtime.close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask_command(
        self, request: dict[str, Any], content: bytes, seconds: float | None, watch: Watch | None = None
    ) -> Result:
        began, seconds = time.monotonic(), seconds or self.limits.seconds
        request |= {"seconds": seconds, "output_bytes": self.limits.output_kb << 10}
        header, output = await self._ask(request, content, CLOCK_FACTOR * seconds, watch)
        if self._ended is not None:
            return Result(exit_code=KILLED, ended=self._ended, seconds=time.monotonic() - began)
        code, split = header["exit_code"], header["stdout"]
        return Result(
            exit_code=KILLED if code is None else code,
            stdout=output[:split],
            stderr=output[split:],
            omitted=max(0, header["written"] - split),
            ended=Ended.TIMEOUT if code is None else Ended.COMPLETED,
            restarted=header["restarted"],
            seconds=header["seconds"],
        )

    async def _ask_file(self, request: dict[str, Any], content: bytes = b"") -> bytes:
        header, read = await self._ask(request, content, bubblewrap.START_SECONDS)
        if self._ended is not None:
            raise SandboxGone("the sandbox has ended", remedy="open another")
        if header["failed"]:
            why = read.decode(errors="replace")
            raise UsageError(f"cannot open a file in the sandbox: {why}", remedy="check its path")
        return read

    async def _ask(
        self, request: dict[str, Any], content: bytes, seconds: float, watch: Watch | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the runner's answer. If the sandbox ends instead, it is empty, and `_ended` says how."""
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    packed = marshal.dumps({**request, "size": len(content)}, MARSHAL)
                    await self.runtime.write(len(packed).to_bytes(4, "big") + packed + content)
                    while "partial" in (answer := await receive(self.runtime.reader))[0]:
                        if watch is not None:
                            watch(answer[1])
                    return answer
            except (OSError, EOFError, ValueError, TimeoutError):
                self._ended = Ended.MEMORY if self.runtime.exceeds_memory() else Ended.KILLED
                await self.close()
                return {}, b""
            except asyncio.CancelledError:
                # Otherwise the next request would get the answer to this one.
                self._ended = Ended.KILLED
                await self.close()
                raise


def _check(text: str) -> None:
    if not bubblewrap.is_passable(text):
        raise UsageError(f"{text[:80]!r} is not a command", remedy="pass text without NUL")


def _check_path(path: str) -> str:
    if not bubblewrap.is_passable(path) or not path.startswith("/"):
        raise UsageError(f"{path!r} is not a path in a sandbox", remedy="give a path from / on")
    return path
