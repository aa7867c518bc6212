"""A Reader reads an endless generator forward, a few tasks ahead, and keeps the latest tasks to return them again.

    reader = Reader(taskset, tries=3)
    task = await reader.task(17)

A generator that fails is restarted after a wait. If it keeps failing at the same place, the stream ends there. Tasks
after that place were never reached, so none is skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import GeneratorFailed, StreamEnded
from treetune.system.threads import call_apart

AHEAD = 64
"""How many tasks are read ahead."""
KEPT = 4096
"""How many of the latest tasks are kept to be returned again."""
_TAKING_SECONDS = 0.05
FIRST_WAIT = 1.0
LONGEST_WAIT = 64.0
"""The first and longest waits in seconds before a generator is restarted; each wait is four times the previous one."""
_BROKEN = (GeneratorFailed, StreamEnded)
"""Failures of the generator itself. Other errors belong to a single task."""


class Reader:
    def __init__(self, taskset: Taskset[Any, Any], tries: int) -> None:
        """`tries` is how often the generator may fail at the same place."""
        self.taskset = taskset
        self._tries = tries
        self._tasks: dict[int, Task] = {}
        self._first = self._next = 0
        """The first index that is still kept, and the first that was not read."""
        self._lock = asyncio.Lock()
        self._failures: dict[int, Exception] = {}
        """Errors of single tasks, kept until those tasks are requested."""
        self._failed_at = self._failed = 0
        """Where the generator failed last, and how often in a row it failed there."""
        self._again = 0.0
        """The earliest time of a restart."""
        self._ended: StreamEnded | None = None
        """The error that ended the stream, if the generator failed too often."""

    def reaches(self, index: int) -> bool:
        """Whether a task can be returned without reading from the beginning."""
        return self._first <= index <= self._next + KEPT

    async def task(self, index: int) -> Task:
        """The task at a position, which equals its index because a generator has no other order."""
        if (known := self._tasks.get(index)) is not None:
            return known
        async with self._lock:
            failures = 0
            while index not in self._tasks:
                if (failure := self._failures.pop(index, None)) is not None:
                    raise failure  # the next request reads the task again
                if self._failed and index >= self._next and (left := self._again - time.monotonic()) > 0:
                    if self._ended is not None:
                        raise self._ended
                    await asyncio.sleep(left)
                try:
                    await self._read(index)
                except GeneratorFailed as error:
                    failures += 1
                    self._note_failure(error)
                    if self._ended is not None:
                        raise self._ended from error
                    if failures >= self._tries:
                        raise
            return self._tasks[index]

    def _note_failure(self, error: GeneratorFailed) -> None:
        self._failed = self._failed + 1 if self._failed and error.place == self._failed_at else 1
        self._failed_at = error.place
        self._again = time.monotonic() + min(LONGEST_WAIT, FIRST_WAIT * 4.0 ** min(self._failed - 1, 9))
        if self._failed >= self._tries:
            self._ended = StreamEnded(
                f"{error.message}; it failed {self._failed} times at task {error.place}, and the stream ends there",
                remedy=error.remedy or "correct load_tasks(), and sample again: no task was skipped",
            )

    async def _read(self, index: int) -> None:
        if self._first <= index < self._next:
            wanted = range(index, index + 1)  # a task that failed before
        else:
            if not self.reaches(index):
                # After a restore, the generator is read from the start; tasks are kept from just before the cursor.
                self._tasks, self._failures = {}, {}
                self._first = self._next = max(0, index - KEPT // 2)
            wanted = range(self._next, index + AHEAD)
        tasks, failure = await call_apart(take, map(self.taskset.__getitem__, wanted))
        for number, task in enumerate(tasks, wanted.start):
            self._tasks[number] = task
            self._tasks.pop(number - KEPT, None)
        last = wanted.start + len(tasks)
        if failure is not None and not isinstance(failure, _BROKEN):
            self._failures[last] = failure
            self._failures.pop(last - KEPT, None)
            last += 1
        if last > self._next:
            self._next, self._failed, self._ended = last, 0, None
        self._first = max(self._first, self._next - KEPT)
        if isinstance(failure, _BROKEN):
            if index not in self._tasks:
                raise failure
            if isinstance(failure, GeneratorFailed):
                self._note_failure(failure)  # failed while reading ahead; the next request restarts the generator


def take(tasks: Iterable[Task]) -> tuple[list[Task], Exception | None]:
    """Take as many tasks as can be made in a short time; return them and the error of the next one, if any."""
    taken: list[Task] = []
    until = time.monotonic() + _TAKING_SECONDS
    try:
        for task in tasks:
            taken.append(task)
            if time.monotonic() > until:
                break
    except Exception as error:
        return taken, error
    return taken, None
