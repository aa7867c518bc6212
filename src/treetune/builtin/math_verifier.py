r"""Are two mathematical expressions the same? math-verify says it, in a process of its own, against a clock.

    require_math_verify()
    await call(compare, r"\frac{1}{2}", "0.5")   # True

`compare` waits, so it belongs in a thread. Workers are started as they are needed, at most one a core, and kept. A
worker that does not answer in time is ended, and the two expressions count as different.

A worker is this file run as a program: it reads `[truth, answer, seconds]` a line and writes `true` or `false`. After
so many seconds of processor time the kernel ends it. math-verify's own timeout is off: it is an exception that
math-verify may catch itself. An expression that explodes meets the memory limit first.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
from importlib.util import find_spec
from queue import LifoQueue
from typing import Any

SECONDS = 5.0
"""The processor time of one comparison."""
CLOCK_SECONDS = 30.0
"""The most seconds of one by the clock, on a busy machine."""
START_SECONDS = 120.0
"""How long the import of sympy may take on a busy machine."""
MEMORY = 1 << 30
"""The most bytes of a worker."""

DIED = b""
"""What is read from a worker that has ended."""


def require_math_verify() -> None:
    from treetune.errors import MissingExtraError  # here, for a worker needs nothing of Treetune

    if find_spec("math_verify") is None:
        raise MissingExtraError.of("math-verify", "math")


def compare(truth: str, answer: str) -> bool:
    """Whether the answer means what the ground truth says."""
    reply = _ask(truth, answer)
    if reply == DIED:
        reply = _ask(truth, answer)  # the machine may have ended an idle one; an answer that ends two is wrong
    return reply == b"true\n"


def _ask(truth: str, answer: str) -> bytes | None:
    idle = _idle
    worker = idle.get()
    reply: bytes | None = DIED
    try:
        worker = worker or VerifierProcess()
        reply = worker.ask(truth, answer)
        return reply
    finally:
        if worker is not None and not reply:
            worker.end()
            worker = None
        idle.put(worker)


class VerifierProcess:
    """A worker, seen from outside."""

    def __init__(self) -> None:
        from treetune.errors import EnvironmentFault

        require_math_verify()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # -P: not beside our own modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._read_line(START_SECONDS) != b"ready\n":
            self.end()
            raise EnvironmentFault("math-verify does not start", remedy="pip install --force-reinstall math-verify")

    def ask(self, truth: str, answer: str) -> bytes | None:
        """Its reply; None where it is late."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([truth, answer, SECONDS]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return DIED
        reply = self._read_line(CLOCK_SECONDS)
        return None if reply == DIED and self._process.wait() == -signal.SIGPROF else reply

    def end(self) -> None:
        """Also one that has ended: its pipes are closed."""
        self._process.kill()
        self._process.communicate()

    def _read_line(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        # A line is written in one piece, so the first byte means all of it.
        return self._process.stdout.readline() if poll.poll(seconds * 1000) else None


_idle: LifoQueue[VerifierProcess | None]
"""A place for each core: the worker that was started for it, or None."""


def _forget_workers() -> None:
    global _idle
    _idle = LifoQueue()
    for _ in range(len(os.sched_getaffinity(0))):
        _idle.put(None)


def _end_idle() -> None:
    while not _idle.empty():
        if (worker := _idle.get_nowait()) is not None:
            worker.end()


def _serve() -> None:
    """The worker's own part."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no reply
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    from math_verify import parse, verify

    logging.disable()

    def read(text: str) -> Any:
        marked = "$" in text or "\\boxed" in text
        return parse(text if marked else f"${text}$", parsing_timeout=None)

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        truth, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            same = bool(verify(read(truth), read(answer), timeout_seconds=None))
        except Exception:
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
else:
    _forget_workers()
    os.register_at_fork(after_in_child=_forget_workers)  # a forked child must not talk to its parent's workers
    atexit.register(_end_idle)
