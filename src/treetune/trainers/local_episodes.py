"""Episodes of a taskset in this process, with the face of `TaskServerClient`: for training without a server.

    episodes = LocalEpisodes(taskset)
    (episode,) = await episodes.start_many([3])
    (step,) = await episodes.step_many([(episode, "42")])

What fails is a `ServeError` here too, so that a trainer handles both alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from treetune import streams
from treetune.environment import Step
from treetune.episode import DeadlinePassed, Episode, Limits
from treetune.errors import TreetuneError, described
from treetune.serve.errors import ServeError
from treetune.streams import Streams
from treetune.taskset import Taskset

T = TypeVar("T")


class LocalEpisode:
    def __init__(self, episode: Episode, info: dict[str, Any]) -> None:
        self._episode = episode
        self.observation = episode.observation
        self.info = info

    @property
    def over(self) -> bool:
        return self._episode.over

    async def step(self, action: Any) -> Step:
        return self._episode.with_ending(await self._episode.step(action))

    async def cancel(self) -> None:
        await self._episode.close()


class LocalEpisodes:
    def __init__(self, taskset: Taskset[Any, Any], timeout: float = 600.0) -> None:
        """`timeout` is for one start or step, in seconds."""
        self._taskset = taskset
        self._limits = Limits(timeout=timeout)
        self._loading = asyncio.Lock()
        self._streams: Streams | None = None

    async def info(self) -> dict[str, Any]:
        return {"name": self._taskset.name, "num_tasks": (await self._loaded()).count}

    async def start(self, task_index: int) -> LocalEpisode:
        task = await (await self._loaded()).task_at(task_index)
        episode = await Episode.start(self._taskset, task, self._limits)
        return LocalEpisode(episode, {"task_index": task_index, "data_source": task.data_source})

    async def start_many(self, task_indices: Sequence[int]) -> list[LocalEpisode | ServeError]:
        starting = [asyncio.ensure_future(_or_error(self.start(index))) for index in task_indices]
        try:
            return list(await asyncio.gather(*starting))
        except asyncio.CancelledError:  # nobody gets those that have started
            for begun in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(begun, LocalEpisode):
                    await begun.cancel()
            raise

    async def step_many(self, moves: Sequence[tuple[LocalEpisode, Any]]) -> list[Step | ServeError]:
        return list(await asyncio.gather(*(_or_error(episode.step(action)) for episode, action in moves)))

    async def close(self) -> None:
        """Nothing outlives its episode here."""

    async def _loaded(self) -> Streams:
        async with self._loading:
            if self._streams is None:
                self._streams = await streams.load(self._taskset)
            return self._streams


async def _or_error(work: Awaitable[T]) -> T | ServeError:
    """A failure of the environment is one of the machinery, not of the model."""
    try:
        return await work
    except TreetuneError as error:
        return ServeError(error.message, remedy=error.remedy)
    except DeadlinePassed as error:
        return ServeError(f"the environment did not answer in time: {error}", remedy="allow more: timeout=")
    except Exception as error:
        return ServeError(described(error))
