"""Plays answers that were written beforehand, on the tasks of a target, a bounded number at a time.

player = Player(taskset, limits, max_concurrent=16)
trace = await player.play(subject, ["ls", "DONE"])          # the last action is repeated until the episode ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from treetune.audit.sample import Answer, Subject
from treetune.core.policy import Completion, Policy, Request
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.models.scripted import Echo, completion_of
from treetune.play.episode import Limits, with_deadline
from treetune.play.rollout import run_rollout, score_together

ECHO = "\0echo"
"""In the place of an action: the last message, repeated."""

T = TypeVar("T")


class Script(Policy):
    """Says one action a turn, and the last of them from then on."""

    name = "audit"

    def __init__(self, answer: Answer) -> None:
        self._actions = [answer] if isinstance(answer, str) else answer or [""]

    async def complete(self, request: Request) -> Completion:
        action = self._actions[min(request.turn, len(self._actions) - 1)]
        if not isinstance(action, str):
            return completion_of(action)
        if action == ECHO:
            return await Echo().complete(request)
        return Completion(text=action if action.startswith(request.prefix) else request.prefix + action)


class Player:
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        limits: Limits,
        max_concurrent: int,
        on_rollout: Callable[[], object] = lambda: None,
    ) -> None:
        self.taskset, self.limits = taskset, limits
        self._free = asyncio.Semaphore(max_concurrent)
        self._on_rollout = on_rollout
        self.rollouts = 0

    async def play(self, subject: Subject, answer: Answer, *, max_turns: int | None = None) -> Trace:
        """The trace of one answer. Where tasks are scored in groups, the gold answer is the other of the group."""
        limits = self.limits if max_turns is None else msgspec.structs.replace(self.limits, max_turns=max_turns)
        async with self._free:
            trace = await self._play(subject, answer, limits)
            if trace.outcome.scored and self.taskset.scores_group_of(subject.task):
                others = [] if subject.gold is None else [await self._play(subject, subject.gold, limits)]
                await score_together(self.taskset, subject.task, [trace, *others], self.limits)
        self._on_rollout()
        return trace

    async def _play(self, subject: Subject, answer: Answer, limits: Limits) -> Trace:
        self.rollouts += 1
        return await run_rollout(
            self.taskset, subject.task, Script(answer), limits=limits, occurrence=subject.occurrence
        )

    async def each_of(self, answers: Iterable[tuple[Subject, Answer]]) -> list[Trace]:
        return list(await asyncio.gather(*(self.play(subject, answer) for subject, answer in answers)))

    async def bounded(self, work: Awaitable[T]) -> T:
        """Other work than a rollout, within the same number."""
        async with self._free:
            return await with_deadline(work, self.limits)

    async def each(self, work: Callable[[Subject], Awaitable[T]], subjects: Iterable[Subject]) -> list[T]:
        """`work` on every task at once; `play` keeps to the number that may be under way."""
        return list(await asyncio.gather(*map(work, subjects)))
