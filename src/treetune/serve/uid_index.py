"""Where a task with a given uid stands in the order of a server.

index = await UidIndex(server).find(uid, near=5)

Rows have the uids of their tasks, and their positions only where nothing was left out or shuffled.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from treetune.errors import UsageError
from treetune.system.threads import call_apart

if TYPE_CHECKING:
    from treetune.serve.server import EnvServer


class UidIndex:
    def __init__(self, server: EnvServer) -> None:
        self._server = server
        self._reading: asyncio.Future[dict[str, int]] | None = None

    async def find(self, uid: str, near: int | None) -> int | None:
        """`near` where that task has the uid, else the first index that has; None where there is none. An endless
        order is only looked at where the caller says."""
        streams = self._server.streams
        if streams.sequential:
            raise UsageError(f"{streams.taskset.name} is only a generator: none of its tasks can be asked for")
        if near is not None and 0 <= near < (streams.count if streams.count is not None else 2**62):
            task = await self._server.host.fetch(streams.draw_at(near))
            if task.uid == uid:
                return near
        if streams.count is None:
            return None
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            self._reading = call_apart(self._read_all, streams.count)
        return (await asyncio.shield(self._reading)).get(uid)

    def _read_all(self, count: int) -> dict[str, int]:
        streams = self._server.streams
        return {streams.task(streams.draw_at(index)).uid: index for index in reversed(range(count))}
