"""Time limits that do not depend on the machine's load: wall-clock time counts while a process waits, CPU time while
it works.

    limit = TimeLimit(10)
    limit.left()                # seconds until the next check; 0 or less: the time is up

A program that gets a tenth of the CPU, because the machine is busy, has ten times as long. One that sleeps or waits for
input is stopped when its time is up.

This module runs on the host and in sandboxes, where it is sent as part of a script. It supports Python 3.8 and later.
"""

from __future__ import annotations

import os
import time

PROCESSES = "/proc"
CLOCK_FACTOR = 10
"""The wall-clock limit of a command or a worker's request, as a multiple of its seconds."""
WORKING = 0.04
"""A command that uses at least this share of a CPU counts as working; below it, as waiting."""
LONGEST_LOOK, SHORTEST_LOOK = 0.5, 0.2
"""Seconds between two checks of the CPU time, which the kernel counts in hundredths."""
TICKS = os.sysconf("SC_CLK_TCK")


class TimeLimit:
    def __init__(self, seconds: float, processes: str = PROCESSES) -> None:
        """`processes` is the /proc of the sandbox that the command runs in."""
        self._seconds, self._processes = seconds, processes
        self._began = self._looked = time.monotonic()
        self._used = 0.0
        self._cpu = sum_cpu(processes)

    def left(self) -> float:
        now = time.monotonic()
        if (wait := self._looked + self._next_look() - now) > 0:
            return wait
        cpu, clock = sum_cpu(self._processes), now - self._looked
        worked = cpu - self._cpu
        self._used += min(worked, clock) if worked >= WORKING * clock else clock
        self._looked, self._cpu = now, cpu
        over = self._used >= self._seconds or now - self._began >= CLOCK_FACTOR * self._seconds
        return 0.0 if over else self._next_look()

    def _next_look(self) -> float:
        return max(SHORTEST_LOOK, min(LONGEST_LOOK, self._seconds - self._used))


def sum_cpu(processes: str) -> float:
    """The CPU time in seconds of all processes in a /proc, including children that they have waited for."""
    ticks = 0
    try:
        names = os.listdir(processes)
    except OSError:
        return 0.0  # /proc is not visible or the sandbox has ended, so only the clock counts
    for name in names:
        if name.isdigit():
            try:
                with open(f"{processes}/{name}/stat", "rb") as file:
                    ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
            except OSError:
                continue  # the process has just ended
    return ticks / TICKS
