"""An evaluation on a server: its tasks and rollouts come from a `Host`, and this process only counts and saves.

    taskset = Served(ServedConfig(address="tcp://127.0.0.1:5555"))
    taskset.describe_as(await host.info())
    async for task, occurrence in drawn_from(host, taskset, 100): ...

Tasks are asked for by index, so an evaluation moves no trainer's cursor and begins anew at the same place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from treetune.errors import TasksetError, TreetuneError
from treetune.host import Host, Info
from treetune.streams import StreamState
from treetune.task import Task
from treetune.taskset import Taskset, TasksetConfig

_AHEAD = 32


class ServedConfig(TasksetConfig, frozen=True, kw_only=True):
    address: str
    """Where the server listens."""


class Served(Taskset[Task, ServedConfig]):
    """What is known here of a taskset that lives on a server."""

    def __init__(self, config: ServedConfig | None = None) -> None:
        super().__init__(config)
        self._info = Info()

    def describe_as(self, info: Info) -> None:
        self._info = info
        self.name = info.name
        self.INFINITE = info.num_tasks is None  # type: ignore[misc]

    def count(self) -> int | None:
        return self._info.num_tasks

    def task_at(self, index: int) -> Task:
        raise TasksetError(
            f"the tasks of {self.name} are on the server at {self.config.address}",
            remedy="evaluate with --server; to score again here, name the taskset itself",
        )

    @property
    def scores_groups(self) -> bool:
        return self._info.requires_group_scoring

    def source(self) -> str | None:
        return self._info.fingerprint


async def drawn_from(host: Host, taskset: Taskset[Any, Any], num_tasks: int | None) -> AsyncIterator[tuple[Task, int]]:
    """The first tasks of the server's order with their occurrence; a finite order never begins again."""
    taskset.draw(num_tasks)  # an unbounded one is refused
    info = await host.info()
    known = [number for number in (num_tasks, info.num_tasks) if number is not None]
    # A generator has no task at an index of our choice, but a fresh stream begins at its first.
    stream = None if info.by_index else f"eval-{secrets.token_hex(8)}"
    waiting: deque[asyncio.Task[Task]] = deque()
    seen: Counter[str] = Counter()
    asked = 0
    try:
        while asked < min(known) or waiting:
            while asked < min(known) and len(waiting) < (_AHEAD if stream is None else 1):
                ask = host.sample(asked) if stream is None else host.sample(stream=stream)
                waiting.append(asyncio.ensure_future(ask))
                asked += 1
            task = await waiting.popleft()
            yield task, seen[task.uid]
            seen[task.uid] += 1
    finally:
        for one in waiting:
            one.cancel()
        if stream is not None:
            with contextlib.suppress(TreetuneError):
                await _give_back(host, stream)


async def _give_back(host: Host, stream: str) -> None:
    """A stream that is put back to its beginning is forgotten: a server has only so many."""
    state = await host.state(stream)
    await host.restore(msgspec.structs.replace(state, streams={stream: StreamState(0)}))
