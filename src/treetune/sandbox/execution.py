"""One command in one sandbox, from its start until the last of its processes is gone.

    result = Execution(before=["bwrap"], options=..., command=["true"], ...).run()

Bubblewrap is two processes: a monitor outside, and the first process of the sandbox's own pid namespace. With the
second one everything inside ends, so that is the one to kill and the one to wait for. The order of a start: its pid is
known, its memory is held, bubblewrap goes on, the gate inside says that it is there, the gate is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from typing import TypeAlias

from treetune.sandbox.memory import Memory
from treetune.sandbox.protocol import Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.streams import Capture, Feed, readable, sealed_file

START_SECONDS = 60.0
GONE_SECONDS = 60.0
TICK_SECONDS = 0.05
READY, GO = b"\n", b"go\n"
"""What the gate says, and what opens it."""
KILLED = 128 + signal.SIGKILL

Options: TypeAlias = Callable[[Mapping[str, int]], list[str]]
"""Bubblewrap's options, given the descriptors of the files it is to read."""


class Stop:
    """Lets another thread end an execution."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0)

    def set(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        os.close(self.descriptor)


class Execution:
    def __init__(
        self,
        *,
        before: Sequence[str],
        options: Options,
        data: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes,
        limits: SandboxLimits,
        memory: Memory,
        user: int | None,
        stop: Stop | None,
    ) -> None:
        self._before, self._options, self._data, self._command = before, options, data, command
        self._stdin, self._limits, self._memory = stdin, limits, memory
        self._user, self._stop = user, stop
        self._held = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._first: int | None = None
        """A pidfd of the sandbox's first process."""
        self._said = b""
        """What bubblewrap's monitor reported: JSON, a line each."""
        self._began = time.monotonic()
        self._seconds = 0.0

    def run(self) -> Result:
        with self._held:
            self._held.callback(self._memory.close)
            try:
                self._spawn()
                ended = self._follow() if self._find_first() and self._open_gate() else None
            finally:
                self._finish()
            self._out.drain()
            self._err.drain()
            if ended is None:
                said = self._err.content.decode(errors="replace").strip()
                raise SandboxUnavailable(f"bubblewrap cannot start a sandbox: {said or 'it does not say why'}")
            return self._result(ended)

    def _spawn(self) -> None:
        stdin, self._feed_end = self._pipe()
        out, stdout = self._pipe()
        err, stderr = self._pipe()
        self._status, writing = self._pipe()
        # Opened for reading too, so that a monitor whose owner died can write, and does not leave a start half done.
        status = self._held.enter_context(FileIO(os.open(f"/proc/self/fd/{writing.fileno()}", os.O_RDWR), "r+"))
        block, self._release = self._pipe()
        self._out = Capture(out, self._limits.output_kb << 10)
        self._err = Capture(err, self._limits.output_kb << 10)
        if self._user is not None:
            # Else `> /dev/stderr`, which opens the pipe again, is refused.
            for end in (stdin, stdout, stderr):
                os.fchown(end.fileno(), self._user, self._user)
        data = {path: self._file(content) for path, content in self._data.items()}
        options = self._options({path: file.fileno() for path, file in data.items()})
        options += ["--json-status-fd", f"{status.fileno()}", "--block-fd", f"{block.fileno()}"]
        # Not on the command line: /proc/1/cmdline is seen inside.
        arguments = self._file(os.fsencode("".join(f"{option}\0" for option in options)))
        passed = [arguments, status, block, *data.values()]
        self._process = subprocess.Popen(
            [*self._before, "--args", str(arguments.fileno()), "--", *self._command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[file.fileno() for file in passed],
            cwd="/",
            # Nor in the environment: /proc/1/environ shows it, although bubblewrap clears it for the command.
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        )
        for end in (stdin, stdout, stderr, writing, *passed):
            end.close()

    def _find_first(self) -> bool:
        """Hold the sandbox's first process, which waits to be released; False where there is none."""
        while b"\n" not in self._said:
            if not readable(self._status, START_SECONDS) or not self._hear():
                return False
        pid = json.loads(self._said.partition(b"\n")[0])["child-pid"]
        # BrokenPipeError, ProcessLookupError: it could not be set up, and its standard error says why.
        with contextlib.suppress(BrokenPipeError, ProcessLookupError):
            self._first = os.pidfd_open(pid)
            self._held.callback(os.close, self._first)
            if self._memory.entrance is None:
                self._memory.attach(pid)
            self._release.write(b"x")
        return self._first is not None

    def _open_gate(self) -> bool:
        if not readable(self._out.pipe, START_SECONDS) or os.read(self._out.pipe.fileno(), 1) != READY:
            return False
        self._began = time.monotonic()
        self._feed = Feed(self._feed_end, GO + self._stdin)
        return True

    def _follow(self) -> Ended:
        """Wait for the command's end or the first limit that it passes."""
        deadline = self._began + self._limits.seconds
        next_look = self._began + TICK_SECONDS
        streams = (self._feed, self._out, self._err)
        poll = select.poll()
        for stream in streams:
            stream.register(poll)
        poll.register(self._status, select.POLLIN)
        if self._stop is not None:
            poll.register(self._stop.descriptor, select.POLLIN)
        while True:
            wait = min(next_look, deadline) - time.monotonic()
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, wait) * 1000)}
            for stream in streams:
                stream.serve(ready, poll)
            if self._out.truncated or self._err.truncated:
                return Ended.OUTPUT
            if self._status.fileno() in ready and not self._hear():
                return Ended.COMPLETED
            if self._stop is not None and self._stop.descriptor in ready:
                return Ended.KILLED
            if (now := time.monotonic()) >= deadline:
                return Ended.TIMEOUT
            if now >= next_look:
                next_look = now + TICK_SECONDS
                if self._memory.passed():
                    return Ended.MEMORY

    def _finish(self) -> None:
        """End what still runs, and wait until it is gone."""
        if self._process is None:
            return
        if self._first is None:
            # Interrupted in the middle of a start: bubblewrap must not go on alone.
            self._find_first()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            # Readable when the kernel has ended and reaped every other process of the pid namespace.
            if not readable(self._first, GONE_SECONDS):
                raise SandboxUnavailable(f"a sandbox did not end within {GONE_SECONDS:.0f} seconds of being killed")
            with contextlib.suppress(OSError):
                # Only where this process is the init of a container: nobody else would reap it.
                os.waitid(os.P_PIDFD, self._first, os.WEXITED | os.WNOHANG)
        else:
            self._process.kill()
        self._process.wait()
        self._seconds = time.monotonic() - self._began

    def _result(self, ended: Ended) -> Result:
        while self._hear():
            pass
        reports = map(json.loads, self._said.splitlines())
        code = next((report["exit-code"] for report in reports if "exit-code" in report), None)
        if ended is Ended.COMPLETED:
            # What happened since the last look.
            if self._memory.passed():
                ended = Ended.MEMORY
            elif self._out.truncated or self._err.truncated:
                ended = Ended.OUTPUT
            elif code is None:
                ended = Ended.KILLED
        return Result(
            exit_code=code if code is not None and ended is Ended.COMPLETED else KILLED,
            stdout=bytes(self._out.content),
            stderr=bytes(self._err.content),
            stdout_truncated=self._out.truncated,
            stderr_truncated=self._err.truncated,
            ended=ended,
            seconds=self._seconds,
        )

    def _hear(self) -> bool:
        said = os.read(self._status.fileno(), 4096)
        self._said += said
        return bool(said)

    def _pipe(self) -> tuple[FileIO, FileIO]:
        reading, writing = os.pipe()
        return self._held.enter_context(FileIO(reading)), self._held.enter_context(FileIO(writing, "w"))

    def _file(self, content: bytes) -> FileIO:
        return self._held.enter_context(sealed_file(content))
