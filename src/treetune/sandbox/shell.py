"""A sandbox with a shell that lives on: commands share its files, variables, folder and background processes.

    async with await Shell.open(SandboxLimits(seconds=5)) as shell:
        await shell.execute("cd /var && x=3")
        result = await shell.execute("echo $x; pwd")
        result.text, result.exit_code    # "3\\n/var\\n", 0

Whatever commands do is a `Result`. After `close` nothing of the sandbox is left; if this process is killed, its
sandboxes end too. A shell belongs to the event loop it was opened in.

Inside, the first process is `runner.py`. What that runs in is a `Runtime`: here bubblewrap, in `docker.py` a container.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

import msgspec

from treetune.errors import TreetuneError, UsageError
from treetune.sandbox import bubblewrap
from treetune.sandbox.limits import DEFAULT_LIMITS, KILLED, Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.mount_root import COPY, RANGE, STAGE
from treetune.sandbox.probe import FIRST_UID, LAST_THREAD, Launcher, require
from treetune.sandbox.rootfs import Root
from treetune.sandbox.runner import AS_COPY
from treetune.sandbox.scripts import compile_script
from treetune.sandbox.time_limit import CLOCK_FACTOR

Watch: TypeAlias = Callable[[bytes], object]
GRACE_SECONDS = 15.0
"""For the runner inside to end a command that does not end; then all of the sandbox ends."""
LOOK_SECONDS = 0.1
MARSHAL = 2
"""A version that every Python reads."""
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
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE", bubblewrap.GUARD),
)
"""As in a container; they reach no further than the sandbox's own users."""
OUR_PROCESSES = 3
"""Bubblewrap, the runner and the shell are not counted against `processes`."""
FIRST_RANGE, RANGES = FIRST_UID + LAST_THREAD, 32_000
INODES_PER_MB = 512
RUNNER = ("time_limit.py", "terminal.py", "runner.py")
MOUNTER = ("copy_files.py", "mount_root.py")


class SandboxGone(TreetuneError):
    """A sandbox that has ended was asked for something."""


class Runtime(Protocol):
    """What the runner of a shell runs in, and the stream between both."""

    reader: asyncio.StreamReader
    """What the runner inside answers."""

    async def write(self, content: bytes) -> None:
        """To the runner inside."""

    def exceeds_memory(self) -> bool:
        """Whether it ended because its processes used more memory than they may."""

    async def copy(self, limits: SandboxLimits) -> Runtime:
        """Another one with the files that are in it now."""

    async def close(self) -> None:
        """End everything in it, and wait until it is gone."""


class Shell:
    def __init__(self, runtime: Runtime, limits: SandboxLimits) -> None:
        self._runtime, self.limits = runtime, limits
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
        return cls(await BubblewrapRuntime.open(launcher, limits, rootfs), limits)

    @property
    def alive(self) -> bool:
        return self._ended is None and self._closing is None

    async def execute(self, command: str, *, seconds: float | None = None, watch: Watch | None = None) -> Result:
        """Run a command in the shell, as if it were typed there. `watch` is given what it writes at once, as far as
        `output_kb` goes."""
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
        """Run a program beside the shell, untouched by its variables and aliases; what it leaves in the background
        lives on."""
        for text in command:
            _check(text)
        request = {"kind": "run", "command": list(command), "cwd": cwd, "env": dict(env or {})}
        return await self._ask_command(request, stdin, seconds)

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file, folders above it included."""
        await self._ask_file({"kind": "put", "path": _check_path(path), "mode": mode}, content)

    async def get(self, path: str) -> bytes:
        """Read a file, up to 64 MB of it."""
        return await self._ask_file({"kind": "get", "path": _check_path(path), "limit": FILE_BYTES})

    async def record_files(self) -> None:
        """Take note of the files that programs consist of, for `find_tampered`."""
        await self._ask_file({"kind": "record"})

    async def find_tampered(self) -> list[str]:
        """Of what was recorded: files that were changed or removed since then, and new ones in their way. Programs with
        names of their own may be added."""
        found = await self._ask_file({"kind": "tampered"})
        return [os.fsdecode(path) for path in found.split(b"\0") if path]

    async def list_processes(self) -> list[str]:
        """The commands that run in the sandbox, but for our own and the shell's."""
        found = await self._ask_file({"kind": "processes"})
        return [os.fsdecode(command) for command in found.split(b"\0") if command]

    async def kill_processes(self) -> None:
        """End every process in the sandbox, the shell among them. Files stay, and the next command has a new shell."""
        await self._ask_file({"kind": "kill"})

    async def copy(self) -> Shell:
        """Another sandbox with the files that are in this one now; none of its processes. The caller closes it."""
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            return Shell(await self._runtime.copy(self.limits), self.limits)

    async def close(self) -> None:
        """End everything in the sandbox and wait until it is gone. May be called again."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._runtime.close())
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
            raise UsageError(f"no file can be had in the sandbox: {why}", remedy="look at its path")
        return read

    async def _ask(
        self, request: dict[str, Any], content: bytes, seconds: float, watch: Watch | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """The runner's answer; where the sandbox ends instead, nothing, and `_ended` says how."""
        async with self._lock:
            if not self.alive:
                raise SandboxGone("the sandbox has ended", remedy="open another")
            try:
                async with asyncio.timeout(seconds + GRACE_SECONDS):
                    packed = marshal.dumps({**request, "size": len(content)}, MARSHAL)
                    await self._runtime.write(len(packed).to_bytes(4, "big") + packed + content)
                    while "partial" in (answer := await receive(self._runtime.reader))[0]:
                        if watch is not None:
                            watch(answer[1])
                    return answer
            except (OSError, EOFError, ValueError, TimeoutError):
                self._ended = Ended.MEMORY if self._runtime.exceeds_memory() else Ended.KILLED
                await self.close()
                return {}, b""
            except asyncio.CancelledError:
                # The answer would be taken for that to the next request.
                self._ended = Ended.KILLED
                await self.close()
                raise


def _check(text: str) -> None:
    if not bubblewrap.is_passable(text):
        raise UsageError(f"{text[:80]!r} is no command", remedy="pass text without NUL")


def _check_path(path: str) -> str:
    if not bubblewrap.is_passable(path) or not path.startswith("/"):
        raise UsageError(f"{path!r} is no path in a sandbox", remedy="give a path from / on")
    return path


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """One answer of the runner. What is inside a sandbox is not trusted: ValueError for anything else."""
    header = json.loads(await reader.readline() or b"-")
    if not isinstance(header, dict) or not isinstance(size := header.get("size"), int) or not 0 <= size <= FILE_BYTES:
        raise ValueError("no answer of the runner")
    return header, await reader.readexactly(size)


class BubblewrapRuntime:
    """Unlike in `one_shot.py` the system's folders can be written: `mount_root.py` makes the root, outside and in
    namespaces of its own, then becomes bubblewrap. What is written is a tmpfs of `disk_mb`, and gone with it."""

    def __init__(self, launcher: Launcher, limits: SandboxLimits, rootfs: str | None = None) -> None:
        self._launcher, self._rootfs = launcher, rootfs
        # With one process that takes too much only that one ends, where the kernel counts.
        self._process = bubblewrap.Process(launcher.hold_memory(limits, ("",), all_at_once=False))
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        self._exceeded_memory = False
        self._is_copy = False

    @classmethod
    async def open(cls, launcher: Launcher, limits: SandboxLimits, rootfs: str | None = None) -> Self:
        """Call it from a thread that outlives the sandbox, such as that of the event loop."""
        with bubblewrap.explain_failures():
            runtime = cls(launcher, limits, rootfs)
            await runtime._start(limits)
        return runtime

    async def copy(self, limits: SandboxLimits) -> BubblewrapRuntime:
        if self._is_copy:
            raise UsageError("a copy of a copy cannot be had", remedy="copy the original again")
        with bubblewrap.explain_failures():
            runtime = BubblewrapRuntime(self._launcher, limits, self._rootfs)
            await runtime._start(limits, self._process)
        return runtime

    async def _start(self, limits: SandboxLimits, original: bubblewrap.Process | None = None) -> None:
        try:
            self._spawn(limits, original)
            await self._begin()
        except BaseException:
            await asyncio.shield(self.close())
            raise

    def _spawn(self, limits: SandboxLimits, original: bubblewrap.Process | None = None) -> None:
        process, launcher, rootfs = self._process, self._launcher, self._rootfs
        self._is_copy = original is not None
        root = Root.of_host(launcher.tools["python3"]) if rootfs is None else Root.of_folder(rootfs)
        # The folder's Python may be another than ours.
        runner = process.make_file(compile_script(RUNNER, root.python if rootfs is None else None))
        mounter = process.make_file(compile_script(MOUNTER, launcher.tools["python3"]))
        plan = {
            "base": FIRST_RANGE + RANGE * secrets.randbelow(RANGES) if launcher.becomes_user else None,
            "range": launcher.own_users,
            "original": process.give_monitor(original) if original is not None else None,
            "entrance": process.memory.entrance,
            **msgspec.structs.asdict(root),
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
            raise SandboxUnavailable(f"no sandbox with a shell can start: {why or 'it does not say why'}")
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
            # Before its socket is closed, or the event loop takes the next one with its number for it.
            self._writer.transport.abort()
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        self._process.end()
        self._process.close()


def _list_options(launcher: Launcher, limits: SandboxLimits, root: Root, stage: str) -> list[str]:
    given = bubblewrap.isolate(CAPABILITIES, ENVIRONMENT)
    if root.whole is None:
        given += ["--bind", f"{stage}/root", "/"]
    for number, folder in enumerate(root.shown):
        given += ["--bind", f"{stage}/merged{number}", "/" if folder == root.whole else folder]
    if root.whole is not None and not launcher.own_users:
        given += ["--bind", f"{stage}/home", "/root"]
    return [*given, *bubblewrap.mount_devices(limits), "--chdir", "/root"]
