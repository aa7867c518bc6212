"""All tasks of a `load_tasks` as a list, with a warning and an error for one that seems to have no end.

tasks = list_tasks(taskset.load_tasks(), "Doubles", count=None)
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TypeVar

from treetune.errors import TasksetError

MOST_TASKS = 5_000_000
"""So many tasks are held in memory where the taskset does not say how many there are."""
MOST_OF_MEMORY = 0.5
"""They may take this part of the memory that is free when loading begins."""
WARN_SECONDS = 5.0
_LOOK_EVERY = 256
T = TypeVar("T")


def list_tasks(tasks: Iterable[T], name: str, count: int | None) -> list[T]:
    """`count` is how many there are, where the taskset says so."""
    if isinstance(tasks, list):
        return tasks
    if count is not None:
        return list(islice(tasks, count))
    loaded: list[T] = []
    wait = WARN_SECONDS
    next_warning, room = time.monotonic() + wait, _free_bytes() * MOST_OF_MEMORY + _used_bytes()
    for task in tasks:
        loaded.append(task)
        if len(loaded) % _LOOK_EVERY:
            continue
        if len(loaded) >= MOST_TASKS or _used_bytes() > room:
            raise _without_end(name, len(loaded))
        if time.monotonic() > next_warning:
            warn_of_many(name, len(loaded), "all are kept in memory")
            wait *= 2
            next_warning += wait
    return loaded


def warn_of_many(name: str, number: int, then: str) -> None:
    goes_on = f"{name}.load_tasks() has given {number:,} tasks and goes on; {then}"
    warnings.warn(f"{goes_on}. If it never ends, set INFINITE = True", stacklevel=3)


def _without_end(name: str, number: int) -> TasksetError:
    return TasksetError(
        f"{name}.load_tasks() has given {number:,} tasks and goes on: no more are kept in memory",
        remedy="set INFINITE = True if it never ends; if it does, write count(), and task_at(index) to keep none",
    )


def _used_bytes() -> float:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def _free_bytes() -> float:
    """Of this machine, or of the container that this process is in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")
    try:
        return min(free, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # there is no limit
        return free
