r"""Are two mathematical expressions the same? math-verify says it, in a process of its own, against a clock.

    require_math_verify()
    await call(compare, r"\frac{1}{2}", "0.5")   # True

`compare` waits, so it belongs in a thread. Workers are started as they are needed, and kept. One is this file run as a
program, which ends with ours, or after so many seconds; then the two expressions count as different.
math-verify's own timeout is off: it is an exception that math-verify may catch itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

SECONDS, CLOCK_SECONDS = 5.0, 30
"""Of one comparison: the processor time, and the most by the clock, on a busy machine."""
MEMORY = 1 << 30
"""The most bytes of a worker."""
_LATE = (-signal.SIGPROF, -signal.SIGALRM)


def require_math_verify() -> None:
    from treetune.errors import MissingExtraError  # here, for a worker needs nothing of Treetune

    if find_spec("math_verify") is None:
        raise MissingExtraError.of("math-verify", "math")


def compare(truth: str, answer: str) -> bool:
    """Whether the answer means what the ground truth says."""
    idle = _idle.setdefault(os.getpid(), [])
    for waiting in (idle, []):  # the machine may have ended an idle one; an answer that ends two is wrong
        worker = waiting.pop() if waiting else _start_worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, so there is no reply
            print(json.dumps([truth, answer, SECONDS]), file=worker.stdin, flush=True)
        if reply := worker.stdout.readline():
            idle.append(worker)
            return reply == "true\n"
        if worker.wait() in _LATE:
            break
    return False


def _start_worker() -> subprocess.Popen[str]:
    from treetune.errors import EnvironmentFault

    require_math_verify()
    command = [sys.executable, "-P", __file__]  # -P: not beside our own modules
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        raise EnvironmentFault("math-verify does not start", remedy="pip install --force-reinstall math-verify")
    return worker


_idle: dict[int, list[subprocess.Popen[str]]] = {}
"""By process: a forked child must not talk to its parent's workers."""


@atexit.register
def _end_workers() -> None:
    for worker in _idle.pop(os.getpid(), []):
        with worker:
            worker.kill()


def _serve() -> None:
    """The worker's own part: it reads `[truth, answer, seconds]` a line and writes `true` or `false`."""
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
        signal.alarm(CLOCK_SECONDS)
        try:
            same = bool(verify(read(truth), read(answer), timeout_seconds=None))
        except Exception:
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
