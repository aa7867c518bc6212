"""A Reader is the one owner of a generator: it reads ahead in a thread, in order, each task once.

    reader = Reader(taskset)
    task = await reader.task(0)

The latest tasks are kept, so that an answer that got lost can be given again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from treetune.errors import TasksetError
from treetune.offload import call_apart
from treetune.task import Task
from treetune.taskset import Taskset

AHEAD = 64
"""How many tasks are read before they are asked for."""
KEPT = 4096
"""How many of the latest tasks can be given again."""
_SECONDS = 0.05


class Reader:
    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self._taskset = taskset
        self._first = 0
        self._tasks: deque[Task] = deque()
        self._lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    @property
    def _next(self) -> int:
        return self._first + len(self._tasks)

    async def task(self, index: int) -> Task:
        while index >= self._next or index < self._first:
            await self._read(index)
        if index + AHEAD // 2 >= self._next and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_ahead(index + AHEAD))
        return self._tasks[index - self._first]

    async def _read_ahead(self, index: int) -> None:
        try:
            await self._read(index)
        except TasksetError:
            return  # whoever asks for that task is told

    async def _read(self, index: int) -> None:
        async with self._lock:
            if index < self._first:
                # A restored cursor: reading begins anew, which is all a generator allows.
                self._first, self._tasks, self._failure = max(0, index - KEPT // 2), deque(), None
            if index >= self._next:
                if index - KEPT > self._next:
                    self._first, self._tasks = index - KEPT // 2, deque()
                tasks = await call_apart(self._take, self._next, index)
                self._tasks.extend(tasks)
                while len(self._tasks) > KEPT + AHEAD:
                    self._tasks.popleft()
                    self._first += 1

    def _take(self, start: int, index: int) -> list[Task]:
        """The tasks from `start` to at least one more; up to `index`, and a few ahead, while there is time."""
        tasks: list[Task] = []
        until = time.monotonic() + _SECONDS
        for position in range(start, index + AHEAD):
            try:
                if self._failure is not None:
                    raise self._failure
                tasks.append(self._taskset.at(position))
            except Exception as error:
                self._failure = error  # a generator that has failed gives nothing more
                if not tasks:
                    raise
                break
            if time.monotonic() > until:
                break
        return tasks
