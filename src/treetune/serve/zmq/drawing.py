"""Drawing from a host that is elsewhere: tasks are asked for by index, a few ahead.

async for task, occurrence in draw_by_index(client, 100): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator

import msgspec

from treetune.core.task import Task
from treetune.errors import TreetuneError, UsageError
from treetune.play.protocol import Host
from treetune.play.streams import StreamState

_AHEAD = 32
"""Tasks that are asked for before they are needed."""


async def draw_by_index(host: Host, num_tasks: int | None) -> AsyncIterator[tuple[Task, int]]:
    """The first tasks of its order, each with its occurrence."""
    info = await host.info()
    counts = [count for count in (num_tasks, info.num_tasks) if count is not None]
    if not counts:
        raise UsageError(f"{info.name} is INFINITE: a draw from it needs an end", remedy="pass --num-tasks (-n)")
    wanted = min(counts)
    # A generator has no task at an index of our choice, but a fresh stream begins at its first.
    stream = None if info.by_index else f"eval-{secrets.token_hex(8)}"
    waiting: deque[asyncio.Task[Task]] = deque()
    seen: Counter[str] = Counter()
    asked = 0
    try:
        while asked < wanted or waiting:
            while asked < wanted and len(waiting) < (_AHEAD if stream is None else 1):
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
