"""The host in this process: it has a taskset, hands out its tasks and runs rollouts and episodes.

    host = await LocalHost.open(taskset, always(policy))
    task = await host.sample()
    trace = await host.run_rollout(task)

Each named stream has one cursor, kept here. `request` names a call so that `cancel` can stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self, TypeVar, Unpack

import msgspec

from treetune.core.contract import Limits
from treetune.core.policy import Policy
from treetune.core.task import Task
from treetune.core.taskset import Taskset, scored_in_group
from treetune.core.trace import Outcome, Trace
from treetune.errors import UsageError, warn_once
from treetune.play import streams
from treetune.play.episode import Episode
from treetune.play.episode_record import EpisodeRecord
from treetune.play.episode_table import Ending, EpisodeHandle, EpisodeTable, SessionLimits
from treetune.play.group import GroupPlan, run_plan, was_cut_off
from treetune.play.leases import DRAW_TRIES, HERE, Draw, check_lease
from treetune.play.protocol import GroupOptions, Health, Info, PlayOptions, Started
from treetune.play.rollout import run_rollout, score_together
from treetune.play.streams import State, Streams
from treetune.play.weights import PAUSE_SECONDS, Calls, Staleness, Weights, WeightsBook, check_version

PolicyOf = Callable[[str | None, str | None], Policy]
"""Returns the policy for a model name and an endpoint address; None means the host's own."""
T = TypeVar("T")


class LocalHost:
    """The host in this process."""

    def __init__(
        self,
        streams: Streams,
        policy_of: PolicyOf,
        limits: Limits | None = None,
        capacity: int | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """`capacity` is the maximum number of concurrent rollouts; further ones wait."""
        self.streams = streams
        self.taskset = streams.taskset
        self._policy_of = policy_of
        self._limits = limits or Limits()
        self._capacity = capacity
        self._free = asyncio.Semaphore(capacity) if capacity is not None else nullcontext()
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self.counts: Counter[str] = Counter() if counts is None else counts
        """Counts of pauses, aborted calls, stragglers, and groups without variance."""
        self.weights = WeightsBook(self.counts)
        self.episodes = EpisodeTable(self._end_episode)
        self._terms = SessionLimits()

    @classmethod
    async def open(
        cls, taskset: Taskset[Any, Any], policy_of: PolicyOf, limits: Limits | None = None, tries: int = DRAW_TRIES
    ) -> Self:
        """`tries` is how often the task of a draw may fail before it is skipped."""
        return cls(await streams.load(taskset, tries), policy_of, limits)

    async def info(self) -> Info:
        return msgspec.structs.replace(info_of(self.streams), capacity=self._capacity)

    async def health(self) -> Health:
        return Health(in_flight=len(self._requests) + len(self.episodes.live))

    async def sample(self, index: int | None = None, *, stream: str = "", lease: float | None = None) -> Task:
        if index is not None:
            return await self.fetch(self.streams.draw_at(index))
        seconds, pending = check_lease(lease or 0), self.streams.pending
        pending.renew_all_work()  # this process holds the leases and is alive
        pending.expire()
        draw, task = await self.streams.sample(stream, self.fetch)
        if seconds:
            pending.lease(draw, task.idx, seconds, HERE)
        return task

    async def renew(self, task: Task, lease: float | None = None) -> bool:
        return self.streams.pending.renew_task(task.idx, HERE, lease)

    async def finish(self, task: Task) -> bool:
        return self.streams.pending.finish_task(task.idx, HERE)

    async def give_back(self, task: Task) -> bool:
        return self.streams.pending.give_back_task(task.idx, HERE)

    async def fetch(self, draw: Draw) -> Task:
        """Make the task of a draw."""
        return await self.streams.fetch(draw)

    def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        return streams.draw_tasks(self.taskset, num_tasks)

    async def run_rollout(self, task: Task, *, rollout: int = 0, **options: Unpack[PlayOptions]) -> Trace:
        if self.taskset.scores_group_of(task):
            raise scored_in_group(self.taskset.name, task)
        with self._leased(task, options) as played:
            trace = await self._run_named(options.get("request"), self._player(task, options)(rollout))
            played.append(trace)
            return trace

    async def run_group(
        self, task: Task, n: int, *, rollouts: Sequence[int] | None = None, **options: Unpack[GroupOptions]
    ) -> list[Trace]:
        plan = GroupPlan.of_options(n, rollouts, options)

        async def score(traces: list[Trace]) -> None:
            if self.taskset.scores_group_of(task):
                await score_together(self.taskset, task, traces, self.narrow(options.get("limits")))

        with self._leased(task, options) as played:
            run = run_plan(plan, self._player(task, options), score, self._drop, self.counts)
            traces = await self._run_named(options.get("request"), run)
            played += traces
            return traces

    def _drop(self, traces: list[Trace]) -> None:
        """Handle the traces of dropped groups; does nothing here."""

    @contextlib.contextmanager
    def _leased(self, task: Task, options: PlayOptions) -> Iterator[list[Trace]]:
        """Keep the lease of the task while its rollouts run, and collect their traces in the list. Afterwards the lease
        is finished; or, if the rollouts were cut off, the task is handed out again."""
        pending, name = self.streams.pending, object()
        played: list[Trace] = []
        if (key := pending.find(task.idx, HERE)) is None:
            yield played
            return
        options.setdefault("attempt", pending.attempt(key))
        pending.begin_work(key, name)
        try:
            yield played
        except BaseException:
            pending.end_work(name, finish=None)
            raise
        if was_cut_off(played):
            pending.end_work(name, finish=False, expired=False)
        else:
            pending.end_work(name, finish=True if options.get("finish", True) else None)

    def _player(self, task: Task, options: PlayOptions) -> Callable[[int], Coroutine[Any, Any, Trace]]:
        """Return a function that plays the rollout with a number."""
        model, endpoint = options.get("model"), options.get("endpoint")
        policy, weights = self._policy_of(model, endpoint), self.weights_of(model, endpoint)
        if (version := options.get("version")) is not None:
            weights.reach(check_version(version))
        if (most := options.get("max_staleness")) is not None:
            Staleness(most, options.get("stale", "cut"))  # raises before any rollout begins
        limits, sampling = self.narrow(options.get("limits")), options.get("sampling")
        occurrence, attempt = options.get("occurrence", 0), options.get("attempt", 0)

        async def play(rollout: int) -> Trace:
            async with self._free:
                trace = await run_rollout(
                    self.taskset,
                    task,
                    policy,
                    sampling=sampling,
                    limits=limits,
                    occurrence=occurrence,
                    rollout=rollout,
                    weights=weights,
                    staleness=None if most is None else Staleness(most, options.get("stale", "cut")),
                )
            trace.step = options.get("step")
            trace.attempt = attempt
            return trace

        return play

    def weights_of(self, model: str | None = None, endpoint: str | None = None) -> Weights:
        """The weights of the model that a request names."""
        return self.weights.of(model, endpoint)

    async def set_version(self, version: int, *, model: str | None = None, endpoint: str | None = None) -> None:
        self.weights_of(model, endpoint).set_version(version)

    async def pause(
        self,
        *,
        calls: Calls = "finish",
        seconds: float = PAUSE_SECONDS,
        model: str | None = None,
        endpoint: str | None = None,
    ) -> bool:
        return await self.weights_of(model, endpoint).pause(calls, seconds)

    async def resume(
        self, version: int | None = None, *, model: str | None = None, endpoint: str | None = None
    ) -> None:
        self.weights_of(model, endpoint).resume(version)

    async def start(
        self,
        task: Task,
        *,
        step: int | None = None,
        terms: SessionLimits | None = None,
        name: Hashable | None = None,
        holder: bytes = HERE,
    ) -> Started:
        """Start an episode. The interfaces of a server pass their own `terms`; `name` is the name of the request,
        and `holder` the client that has a lease on the task."""
        id, record = f"e-{secrets.token_hex(12)}", self._new_record(task, step)
        if (key := self.streams.pending.find(task.idx, holder, free=True)) is not None:
            self.streams.pending.begin_work(key, id)
        try:
            home, started = await self._open(id, task)
        except BaseException as error:
            self.streams.pending.end_work(id, finish=None)
            if record is not None and isinstance(error, Exception):
                record.fail(error, "start")
                record.end(Outcome.ENVIRONMENT_ERROR)
            raise
        if started.contract.group_score:
            warn_once(
                f"score_group() of {self.taskset.name} is not called for episodes that a client steps: each is scored "
                "alone (run_group() plays and scores a whole group)"
            )
        if record is not None:
            record.begin(started.observation, started.tools, started.contract)
        self.episodes.add(id, home, terms or self._terms, name, record)
        return started

    async def look_at_tools(self, task: Task) -> list[dict[str, Any]]:
        """The tools that an episode of the task offers. The episode is closed at once and not counted."""
        home, started = await self._open(f"e-{secrets.token_hex(12)}", task)
        await home.close()
        return started.tools

    def _new_record(self, task: Task, step: int | None) -> EpisodeRecord | None:
        """Make the record of a new episode. Overridden by hosts that record results, such as a server."""
        return None

    def _end_episode(self, id: str, why: Ending) -> None:
        """Hand out the task of an idle or lost episode again; finish any other task."""
        self.streams.pending.end_work(id, finish=why.kind not in ("expired", "worker_lost", "stopping"))

    async def _open(self, id: str, task: Task) -> tuple[EpisodeHandle, Started]:
        """Start the environment of a task; return its handle, and what it shows."""
        episode = await Episode.start(self.taskset, task, self._limits)
        return episode, Started(id, episode.observation, episode.tools, episode.contract.resolved)

    async def step(
        self, episode: str, action: Any, turn: int | None = None, *, terms: SessionLimits | None = None
    ) -> Any:
        """Play an action and return a `Step`, or the step as rendered by the terms."""
        self.streams.pending.renew_work(episode)
        return await self.episodes.step(episode, action, turn, terms or self._terms)

    async def cancel(self, id: str) -> bool:
        """Stop a named request or end an episode; return whether there was one."""
        if (running := self._requests.get(id)) is not None:
            running.cancel()
            return True
        return await self.episodes.cancel(id)

    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None:
        self.streams.observe(task, reward, stream)

    async def state(self, stream: str | None = None) -> State:
        return self.streams.state(stream)

    async def restore(self, state: State) -> None:
        self.streams.restore(state)

    async def close(self) -> None:
        for running in list(self._requests.values()):
            running.cancel()
        await self.episodes.close()

    async def _run_named(self, request: str | None, run: Coroutine[Any, Any, T]) -> T:
        if request is None:
            return await run
        if request in self._requests:
            run.close()
            raise UsageError(f"a request named {request!r:.80} is under way", remedy="give each its own name")
        self._requests[request] = work = asyncio.ensure_future(run)
        try:
            return await work  # cancelled together with its caller
        finally:
            del self._requests[request]

    def narrow(self, asked: Limits | None) -> Limits:
        """The limits of a request, narrowed to the host's own. The timeout reward is never raised, or a client could
        end every rollout at once and earn the reward of a right answer."""
        own = self._limits
        if asked is None:
            return own
        most = 0.0 if own.timeout_reward is None else own.timeout_reward
        if asked.timeout_reward is not None and asked.timeout_reward > most:
            raise UsageError(
                f"limits.timeout_reward is {asked.timeout_reward:g}, but this host allows at most {most:g}",
                remedy=f"ask for {most:g} or less, or serve with --limits.timeout_reward {asked.timeout_reward:g}",
            )
        return own.narrow(asked)


def always(policy: Policy) -> PolicyOf:
    """Use one policy for every request."""
    return lambda model, endpoint: policy


def info_of(streams: Streams) -> Info:
    return Info(
        name=streams.taskset.name,
        num_tasks=streams.count,
        requires_group_scoring=streams.taskset.scores_groups,
        fingerprint=streams.identity.digest,
        cursor=streams.cursor(),
        cursors=dict(streams.cursors),
        by_index=not streams.sequential,
    )
