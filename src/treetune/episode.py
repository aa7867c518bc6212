"""An Episode is one live run of a task's environment, stepped from outside: by a trainer, over a wire.

    episode = await Episode.start(taskset, task)
    step = await episode.step("an answer", turn=0)

Steps are idempotent by turn number: asking again for the turn that was answered last repeats its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import msgspec

from treetune.environment import Action, Environment, Observation, Step
from treetune.errors import EnvironmentFault, UsageError
from treetune.offload import call
from treetune.rollout import CLOSE_SECONDS, Limits
from treetune.score import finite
from treetune.task import Task
from treetune.taskset import Taskset


class Started(msgspec.Struct, frozen=True):
    """What `start` answers: how to name the episode, and what it shows first."""

    episode: str
    observation: Observation


class Episode:
    def __init__(self, environment: Environment, limits: Limits) -> None:
        self._environment = environment
        self._limits = limits
        self._lock = asyncio.Lock()
        self._turn = 0
        self._last: Step | None = None
        self._closed = False
        self.observation = Observation()

    @classmethod
    async def start(cls, taskset: Taskset[Any, Any], task: Task, limits: Limits | None = None) -> Self:
        limits = limits or Limits()
        async with asyncio.timeout(limits.timeout):
            episode = cls(await call(taskset.environment, task), limits)
            try:
                episode.observation = Observation.of(await call(episode._environment.start))
            except BaseException:
                await asyncio.shield(episode.close())
                raise
        return episode

    async def step(self, action: Any, turn: int | None = None) -> Step:
        """The answer to an action. `turn` counts from 0; without it a step cannot safely be repeated."""
        async with self._lock:
            if turn is not None and turn == self._turn - 1 and self._last is not None:
                return self._last
            if turn is not None and turn != self._turn:
                raise UsageError(f"this episode is at turn {self._turn}, not {turn}", remedy="send the next turn")
            if self._closed:
                raise UsageError("this episode is over", remedy="start another")
            self._last = await self._play(Action.of(action))
            self._turn += 1
            if self._last.done:
                await self.close()
            return self._last

    async def _play(self, action: Action) -> Step:
        try:
            async with asyncio.timeout(self._limits.timeout):
                step = await call(self._environment.step, action)
            if not isinstance(step, Step):
                raise EnvironmentFault(
                    f"{type(self._environment).__name__}.step() returned a {type(step).__name__}",
                    remedy="return a Step",
                )
            step.reward = finite(step.reward, "reward")
        except BaseException:
            # What an environment is worth after a failed step nobody knows.
            await asyncio.shield(self.close())
            raise
        if not step.done and self._limits.max_turns is not None and self._turn + 1 >= self._limits.max_turns:
            step.done = step.truncated = True
        return step

    async def close(self) -> None:
        """Runs the environment's own `close`, once."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await call(self._environment.close)
        except Exception:
            return  # nobody is left to tell

    @property
    def over(self) -> bool:
        return self._closed
