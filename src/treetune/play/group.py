"""Groups: several rollouts of one task, and which of them a trainer receives.

    traces = await play_group(play, range(12), 8)       # plays twelve; the group is the first eight to be scored
    async for task, traces in sample_groups(host, 8):   # only groups whose rewards differ
        ...

In `sample_groups` each draw is leased until its group is yielded or dropped. So a checkpoint (`host.state()`) includes
unfinished draws, and tasks left over when the loop ends are handed out again.

With `of` or `no_variance`, the results of rollouts decide which of them are trained on, which is a bias.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Unpack, get_args

from treetune.core.task import Task
from treetune.core.trace import Outcome, Trace
from treetune.errors import TreetuneError, UsageError
from treetune.play.protocol import GroupOptions, Host, NoVariance

MOST_IN_GROUP = 4096
MOST_REFILLS = 100
_NO_VARIANCE = get_args(NoVariance)
LEASE = 600.0
MOST_DROPPED = 100
Play = Callable[[int], Coroutine[Any, Any, Trace]]
"""Plays the rollout with a number."""


class GroupPlan(NamedTuple):
    """The checked options of a group."""

    n: int
    numbers: Sequence[int]
    """The numbers of the rollouts to start."""
    no_variance: NoVariance = "keep"
    refills: int = 1

    @classmethod
    def of_options(cls, n: int, rollouts: Sequence[int] | None, options: GroupOptions) -> GroupPlan:
        begun = n if (of := options.get("of")) is None else of
        numbers = range(begun) if rollouts is None else rollouts
        if not 1 <= n <= MOST_IN_GROUP or len(numbers) != begun:
            raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, each with a number; got {n}")
        if not n <= begun <= MOST_IN_GROUP:
            raise UsageError(f"`of` is the number of rollouts to start, {n} to {MOST_IN_GROUP}; got {begun}")
        no_variance = options.get("no_variance") or "keep"
        refills = 1 if (asked := options.get("refills")) is None else asked
        if no_variance not in _NO_VARIANCE or not 0 <= refills <= MOST_REFILLS:
            raise UsageError(
                f"no_variance must be one of {', '.join(_NO_VARIANCE)}, and refills 0 to {MOST_REFILLS}; got "
                f"{no_variance!r:.40} and {refills!r:.40}"
            )
        if no_variance != "keep" and n == 1:
            raise UsageError("the reward of a single rollout never differs", remedy="ask for a group of two or more")
        return cls(n, numbers, no_variance, refills)


async def run_plan(
    plan: GroupPlan,
    play: Play,
    score: Callable[[list[Trace]], Awaitable[None]],
    drop: Callable[[list[Trace]], None],
    counts: Counter[str],
) -> list[Trace]:
    """Play the group. `score` sets the rewards of a whole group; `drop` receives the traces of dropped groups."""
    numbers = plan.numbers
    for left in reversed(range(plan.refills + 1 if plan.no_variance == "refill" else 1)):
        traces = await play_group(play, numbers, plan.n, counts)
        await score(traces)
        if plan.no_variance == "keep" or has_variance(traces) or was_cut_off(traces):
            return traces
        counts["groups_without_variance"] += 1
        counts["refilled_groups" if left else "dropped_groups"] += 1
        drop(traces)
        first = max(numbers) + 1
        numbers = range(first, first + len(numbers))
    return []


async def play_group(play: Play, numbers: Sequence[int], n: int, counts: Counter[str]) -> list[Trace]:
    """Return the first n rollouts that are scored, ordered by number; the others are cancelled. If fewer than n can be
    scored, failed ones fill the group."""
    if len(numbers) == n:
        return list(await asyncio.gather(*map(play, numbers)))
    scored: list[Trace] = []
    failed: list[Trace] = []
    errors: list[BaseException] = []
    enough = asyncio.Event()
    running = [asyncio.ensure_future(play(number)) for number in numbers]
    left = len(running)

    def note(ended: asyncio.Future[Trace]) -> None:
        nonlocal left
        left -= 1
        if ended.cancelled():
            pass
        elif (error := ended.exception()) is not None:
            errors.append(error)
        else:
            trace = ended.result()
            (failed if trace.reward is None else scored).append(trace)
        if len(scored) == n or errors or not left:
            enough.set()

    for one in running:
        one.add_done_callback(note)
    try:
        await enough.wait()
        group = [*scored[:n], *failed][:n]
    finally:
        for one in running:
            one.cancel()
        await asyncio.wait(running)  # let each clean up
    if errors:
        raise errors[0]
    counts["stragglers"] += len(numbers) - len(failed) - min(n, len(scored))
    place = {number: at for at, number in enumerate(numbers)}
    return sorted(group, key=lambda trace: place[trace.rollout])


def has_variance(traces: Sequence[Trace]) -> bool:
    """Whether at least two rewards differ."""
    return len({trace.reward for trace in traces if trace.reward is not None}) > 1


def was_cut_off(traces: Sequence[Trace]) -> bool:
    """Whether no trace has a reward because of staleness. The task then counts as not played."""
    return any(trace.outcome is Outcome.STALE for trace in traces) and all(trace.reward is None for trace in traces)


# Groups of a stream


class Group(NamedTuple):
    task: Task
    traces: list[Trace]


class GroupsWithoutVariance(TreetuneError, code="no-variance"):
    """Too many groups in a row had equal rewards."""


async def sample_groups(
    host: Host,
    n: int,
    *,
    count: int | None = None,
    ahead: int = 1,
    stream: str = "",
    lease: float = LEASE,
    most_dropped: int = MOST_DROPPED,
    **options: Unpack[GroupOptions],
) -> AsyncGenerator[Group]:
    """Yield groups as they become ready: `count` of them, or endlessly. `ahead` groups are played at once. Raises if
    `most_dropped` groups in a row are dropped."""
    if ahead < 1 or most_dropped < 1 or not lease > 0:
        raise UsageError("ahead and most_dropped must be at least 1, and a lease needs a number of seconds")
    options.setdefault("no_variance", "drop")
    options["finish"] = False
    out: dict[int, Task] = {}
    """Tasks that were drawn but whose group was not yielded yet, by draw."""
    drawn = given = dropped = 0
    running: set[asyncio.Task[tuple[int, list[Trace]]]] = set()

    async def play(number: int) -> tuple[int, list[Trace]]:
        task = out[number] = await host.sample(stream=stream, lease=lease)
        return number, await host.run_group(task, n, **options)

    renewing = asyncio.create_task(_renew(host, out, lease))
    try:
        while count is None or given < count:
            while len(running) < (ahead if count is None else min(ahead, count - given)):
                running.add(asyncio.create_task(play(drawn)))
                drawn += 1
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            first = min(done, key=lambda one: one.result()[0])
            running.discard(first)
            number, traces = first.result()
            task = out.pop(number)
            if traces and not was_cut_off(traces):  # the task of a cut-off group is already handed out again
                await host.finish(task)
                given, dropped = given + 1, 0
                yield Group(task, traces)
                continue
            if not traces:
                await host.finish(task)
            dropped += 1
            if dropped >= most_dropped:
                raise GroupsWithoutVariance(
                    f"{dropped} groups in a row were dropped: their rewards were all the same",
                    remedy="are the tasks too easy or too hard? a profile draws those in between; or "
                    "set no_variance='keep'",
                )
    finally:
        renewing.cancel()
        for one in running:
            one.cancel()
        await asyncio.gather(renewing, *running, return_exceptions=True)
        for task in out.values():
            with contextlib.suppress(TreetuneError):
                await host.give_back(task)


async def _renew(host: Host, out: dict[int, Task], lease: float) -> None:
    """Renew the leases of groups that wait for the consumer, so that no other client gets their tasks."""
    while True:
        await asyncio.sleep(lease / 3)
        for task in list(out.values()):
            with contextlib.suppress(TreetuneError):
                await host.renew(task)
