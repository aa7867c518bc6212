"""Episodes of a taskset in this process, with the face of `TaskServerClient`: what fails is a `ServeError` here too.

episodes = LocalEpisodes(streams)
episode = await episodes.start(task_index)
step = await episode.step("an answer")
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Self, TypeVar

from treetune.chat.calls import ToolCall
from treetune.core.environment import Action, Environment, Observation, SingleTurn, Step
from treetune.errors import format_error
from treetune.play.episode import DeadlinePassed, Episode, Limits
from treetune.play.streams import Streams
from treetune.serve import ServeError

T = TypeVar("T")


class LocalEpisode(Episode):
    info: dict[str, Any] = {}
    one_answer = False
    """Any answer is its end: no environment was written for it, and nothing can be called."""
    scores_answers = True
    """An answer that calls no tool is scored; else it only ends the episode."""

    async def play_turn(self, action: Action | list[ToolCall]) -> Step:
        return self.with_ending(await super().play_turn(action))

    async def begin(self) -> Observation:
        observation = await super().begin()
        self.one_answer = isinstance(self._environment, SingleTurn) and not self.tools
        self.scores_answers = getattr(type(self._environment), "step", None) is not Environment.step
        return observation

    async def cancel(self) -> None:
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class LocalEpisodes:
    def __init__(self, streams: Streams, timeout: float = 600.0) -> None:
        """`timeout` is for one start or step, in seconds."""
        self._streams, self._limits = streams, Limits(timeout=timeout)

    async def info(self) -> dict[str, Any]:
        return {"num_tasks": self._streams.count}

    async def start(self, task_index: int) -> LocalEpisode:
        task = await self._streams.fetch(self._streams.draw_at(task_index))
        episode = await LocalEpisode.start(self._streams.taskset, task, self._limits)
        episode.info = {"task_index": task_index, "data_source": task.data_source}
        return episode

    async def start_many(self, task_indices: Sequence[int]) -> list[LocalEpisode | ServeError]:
        starting = [asyncio.ensure_future(or_error(self.start(index))) for index in task_indices]
        try:
            return list(await asyncio.gather(*starting))
        except asyncio.CancelledError:  # nobody gets those that have started
            for begun in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(begun, LocalEpisode):
                    await begun.cancel()
            raise

    async def step_many(self, moves: Sequence[tuple[LocalEpisode, Any]]) -> list[Step | ServeError]:
        return list(await asyncio.gather(*(or_error(episode.step(action)) for episode, action in moves)))

    async def close(self) -> None:
        """Nothing outlives its episode here."""


async def or_error(work: Awaitable[T]) -> T | ServeError:
    """A failure of the environment is one of the machinery, not of the model."""
    try:
        return await work
    except ServeError as error:
        return error
    except DeadlinePassed as error:
        return ServeError(f"the environment did not answer in time: {error}", remedy="allow more: timeout=")
    except Exception as error:
        return ServeError(getattr(error, "message", format_error(error)), remedy=getattr(error, "remedy", None))
