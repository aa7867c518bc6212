"""A worker as its broker sees it, and the calls that it has."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from treetune.core.environment import Sink
from treetune.serve.errors import WorkerLost
from treetune.serve.pool.worker import MessageBatch


class PendingCall(msgspec.Struct, eq=False):
    """A call that a worker has."""

    future: asyncio.Future[bytes]
    show: Sink | None
    """Is given what the environment shows meanwhile."""
    steps: str = ""
    """The task whose episode it steps: the step may be what ends the worker."""


class WorkerEnded(WorkerLost):
    """The worker that had the call is gone."""

    def __init__(self, how: str = "", calls: int = 0) -> None:
        super().__init__("the worker of this episode died", remedy="start another")
        self.how, self.calls = how, calls


class SuspectEpisode(msgspec.Struct, frozen=True):
    """A live episode of a task that may have ended a worker."""

    task: str
    company: int
    """With how many such episodes, itself included, it may share its worker."""


class WorkerHandle(msgspec.Struct, eq=False):
    """A worker as the broker sees it."""

    identity: bytes
    messages: MessageBatch
    handle: Any = None
    """The engine's own."""
    ready: bool = False
    leaving: bool = False
    heard: float = 0.0
    calls: dict[bytes, PendingCall] = {}
    episodes: set[str] = set()
    suspects: dict[str, SuspectEpisode] = {}
    """Those among them whose task may have ended a worker. They are guests as long as they live, and where there is
    one there are no other episodes."""
    gone: bool = False
    """It has ended."""
    load: int = 0
    """Rollouts under way, live episodes included."""
    guests: int = 0
    """Calls that any worker could have got (all but steps of the episodes here), and suspects that live here."""
    number: int = 0
    """Of its last call."""
    limits: list[int] = []
    """How many guests there may be, as each suspect among them has it."""

    def may_take(self, company: int | None) -> bool:
        """Suspects are with few others, and other calls are never with suspects."""
        return not self.limits if company is None else self.guests < min([company, *self.limits])

    async def ask(
        self,
        method: str,
        payload: bytes,
        size: int = 0,
        *,
        opens: str | None = None,
        show: Sink | None = None,
        steps: str = "",
    ) -> bytes:
        """The worker's answer, or its error, which is raised. If the caller is cancelled, the worker stops the call.
        `opens` is the episode that lives there from then on; `steps` names the task of the episode that is stepped."""
        if self.gone:
            raise WorkerEnded
        self.number += 1
        id = self.number.to_bytes(8, "big")
        call = self.calls[id] = PendingCall(asyncio.get_running_loop().create_future(), show, steps)
        self.load += size
        self.messages.put(b"do", id, method.encode(), payload)
        try:
            data = await call.future
        except asyncio.CancelledError:
            self.messages.put(b"stop", id)
            if opens is not None:  # it may have begun just now
                self.messages.put(b"do", b"", b"close", opens.encode())
            raise
        finally:
            del self.calls[id]
            self.load -= size
        if opens is not None:
            self.episodes.add(opens)
            self.load += 1
        return data
