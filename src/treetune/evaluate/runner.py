"""Runs an evaluation: draws tasks, keeps a bounded number of rollouts under way, saves each as it ends.

summary = await Runner(evaluation, policy, run).run()

With a host its tasks come from there and its rollouts run there; without one, both are here.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from treetune.errors import TasksetError, TreetuneError, first_of
from treetune.evaluate.config import Evaluation
from treetune.evaluate.run_folder import RunFolder
from treetune.evaluate.served import drawn_from
from treetune.evaluate.summary import Summary, Tally
from treetune.host import Host
from treetune.offload import call_apart
from treetune.policy import Policy
from treetune.rollout import run_rollout, score_together
from treetune.task import Task
from treetune.taskset import Taskset
from treetune.trace import Failure, Outcome, Trace

Key = tuple[str, int, int]

_DRAWN_AT_ONCE = 64
_DRAWING_SECONDS = 0.02


class Job(msgspec.Struct):
    """The rollouts that one task still needs."""

    task: Task
    occurrence: int
    rollouts: list[int]
    grouped: bool


class Runner:
    def __init__(
        self,
        evaluation: Evaluation,
        policy: Policy | None,
        run: RunFolder[Trace],
        on_trace: Callable[[Trace, Tally], None] | None = None,
        host: Host | None = None,
    ) -> None:
        self._config = evaluation.config
        self._taskset = evaluation.taskset
        self._policy = policy
        self.host = host
        self._run = run
        self.on_trace = on_trace
        self._done: set[Key] = set()
        self._free = asyncio.Semaphore(self._config.max_concurrent)
        self.tally = Tally(self._config.pass_threshold)

    def resume(self) -> int:
        """Keeps what earlier runs finished; gives its number. What failed is tried again."""
        scored: Counter[tuple[str, int]] = Counter()
        for trace in self._run.read():
            scored[trace.uid, trace.occurrence] += trace.outcome.scored

        def wanted(trace: Trace) -> bool:
            if trace.key in self._done or not trace.outcome.scored:
                return False
            if scored[trace.uid, trace.occurrence] < self._config.num_rollouts and self._grouped(trace):
                return False
            self._done.add(trace.key)
            self.tally.add(trace)
            return True

        self._run.keep(wanted)
        return len(self._done)

    def _grouped(self, trace: Trace) -> bool:
        """Whether its reward hangs on the other rollouts of its task."""
        try:
            return self._taskset.scores_group_of(trace.task)
        except TasksetError:  # a task that the taskset no longer has
            return False

    async def run(self) -> Summary:
        """Runs to the end, or to a cancellation; the summary on disk says what there is either way."""
        if self._taskset.scores_groups and self._config.num_rollouts > self._config.max_concurrent:
            warnings.warn("a group is larger than max_concurrent: its rollouts run in several batches", stacklevel=2)
        jobs: asyncio.Queue[Job | None] = asyncio.Queue(self._config.max_concurrent)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._produce(jobs))
                for _ in range(self._config.max_concurrent):
                    tasks.create_task(self._work(jobs))
        except BaseExceptionGroup as group:
            error = first_of(group)
            raise error from error.__cause__
        finally:
            summary = self.tally.summary()
            self._run.write_summary(summary)
        return summary

    async def _produce(self, jobs: asyncio.Queue[Job | None]) -> None:
        unseen = set(self._done)
        tasks = 0
        number = self._config.num_tasks
        source = drawn(self._taskset, number) if self.host is None else drawn_from(self.host, self._taskset, number)
        async for task, occurrence in source:
            keys = [(task.uid, occurrence, number) for number in range(self._config.num_rollouts)]
            unseen.difference_update(keys)
            tasks += 1
            missing = [key[2] for key in keys if key not in self._done]
            if missing and self._taskset.scores_group_of(task):
                await jobs.put(Job(task, occurrence, missing, grouped=True))
            else:
                for number in missing:
                    await jobs.put(Job(task, occurrence, [number], grouped=False))
        if unseen:
            self._forget(unseen)
        self.tally.expected = tasks * self._config.num_rollouts
        for _ in range(self._config.max_concurrent):
            await jobs.put(None)

    async def _work(self, jobs: asyncio.Queue[Job | None]) -> None:
        while (job := await jobs.get()) is not None:
            if job.grouped and self.host is not None:
                traces = await self._group_there(self.host, job)
            elif job.grouped:
                traces = await asyncio.gather(*(self._rollout(job, number) for number in job.rollouts))
                await score_together(self._taskset, job.task, traces, self._config.limits)
            else:
                traces = [await self._rollout(job, job.rollouts[0])]
            for trace in traces:
                self._run.append(trace)
                self.tally.add(trace)
                if self.on_trace is not None:
                    self.on_trace(trace, self.tally)

    async def _rollout(self, job: Job, number: int) -> Trace:
        async with self._free:
            if self.host is not None:
                return await self._rollout_there(self.host, job, number)
            assert self._policy is not None
            return await run_rollout(
                self._taskset,
                job.task,
                self._policy,
                sampling=self._config.sampling,
                limits=self._config.limits,
                occurrence=job.occurrence,
                rollout=number,
            )

    async def _rollout_there(self, host: Host, job: Job, number: int) -> Trace:
        config = self._config
        try:
            return await host.run_rollout(
                job.task,
                model=config.model,
                sampling=config.sampling,
                limits=config.limits,
                occurrence=job.occurrence,
                rollout=number,
            )
        except TreetuneError as error:
            return self._failed(job, number, error)

    async def _group_there(self, host: Host, job: Job) -> list[Trace]:
        config = self._config
        try:
            return await host.run_group(
                job.task,
                len(job.rollouts),
                model=config.model,
                sampling=config.sampling,
                limits=config.limits,
                occurrence=job.occurrence,
                rollouts=job.rollouts,
            )
        except TreetuneError as error:
            return [self._failed(job, number, error) for number in job.rollouts]

    def _failed(self, job: Job, number: int, error: TreetuneError) -> Trace:
        """What the server could not run is a failure of that rollout, which a resumed run tries again."""
        return Trace(
            task=job.task,
            uid=job.task.uid,
            occurrence=job.occurrence,
            rollout=number,
            model=self._config.model,
            outcome=Outcome.ENVIRONMENT_ERROR,
            failure=Failure.of(error, "server"),
        )

    def _forget(self, unseen: set[Key]) -> None:
        warnings.warn(
            f"{len(unseen)} saved rollouts belong to tasks that this taskset no longer gives; moved aside",
            stacklevel=2,
        )
        self._run.keep(lambda trace: trace.key not in unseen)
        self.tally = Tally(self._config.pass_threshold)
        for trace in self._run.read():
            self.tally.add(trace)


async def drawn(taskset: Taskset[Any, Any], num_tasks: int | None) -> AsyncIterator[tuple[Task, int]]:
    """Tasks with their occurrence, drawn off the loop in small batches: building one may take long."""
    tasks = taskset.draw(num_tasks)
    seen: Counter[str] = Counter()
    while batch := await call_apart(_take, tasks):
        for task in batch:
            uid = task.uid
            yield task, seen[uid]
            seen[uid] += 1


def _take(tasks: Iterator[Any]) -> list[Any]:
    batch: list[Any] = []
    until = time.monotonic() + _DRAWING_SECONDS
    for task in islice(tasks, _DRAWN_AT_ONCE):
        batch.append(task)
        if time.monotonic() > until:
            break
    return batch
