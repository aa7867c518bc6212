"""An Episode is one live run of a task's environment, stepped from outside: by a trainer, over a wire.

    episode = await Episode.start(taskset, task)
    step = await episode.step("an answer", turn=0)

Steps are idempotent by turn number: asking again for the turn that was answered last repeats its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
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
        self._environment: Environment | None = environment
        """None once it is closed: what it holds is let go, though the last answer may still be asked for."""
        self._limits = limits
        self._lock = asyncio.Lock()
        self._turn = 0
        self._last: Step | None = None
        self.observation = Observation()
        self.heard = time.monotonic()
        """When it was last stepped."""

    @classmethod
    async def start(cls, taskset: Taskset[Any, Any], task: Task, limits: Limits | None = None) -> Self:
        limits = limits or Limits()
        async with asyncio.timeout(limits.timeout):
            environment = await call(taskset.environment, task)
            episode = cls(environment, limits)
            try:
                episode.observation = Observation.of(await call(environment.start))
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
            if self._environment is None:
                raise UsageError("this episode is over", remedy="start another")
            self._last = await self._play(self._environment, Action.of(action))
            self._turn += 1
            if self._last.done:
                await self.close()
            return self._last

    async def _play(self, environment: Environment, action: Action) -> Step:
        try:
            step = await self._in_time(call(environment.step, action))
            if not isinstance(step, Step):
                raise EnvironmentFault(
                    f"{type(environment).__name__}.step() returned a {type(step).__name__}",
                    remedy="return a Step",
                )
            _check(environment, step)
        except BaseException:
            # What an environment is worth after a failed step nobody knows.
            await asyncio.shield(self.close())
            raise
        if not step.done and self._limits.max_turns is not None and self._turn + 1 >= self._limits.max_turns:
            step.done = step.truncated = True
        return step

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        if self._limits.timeout is None:
            return await work
        async with asyncio.timeout(self._limits.timeout):
            return await work

    async def close(self) -> None:
        """Runs the environment's own `close`, once."""
        if self._environment is None:
            return
        environment, self._environment = self._environment, None
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await call(environment.close)
        except Exception:
            return  # nobody is left to tell

    @property
    def over(self) -> bool:
        return self._environment is None

    @property
    def busy(self) -> bool:
        """A step is under way."""
        return self._lock.locked()


def _check(environment: Environment, step: Step) -> None:
    """What an environment answers may be of its own making; from here on it is what it should be."""
    step.reward = finite(step.reward, "reward")
    if step.done not in (True, False) or not isinstance(step.info, dict):
        raise EnvironmentFault(
            f"{type(environment).__name__}.step() returned done={step.done!r:.60}, info={step.info!r:.60}",
            remedy="`done` is True or False, and `info` a dict",
        )
    step.done = bool(step.done)
