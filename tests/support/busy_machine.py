"""A machine that is busy: one processor, which this process and what it starts share with programs that never wait.

with busy_machine(): ...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OTHERS = 2


@contextmanager
def busy_machine(others: int = OTHERS) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    # Each in a session of its own: some kernels share the processor by sessions.
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(others)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        os.sched_setaffinity(0, before)
