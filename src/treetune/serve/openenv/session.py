"""Sessions, in which clients of OpenEnv and ORS play one episode at a time, and the table of a door's sessions.

    session = sessions.add(Session(sessions))
    await session.reset(Reset(seed=3))        # the first observation
    step = await session.play("42")

In OpenEnv an environment exists as soon as its client has connected. So a step or a call before the first reset starts
the next task, and a reset that names no other task shows the one that was started.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from treetune.core.environment import Step
from treetune.errors import UsageError
from treetune.play.episode_table import LiveEpisode, SessionLimits
from treetune.serve.http import HttpConfig
from treetune.serve.http.wire import HttpError, check_info
from treetune.serve.openenv.wire import Fault, ListTools, Reset, ToolAction, describe_tool, observed, show, stepped
from treetune.serve.server import EnvServer, StartedTask

_SILENT_SECONDS = 900.0
"""A session without an episode is closed if its client sends nothing for this long."""
_SWEEP_SECONDS = 5.0


class Session:
    def __init__(
        self, sessions: SessionTable, id: str | None = None, stop: Callable[[str], None] | None = None
    ) -> None:
        """`stop` closes the connection when the session ends; None for a session without a connection."""
        self._sessions, self._server = sessions, sessions.server
        self.id, self.stop = id or str(uuid.uuid4()), stop
        self.heard = time.monotonic()
        """When its client sent its last message."""
        self.attached = False
        """A WebSocket that did not open the session plays it."""
        self.first: StartedTask | None = None
        """The task of its episode, and the episode's first observation."""
        self.turn = 0
        self._episode: str | None = None
        """None before the first episode; empty if the last one could not be started."""
        self._label = self.id
        self._is_fresh = False
        """The episode was started without a reset, and its first observation has not been shown yet."""
        self._starting = asyncio.Lock()

    @property
    def _live(self) -> LiveEpisode | None:
        return self._server.host.episodes.live.get(self._episode or "")

    @property
    def is_live(self) -> bool:
        """Its episode has not ended."""
        return self._live is not None

    def hear(self) -> None:
        """Records a message of its client: the episode counts as just stepped."""
        self.heard = time.monotonic()
        if (live := self._live) is not None:
            live.heard = self.heard

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": self._label, "step_count": self.turn}

    async def reset(self, asked: Reset) -> dict[str, Any]:
        """Starts an episode; returns its first observation."""
        async with self._starting:
            self._sessions.check_split(asked.split)
            index = asked.task(self._server.streams.count)
            if index is not None or not self._is_fresh or not self.is_live:
                await self._start(index)
            self._label = asked.episode_id or self._label
            self._is_fresh = False
        assert self.first is not None
        started, task, index = self.first
        metadata: dict[str, Any] = {"task_index": index, "data_source": task.data_source}
        if started.tools:
            metadata["tools"] = started.tools
        return observed(show(started.observation), None, False, metadata)

    async def play(self, action: Any) -> Step:
        """Takes one step of its episode."""
        if not self._episode:
            await self.ensure_started()
        assert self._episode is not None
        step: Step = await self._server.host.step(self._episode, action, terms=self._sessions.terms)
        self.turn += 1
        self._is_fresh = False
        return step

    async def answer(self, action: Any) -> dict[str, Any]:
        """Returns the observation and the reward for an action of OpenEnv."""
        if isinstance(action, ListTools):
            tools = (await self.ensure_started()).started.tools
            return observed({"tools": [describe_tool(tool, "input_schema") for tool in tools]}, None, False, {})
        if isinstance(action, ToolAction):
            return stepped(await self.play(action.value), action.name)
        return stepped(await self.play(action))

    async def ensure_started(self) -> StartedTask:
        """Returns the first observation of its episode. Starts the next task if there was no episode."""
        async with self._starting:
            if self._episode is None:
                await self._start(None)
                self._is_fresh = True
        if self.first is None:
            raise UsageError("the last reset failed", remedy="reset again")
        return self.first

    async def _start(self, index: int | None) -> None:
        await self.end()
        self._episode, self.first = "", None
        self.first = await self._server.start_episode(index, self._sessions.terms)
        started = self.first.started
        self._episode, self._label, self.turn = started.episode, started.episode, 0
        self._sessions.offered = started.tools

    async def end(self) -> None:
        """Ends its episode if it has one."""
        if self._episode:
            await self._server.host.episodes.cancel(self._episode, self._sessions.terms)


S = TypeVar("S", bound=Session)


class SessionTable:
    def __init__(self, server: EnvServer, config: HttpConfig, split: str) -> None:
        """`split` is the name of the only split, which contains all tasks."""
        self.server, self._config, self.split = server, config, split
        self.terms = SessionLimits(config.idle_seconds, config.deadline_seconds, check_info)
        self.by_id: dict[str, Session] = {}
        self.offered: list[dict[str, Any]] | None = None
        """The tools of the last episode that was started."""

    def add(self, session: S) -> S:
        active, most = len(self.by_id), self._config.max_episodes
        if active >= most or self.server.stopping:
            problem = f"Server at capacity: {active}/{most} sessions active. Cannot accept new connections."
            raise Fault("CAPACITY_REACHED", problem, active_sessions=active, max_sessions=most)
        self.by_id[session.id] = session
        return session

    def attach(self, id: str) -> Session:
        """Lets a WebSocket play a session that was opened over HTTP."""
        session = self.by_id.get(id)
        if session is None or session.stop is not None:
            raise Fault("SESSION_ERROR", f"Unknown session_id: {id:.80}")
        if session.attached:
            raise Fault("SESSION_ERROR", f"Session {id} already has an attached WebSocket")
        session.attached = True
        return session

    def check_split(self, split: str | None) -> None:
        if split is not None and split != self.split:
            raise HttpError(400, "usage", f"Invalid split: there is only {self.split!r}")

    async def close(self, session: Session) -> None:
        self.by_id.pop(session.id, None)
        await session.end()

    async def use_once(self, play: Callable[[Session], Any]) -> Any:
        """Calls `play` with a session that is closed afterwards, and returns its result."""
        session = self.add(Session(self))
        try:
            return await play(session)
        finally:
            await self.close(session)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Returns the tools of the last episode. Before the first one, an episode of the first task is started and
        closed; this moves a cursor only if tasks have no numbers."""
        if self.offered is None:
            seed = None if self.server.streams.sequential else 0
            await self.use_once(lambda session: session.reset(Reset(seed=seed)))
        return self.offered or []

    async def sweep(self) -> None:
        """Closes sessions of silent clients. Their episodes have already ended."""
        silent = max(_SILENT_SECONDS, self._config.idle_seconds)
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest = time.monotonic() - silent
            for session in list(self.by_id.values()):
                if session.heard < oldest and not session.is_live and not session.attached:
                    if session.stop is not None:
                        session.stop(f"nothing was said for {silent:g} seconds")
                    else:
                        await self.close(session)
