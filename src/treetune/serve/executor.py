"""A Crew does the jobs of a server: in this process, or (`pool.py`) in many workers.

A job is one request. Its crew calls `done` exactly once, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from treetune.serve.work import Done, Work


class Job(msgspec.Struct):
    id: bytes
    method: str
    payload: bytes
    done: Callable[[Done], None]
    size: int = 1
    """How many rollouts it counts as."""
    episode: str | None = None
    """Where that episode lives, the job must go."""
    attempts: int = 0
    stopped: bool = False
    show: Callable[[str], object] | None = None
    """Is given what the environment shows while a step is under way."""


class Crew(Protocol):
    async def start(self) -> None:
        """Returns when it is ready to work."""
        ...

    def submit(self, job: Job) -> None: ...

    def stop(self, id: bytes) -> bool:
        """Stops the job with this id; it is done with an error. Whether there was one."""
        ...

    def forget(self, episode: str) -> None:
        """An episode that nobody steps any more is not counted as work."""
        ...

    def stats(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class LocalCrew:
    """Does every job in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        return None

    def submit(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._do(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, id: bytes) -> bool:
        return self._work.stop(id)

    def forget(self, episode: str) -> None:
        return None

    def stats(self) -> dict[str, Any]:
        return {"workers": 0, "queue": 0}

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _do(self, job: Job) -> None:
        job.done(await self._work.do(job.method, job.id, job.payload))
