"""`serve --supervise`: a small process that runs the server as its child and restarts it when it crashes or hangs.

    supervise(arguments, state=None, max_crashes=5, on_ready=print_json)

The child reports over a pipe that it is ready and where it listens, and from then on sends a heartbeat each second. It
stops when the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from treetune.errors import TreetuneError

WINDOW_SECONDS = 600.0
"""Older crashes do not count."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STUCK_SECONDS = 60.0
"""A server that was ready and is silent for this long is killed."""
_BEAT_SECONDS = 1.0
_LAST_LINES = 10
_VARIABLE = "TREETUNE_SUPERVISED"
"""The variable with the file descriptor that the child reports to."""

log = logging.getLogger("treetune.serve")


class ServerCrashed(TreetuneError):
    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message, remedy="fix what its last lines report, and start it again")
        self.exit_code = exit_code  # type: ignore[misc]


def supervise(
    arguments: list[str], *, state: Path | None, max_crashes: int, on_ready: Callable[[dict[str, Any]], None]
) -> int:
    """Runs `treetune ARGUMENTS` until it ends without an error or gets a signal; returns its exit code. `on_ready` is
    called once, with the report of the first server that is ready."""
    with contextlib.ExitStack() as kept:
        if state is None:
            folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="treetune-state-"))
            arguments = [*arguments, "--state", folder]
            log.info("without --state the cursor survives a crash, but not the end of this command")
        supervisor = Supervisor(arguments, max_crashes, on_ready)
        kept.enter_context(supervisor.taking_signals())
        return supervisor.run()


class Supervisor:
    def __init__(self, arguments: list[str], max_crashes: int, on_ready: Callable[[dict[str, Any]], None]) -> None:
        self.command = [sys.executable, "-P", "-m", "treetune", *arguments]
        self._max_crashes, self._on_ready = max_crashes, on_ready
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        """Set by a signal that ends it."""
        self._was_ready = False

    @contextlib.contextmanager
    def taking_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: Any) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(number)

    def run(self) -> int:
        crashes: deque[float] = deque()
        while not self._stopping.is_set():
            how, code, last = self._run_once()
            if self._stopping.is_set() or code == 0:
                asked_to = (-signal.SIGTERM, -signal.SIGINT)  # before it could handle them
                return 0 if code in asked_to else code if code >= 0 else 128 - code
            if code == 2 and not self._was_ready:  # a retry does not fix wrong usage
                raise ServerCrashed(f"the server cannot start: {last}", exit_code=2)
            now = time.monotonic()
            crashes.append(now)
            while crashes[0] < now - WINDOW_SECONDS:
                crashes.popleft()
            if len(crashes) >= self._max_crashes:
                times = f"{len(crashes)} times within {WINDOW_SECONDS / 60:g} minutes" if len(crashes) > 1 else "once"
                raise ServerCrashed(f"the server crashed {times}, the last time with {how}: {last}")
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (len(crashes) - 1))
            log.warning(
                "the server crashed (%s), %d of %d times; it is started again in %g s",
                how, len(crashes), self._max_crashes, pause,
            )  # fmt: skip
            self._stopping.wait(pause)
        return 0

    def _run_once(self) -> tuple[str, int, str]:
        """How the server ended, its exit code, and its last lines."""
        reading, writing = os.pipe()
        # In its own process group: Ctrl-C reaches only this process, which forwards it once.
        self._child = child = subprocess.Popen(
            self.command,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
            start_new_session=True,
            env={**os.environ, _VARIABLE: str(writing)},
        )
        os.close(writing)
        if self._stopping.is_set():  # a signal may have arrived since the start
            child.terminate()
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        assert child.stderr is not None
        copying = threading.Thread(target=_copy, args=(child.stderr, lines), daemon=True)
        copying.start()
        try:
            lives = self._watch(reading)
        finally:
            os.close(reading)
        if not lives:
            child.kill()
        code = child.wait()
        copying.join(1.0)  # its workers may hold the other end slightly longer
        how = f"no heartbeat for {STUCK_SECONDS:g} seconds" if not lives else _describe(code)
        return how, code, "".join(f"\n  {line}" for line in lines) or "no output"

    def _watch(self, reading: int) -> bool:
        """Waits until the server ends or is stuck; returns whether it was alive to the end."""
        said = b""
        while select.select([reading], [], [], STUCK_SECONDS if b"\n" in said else None)[0]:
            data = os.read(reading, 4096)
            if not data:
                return True
            if b"\n" not in said:
                said += data
                if b"\n" in said and not self._was_ready:
                    self._was_ready = True
                    self._on_ready({**msgspec.json.decode(said.partition(b"\n")[0]), "pid": os.getpid()})
        return False


def _copy(source: BinaryIO, lines: deque[str]) -> None:
    for line in source:
        sys.stderr.write(line.decode("utf-8", "replace"))
        sys.stderr.flush()
        if line.strip():
            lines.append(line.decode("utf-8", "replace").rstrip())


def _describe(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


# In the child process


class Heartbeat:
    """Reports to the supervisor where the server listens, and then that it is alive."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)

    @classmethod
    def open(cls) -> Heartbeat | None:
        """Returns None if this process has no supervisor."""
        descriptor = os.environ.pop(_VARIABLE, None)  # removed, so that the child's own children do not see it
        return cls(int(descriptor)) if descriptor is not None else None

    async def keep_up(self, found: dict[str, Any], stop: Callable[[], None]) -> None:
        """Reports where the server listens, and then that it is alive; calls `stop` if the supervisor is gone."""
        try:
            os.write(self._descriptor, msgspec.json.encode(found) + b"\n")
            while True:
                await asyncio.sleep(_BEAT_SECONDS)
                os.write(self._descriptor, b".")
        except BrokenPipeError:
            log.warning("the supervisor has gone")
            stop()
