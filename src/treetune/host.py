"""A Host owns a taskset and runs its episodes. The in-process one, the server's and the remote client are all one.

    host = await LocalHost.open(taskset, always(policy))
    task = await host.sample()
    trace = await host.run_rollout(task)

One cursor for each named stream, owned in one place. `request` names a call so that `cancel` can stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, Self, TypeVar

import msgspec

from treetune import streams
from treetune.environment import Step
from treetune.episode import Episode, Limits, Started
from treetune.errors import InfiniteTasksetError, TreetuneError, UsageError
from treetune.policy import Policy, Sampling
from treetune.rollout import run_rollout, score_together
from treetune.streams import State, Streams, StreamState
from treetune.task import Task
from treetune.taskset import Taskset
from treetune.trace import Trace

PROTOCOL = 2
"""The version of what hosts and clients say to each other. 2: a failed rollout has no reward."""
EPISODE_IDLE_SECONDS = 900.0
"""An episode that nobody steps for so long is closed."""
EPISODE_ENDED_SECONDS = 60.0
"""How long the last answer of an episode that is over can be asked for again."""
MOST_IN_GROUP = 4096
_AHEAD = 32
"""Tasks that are asked of a remote host before they are needed."""

PolicyOf = Callable[[str | None, str | None], Policy]
"""Who answers, by the name of a model and the address of its endpoint; None: the host's own."""
T = TypeVar("T")


class Info(msgspec.Struct, kw_only=True):
    """What a host serves."""

    name: str = ""
    num_tasks: int | None = None
    """How many tasks an epoch has; None only where there is no end."""
    requires_group_scoring: bool = False
    """`run_rollout` is refused where a task is scored in a group: use `run_group`."""
    fingerprint: str = ""
    """Changes with the code, the config and the data behind the tasks."""
    cursor: int = 0
    """The next index of the stream without a name."""
    cursors: dict[str, int] = {}
    capacity: int | None = None
    """The most rollouts under way at once; None: no limit."""
    by_index: bool = True
    """Whether `sample` can be asked for an index: not where the taskset is only a generator."""
    protocol: int = PROTOCOL
    models: list[str] = []


class Health(msgspec.Struct):
    """Answered only by a host that is ready to serve."""

    ready: bool = True
    in_flight: int = 0


class Host(Protocol):
    async def info(self) -> Info: ...
    async def health(self) -> Health: ...
    async def sample(self, index: int | None = None, *, stream: str = "") -> Task: ...
    def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        """The first tasks of the order, each once, with its occurrence; no cursor moves."""
        ...

    async def run_rollout(
        self,
        task: Task,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        occurrence: int = 0,
        rollout: int = 0,
        request: str | None = None,
    ) -> Trace: ...
    async def run_group(
        self,
        task: Task,
        n: int,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        occurrence: int = 0,
        rollouts: Sequence[int] | None = None,
        request: str | None = None,
    ) -> list[Trace]: ...
    async def start(self, task: Task) -> Started: ...
    async def step(self, episode: str, action: Any, turn: int | None = None) -> Step: ...
    async def cancel(self, id: str) -> bool: ...
    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None: ...
    async def state(self, stream: str | None = None) -> State: ...
    async def restore(self, state: State) -> None: ...
    async def close(self) -> None: ...


class LocalHost:
    """The host in this process."""

    def __init__(
        self, streams: Streams, policy_of: PolicyOf, limits: Limits | None = None, capacity: int | None = None
    ) -> None:
        """`capacity` is the most rollouts that are under way at once; others wait."""
        self.streams = streams
        self.taskset = streams.taskset
        self._policy_of = policy_of
        self._limits = limits or Limits()
        self._capacity = capacity
        self._free = asyncio.Semaphore(capacity) if capacity is not None else nullcontext()
        self._requests: dict[str, asyncio.Task[Any]] = {}
        self._episodes: dict[str, Episode] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Future[bool]] = set()
        self._trimmer = MemoryTrimmer()

    @classmethod
    async def open(cls, taskset: Taskset[Any, Any], policy_of: PolicyOf, limits: Limits | None = None) -> Self:
        return cls(await streams.load(taskset), policy_of, limits)

    async def info(self) -> Info:
        info = info_of(self.streams)
        info.capacity = self._capacity
        return info

    async def health(self) -> Health:
        return Health(in_flight=len(self._requests) + len(self._episodes))

    async def sample(self, index: int | None = None, *, stream: str = "") -> Task:
        """The next task of a stream; with an index that task, and no cursor moves."""
        if index is not None:
            return await self.streams.task_at(index)
        return await self.streams.fetch(self.streams.advance(stream))

    def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        return streams.draw_tasks(self.taskset, num_tasks)

    async def run_rollout(
        self,
        task: Task,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        occurrence: int = 0,
        rollout: int = 0,
        request: str | None = None,
    ) -> Trace:
        if self.taskset.scores_group_of(task):
            raise UsageError(
                f"task {task.idx} of {self.taskset.name} is scored together with its group",
                remedy="call run_group(task, n) instead of run_rollout(task)",
            )
        policy = self._policy_of(model, endpoint)
        run = self._rollout(task, policy, sampling, self._narrowed(limits), occurrence, rollout)
        return await self._named(request, run)

    async def _rollout(
        self,
        task: Task,
        policy: Policy,
        sampling: Sampling | None,
        limits: Limits,
        occurrence: int,
        rollout: int,
    ) -> Trace:
        async with self._free:
            return await run_rollout(
                self.taskset, task, policy, sampling=sampling, limits=limits, occurrence=occurrence, rollout=rollout
            )

    async def run_group(
        self,
        task: Task,
        n: int,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        occurrence: int = 0,
        rollouts: Sequence[int] | None = None,
        request: str | None = None,
    ) -> list[Trace]:
        """n rollouts of one task, scored together where the taskset does so. `rollouts` are their numbers."""
        numbers = list(rollouts) if rollouts is not None else list(range(n))
        if not 1 <= n <= MOST_IN_GROUP or len(numbers) != n:
            raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, each with a number; got {n}")
        policy, limits = self._policy_of(model, endpoint), self._narrowed(limits)

        async def run() -> list[Trace]:
            play = [self._rollout(task, policy, sampling, limits, occurrence, number) for number in numbers]
            traces = list(await asyncio.gather(*play))
            if self.taskset.scores_group_of(task):
                await score_together(self.taskset, task, traces, limits)
            return traces

        return await self._named(request, run())

    async def start(self, task: Task) -> Started:
        episode = await Episode.start(self.taskset, task, self._limits)
        id = f"e-{secrets.token_hex(12)}"
        self._episodes[id] = episode
        self._look_later()
        return Started(id, episode.observation)

    async def step(self, episode: str, action: Any, turn: int | None = None) -> Step:
        live = self._episodes.get(episode)
        if live is None:
            raise UsageError(f"no episode {episode!r} is live", remedy="start one; idle and ended ones are closed")
        try:
            return live.with_ending(await live.step(action, turn))
        finally:
            live.heard = time.monotonic()

    async def cancel(self, id: str) -> bool:
        """Stops a named request or ends an episode; says whether there was one."""
        if (running := self._requests.get(id)) is not None:
            running.cancel()
            return True
        return await self._end(id)

    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None:
        self.streams.observe(task, reward, stream)

    async def state(self, stream: str | None = None) -> State:
        return self.streams.state(stream)

    async def restore(self, state: State) -> None:
        self.streams.restore(state)

    async def close(self) -> None:
        for running in list(self._requests.values()):
            running.cancel()
        for id in list(self._episodes):
            await self._end(id)
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._trimmer.close()

    def episode_over(self, id: str) -> bool:
        episode = self._episodes.get(id)
        return episode is None or episode.over

    async def _named(self, request: str | None, run: Awaitable[T]) -> T:
        if request is None:
            return await run
        work = asyncio.ensure_future(run)
        self._requests[request] = work
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            del self._requests[request]

    def _narrowed(self, asked: Limits | None) -> Limits:
        """What was asked for, within the host's own limits."""
        own = self._limits
        if asked is None:
            return own
        return Limits(max_turns=_least(own.max_turns, asked.max_turns), timeout=_least(own.timeout, asked.timeout))

    def _look_later(self) -> None:
        """One look at all episodes now and then: cheaper than a timer for each."""
        if self._looking is None and self._episodes:
            pause = min(EPISODE_IDLE_SECONDS, EPISODE_ENDED_SECONDS) / 4
            self._looking = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        """Closes the episodes that nobody steps any more."""
        self._looking, now = None, time.monotonic()
        for id, episode in self._episodes.items():
            most = EPISODE_ENDED_SECONDS if episode.over else EPISODE_IDLE_SECONDS
            if not episode.busy and now - episode.heard >= most:
                self._ending.add(ending := asyncio.ensure_future(self._end(id)))
                ending.add_done_callback(self._ending.discard)
        self._look_later()

    async def _end(self, id: str) -> bool:
        episode = self._episodes.pop(id, None)
        if episode is not None:
            await episode.close()
            self._trimmer.count_end(len(self._episodes))
        return episode is not None


def always(policy: Policy) -> PolicyOf:
    """One policy for every request."""
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


async def draw_by_index(host: Host, num_tasks: int | None) -> AsyncIterator[tuple[Task, int]]:
    """`draw` of a host that is elsewhere: tasks are asked for by index, a few ahead. A finite order never begins
    again."""
    info = await host.info()
    known = [number for number in (num_tasks, info.num_tasks) if number is not None]
    if not known:
        raise InfiniteTasksetError(
            f"{info.name} is INFINITE: a draw from it needs an end", remedy="pass --num-tasks (-n)"
        )
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
                # A stream that is put back to its beginning is forgotten: a server has only so many.
                state = await host.state(stream)
                await host.restore(msgspec.structs.replace(state, streams={stream: StreamState(0)}))


def _least(own: Any, asked: Any) -> Any:
    known = [value for value in (own, asked) if value is not None]
    return min(known) if known else None


TRIM_FROM = 1000
"""Below that, it is not worth a look."""
PAUSE_SECONDS = 2.0
"""More may be about to end."""


class MemoryTrimmer:
    """Gives freed memory back to the system: glibc keeps that of many small things for itself. Ten thousand episodes of
    30 KB that expired would otherwise stay 300 MB of the process."""

    def __init__(self) -> None:
        self._ended = 0
        self._due: asyncio.TimerHandle | None = None

    def count_end(self, live: int) -> None:
        """One has ended, and so many are left. Looking costs most where much is alive, so then it happens rarely."""
        self._ended += 1
        if self._ended >= max(TRIM_FROM, live) and self._due is None:
            self._due = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._trim_now)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _trim_now(self) -> None:
        self._ended, self._due = 0, None
        trim_memory()


def trim_memory() -> None:
    """70 ms where 300 MB are free; nothing where the C library has no such call."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes

    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
    return found
