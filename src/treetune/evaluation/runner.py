"""Runs an evaluation: draws tasks, runs a bounded number of rollouts at once, and saves each when it ends.

await Runner(evaluation, run).run(host)

A host supplies the tasks and runs the rollouts, in this process or another. This module only counts and saves.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Trace
from treetune.errors import TasksetError, TreetuneError
from treetune.evaluation.config import Evaluation, TaskCode
from treetune.play.protocol import Host, PlayOptions
from treetune.runs.folder import RunFolder
from treetune.runs.summary import Tally
from treetune.system.threads import call

T = TypeVar("T")


async def run_bounded(items: AsyncIterator[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Runs `work` on every item, at most `at_once` at a time. The first error stops it and is raised unchanged."""
    free = asyncio.Semaphore(at_once)

    async def run_one(item: T) -> None:
        try:
            await work(item)
        finally:
            free.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for item in items:
                await free.acquire()
                group.create_task(run_one(item))
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


class Runner:
    """Plays the rollouts that a run lacks. A trace with only a task and a number marks a rollout that is still to be
    played."""

    def __init__(self, evaluation: Evaluation, run: RunFolder[Trace] | None) -> None:
        """Without a `run` folder, nothing is saved or resumed."""
        self._config = evaluation.config
        self._taskset = evaluation.taskset
        self._run = run
        self._code: TaskCode | None = None
        self._host: Host
        self._done: set[tuple[str, int, int]] = set()
        self.on_trace: Callable[[Trace, Tally], None] = lambda trace, tally: None
        self.tally = Tally(self._config.pass_threshold)

    def resume(self) -> int:
        """Keeps the scored rollouts and returns how many there are. Failed ones are played again."""
        assert self._run is not None
        scored: Counter[tuple[str, int]] = Counter()
        for trace in self._run.read():
            scored[trace.uid, trace.occurrence] += trace.scored

        def wanted(trace: Trace) -> bool:
            if trace.key in self._done or not trace.scored:
                return False
            if scored[trace.uid, trace.occurrence] < self._config.num_rollouts and self._grouped(trace):
                return False
            self._done.add(trace.key)
            self.tally.add(trace)
            return True

        self._run.keep(wanted)
        return len(self._done)

    def _grouped(self, trace: Trace) -> bool:
        """Whether its reward depends on the other rollouts of its task."""
        with suppress(TasksetError):  # the taskset no longer has the task
            return self._taskset.scores_group_of(trace.task)
        return False

    async def run(self, host: Host) -> None:
        if self._taskset.scores_groups and self._config.num_rollouts > self._config.max_concurrent:
            warnings.warn("a group is larger than max_concurrent: its rollouts run in several batches", stacklevel=2)
        self._host = host
        await self.run_all()

    async def run_all(self) -> None:
        """Runs to the end or until cancelled; either way it writes the summary of the results so far."""
        try:
            await run_bounded(self._wanted(), self._play_and_save, self._config.max_concurrent)
        finally:
            if self._run is not None:
                self._run.write_summary(self.tally.summary())

    def _is_spent(self) -> bool:
        """Whether a token limit is reached. Running rollouts are still finished, because their tokens are already paid
        for."""
        spent = {"max_judge_tokens": self.tally.judge_tokens, "max_tokens_total": self.tally.tokens_total}
        for key, tokens in spent.items():
            most = getattr(self._config, key)
            if most is not None and tokens >= most:
                self.tally.stopped = f"{tokens:,} tokens reach {key}: {most:,}"
        return self.tally.stopped is not None

    async def _play_and_save(self, wanted: list[Trace]) -> None:
        if self._is_spent():
            return
        for trace in await self._play(wanted):
            if self._run is not None:
                self._run.append(trace)
                self._remember_code(trace.task)
            self.tally.add(trace)
            self.on_trace(trace, self.tally)

    def _remember_code(self, task: Task) -> None:
        """Marks the code that a task of this run names as the user's, for viewing or rescoring the run later."""
        assert self._run is not None
        self._code = self._code or TaskCode(self._run.path)
        self._code.remember(self._taskset, task)

    async def _wanted(self) -> AsyncIterator[list[Trace]]:
        """The rollouts to play, in lists of one task that are scored together."""
        unseen, config = set(self._done), self._config
        tasks = 0
        async for task, occurrence in self._chosen() if config.tasks else self._host.draw(config.num_tasks):
            tasks += 1
            named = partial(Trace, task=task, uid=task.uid, occurrence=occurrence, model=config.model)
            traces = [named(rollout=number) for number in range(config.num_rollouts)]
            unseen.difference_update(trace.key for trace in traces)
            missing = [trace for trace in traces if trace.key not in self._done]
            if missing and self._is_spent():
                return
            if missing and self._taskset.scores_group_of(task):
                yield missing
            else:
                for trace in missing:
                    yield [trace]
        if unseen and self._run is not None:
            gone = "belong to tasks that this taskset no longer has; moved aside"
            warnings.warn(f"{len(unseen)} saved rollouts {gone}", stacklevel=2)
            self._run.keep(lambda trace: trace.key not in unseen)
            self.tally = Tally(config.pass_threshold)
            for trace in self._run.read():
                self.tally.add(trace)
        self.tally.expected = tasks * config.num_rollouts

    async def _chosen(self) -> AsyncIterator[tuple[Task, int]]:
        """The tasks that the config names, once each."""
        for index in dict.fromkeys(self._config.tasks):
            yield await call(self._taskset.__getitem__, index), 0

    async def _play(self, wanted: list[Trace]) -> list[Trace]:
        first, numbers, config = wanted[0], [trace.rollout for trace in wanted], self._config
        sampling, limits = config.sampling, config.limits
        asked = PlayOptions(model=config.model, sampling=sampling, limits=limits, occurrence=first.occurrence)
        try:
            if self._taskset.scores_group_of(first.task):
                return await self._host.run_group(first.task, len(wanted), rollouts=numbers, **asked)
            return [await self._host.run_rollout(first.task, rollout=first.rollout, **asked)]
        except TreetuneError as error:  # a failure of these rollouts, which a resumed run retries
            for trace in wanted:
                trace.fail(Outcome.ENVIRONMENT_ERROR, Failure.of(error, "host"))
            return wanted
