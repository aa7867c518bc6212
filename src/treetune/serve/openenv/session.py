"""A session: what one client of OpenEnv or ORS plays, one episode at a time.

    session = door.open_session()
    await session.reset(Reset(seed=3))        # the first observation
    step = await session.play("42")

OpenEnv's environments are there from the connection on. So a step or a call before the first reset begins the next
task, and a reset that asks for no other one shows it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from treetune.core.environment import Observation, Step
from treetune.core.task import Task
from treetune.errors import UsageError
from treetune.serve.openenv.wire import ListTools, Reset, ToolAction, describe_tool, observed, show, stepped

if TYPE_CHECKING:
    from treetune.serve.openenv.door import OpenEnvDoor


class Opening(NamedTuple):
    """What an episode showed first."""

    observation: Observation
    tools: list[dict[str, Any]]
    """What may be called, in OpenAI's form."""
    task: Task
    draw: int
    """Which of the order its task is."""


class Session:
    def __init__(self, door: OpenEnvDoor, id: str | None = None) -> None:
        self._door = door
        self.id = id or str(uuid.uuid4())
        self.heard = time.monotonic()
        """When its client said something last."""
        self.attached = False
        """A WebSocket plays it that did not open it."""
        self.opening: Opening | None = None
        self.turn = 0
        self._episode: str | None = None
        """None before the first; empty where the last could not be begun."""
        self._label = self.id
        self._is_fresh = False
        """The episode was begun without a reset, and nobody was shown its beginning."""
        self._starting = asyncio.Lock()

    @property
    def is_live(self) -> bool:
        """Its episode goes on."""
        return self._episode is not None and self._episode in self._door.server.host.episodes.live

    def hear(self) -> None:
        """Its client is there: an episode counts from now on as one that was just stepped."""
        self.heard = time.monotonic()
        if (live := self._door.server.host.episodes.live.get(self._episode or "")) is not None:
            live.heard = self.heard

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": self._label, "step_count": self.turn}

    async def reset(self, asked: Reset) -> dict[str, Any]:
        """Begins an episode; what it shows first."""
        async with self._starting:
            self._door.tasks.check_split(asked.split)
            index = asked.task(self._door.server.streams.count)
            if index is not None or not self._is_fresh or not self.is_live:
                await self._begin(index)
            self._label = asked.episode_id or self._label
            self._is_fresh = False
        assert self.opening is not None
        observation, tools, task, index = self.opening
        metadata: dict[str, Any] = {"task_index": index, "data_source": task.data_source}
        if tools:
            metadata["tools"] = tools
        return observed(show(observation), None, False, metadata)

    async def play(self, action: Any) -> Step:
        """One step of its episode."""
        if not self._episode:
            await self.ensure_begun()
        assert self._episode is not None
        step: Step = await self._door.server.host.step(self._episode, action, terms=self._door.terms)
        self.turn += 1
        self._is_fresh = False
        return step

    async def answer(self, action: Any) -> dict[str, Any]:
        """What an action of OpenEnv earns and shows."""
        if isinstance(action, ListTools):
            tools = (await self.ensure_begun()).tools
            return observed({"tools": [describe_tool(tool, "input_schema") for tool in tools]}, None, False, {})
        if isinstance(action, ToolAction):
            return stepped(await self.play(action.value), action.name)
        return stepped(await self.play(action))

    async def ensure_begun(self) -> Opening:
        """What its episode showed first; the next task is begun where there was none."""
        async with self._starting:
            if self._episode is None:
                await self._begin(None)
                self._is_fresh = True
        if self.opening is None:
            raise UsageError("the last reset failed", remedy="reset again")
        return self.opening

    async def _begin(self, index: int | None) -> None:
        await self.end()
        self._episode, self.opening = "", None
        started, task, drawn = await self._door.server.start_episode(index, self._door.terms)
        self._episode, self._label, self.turn = started.episode, started.episode, 0
        self.opening = Opening(started.observation, started.tools, task, drawn)
        self._door.offered = started.tools

    async def end(self) -> None:
        """Ends its episode, where one goes on."""
        if self._episode:
            await self._door.server.host.episodes.cancel(self._episode, self._door.terms)
