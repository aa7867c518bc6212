"""Groups of a stream, one after the other: tasks are drawn, their groups played, those without variance dropped.

    async for task, traces in sample_groups(host, 8, count=64, ahead=4):
        ...

Each draw is done when its group was given or dropped, and not before: until then it is out on a lease. So a checkpoint
(`host.state()`) has what is under way, and what is left when the loop is left is given out again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import NamedTuple, Unpack

from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.errors import TreetuneError, UsageError
from treetune.play.group import was_cut_off
from treetune.play.host import Host
from treetune.play.options import GroupOptions

LEASE = 600.0
MOST_DROPPED = 100


class Group(NamedTuple):
    task: Task
    traces: list[Trace]


class GroupsWithoutVariance(TreetuneError):
    """Too many groups in a row had rewards that were all the same."""


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
    """Gives `count` groups, or goes on for ever, as they are ready; `ahead` of them are played at once. Where
    `most_dropped` in a row are dropped it raises."""
    if ahead < 1 or most_dropped < 1 or not lease > 0:
        raise UsageError("ahead and most_dropped are 1 or more, and a lease has seconds")
    options.setdefault("no_variance", "drop")
    options["finish"] = False
    out: dict[int, Task] = {}
    """By draw: tasks that were drawn, and whose group was not given yet."""
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
            if traces and not was_cut_off(traces):  # one that was is given out again already
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
                    remedy="are the tasks too easy or too hard? a profile draws those between; or no_variance='keep'",
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
    """A group that was played waits here until it is asked for, and nobody else may get its task meanwhile."""
    while True:
        await asyncio.sleep(lease / 3)
        for task in list(out.values()):
            with contextlib.suppress(TreetuneError):
                await host.renew(task)
