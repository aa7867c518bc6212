r"""Are two mathematical expressions the same? math-verify says it, in a process of its own, against a clock.

    require_math_verify()
    await call(compare, r"\frac{1}{2}", "0.5")   # True

`compare` waits, so it belongs in a thread. Workers are started as they are needed, at most one a core, and kept. A
worker that does not answer in time is ended, and the two expressions count as different.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue

from treetune.errors import EnvironmentFault, MissingExtraError

SECONDS = 5.0
"""The processor time of one comparison."""
CLOCK_SECONDS = 30.0
"""The most seconds of one by the clock, on a busy machine."""
START_SECONDS = 120.0
"""How long the import of sympy may take on a busy machine."""

DIED = b""
"""What a process that has ended says."""

_WORKER = Path(__file__).with_name("worker.py")


def require_math_verify() -> None:
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
        worker = worker or Verifier()
        reply = worker.ask(truth, answer)
        return reply
    finally:
        if worker is not None and not reply:
            worker.end()
            worker = None
        idle.put(worker)


class Verifier:
    """A process that compares."""

    def __init__(self) -> None:
        require_math_verify()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],  # -P: not beside our own modules
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


def _make_slots() -> LifoQueue[Verifier | None]:
    """A place for each core, with the worker that was started for it or none yet."""
    idle: LifoQueue[Verifier | None] = LifoQueue()
    for _ in range(len(os.sched_getaffinity(0))):
        idle.put(None)
    return idle


_idle = _make_slots()


def _forget_workers() -> None:
    global _idle
    _idle = _make_slots()


def _end_idle() -> None:
    while not _idle.empty():
        if (worker := _idle.get_nowait()) is not None:
            worker.end()


# A forked child must not talk to its parent's workers.
os.register_at_fork(after_in_child=_forget_workers)
atexit.register(_end_idle)
