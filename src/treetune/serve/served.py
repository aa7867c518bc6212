"""Tasksets that live on a server, as they are known here.

    taskset = Served(ServedConfig(address="tcp://127.0.0.1:5555"))
    taskset.describe_as(await host.info())

    taskset = ServedEpisodes(ServedConfig(address="http://127.0.0.1:5000"))
    await taskset.learn()               # its name and how many tasks it has
    taskset.environment(taskset[3])     # an environment whose start and steps are requests

A pull server also runs the rollouts; over HTTP only the environment is there, and the policy here.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from treetune.environment import Action, Environment, Observation, Step
from treetune.errors import TasksetError, UsageError
from treetune.host import Info
from treetune.serve.http.client import RemoteEpisode, TaskServerClient
from treetune.task import Task
from treetune.taskset import Taskset, TasksetConfig

INDEX = "task_index"


class ServedConfig(TasksetConfig, frozen=True, kw_only=True):
    address: str
    """Where the server listens: tcp://HOST:PORT, http://HOST:PORT. TREETUNE_TOKEN has its token."""


class Served(Taskset[Task, ServedConfig]):
    """A taskset behind a pull server, which runs the rollouts."""

    def __init__(self, config: ServedConfig | None = None) -> None:
        super().__init__(config)
        self._info = Info()

    def describe_as(self, info: Info) -> None:
        self._info = info
        self.name = info.name
        self.INFINITE = info.num_tasks is None  # type: ignore[misc]

    def count(self) -> int | None:
        return self._info.num_tasks

    def task_at(self, index: int) -> Task:
        raise TasksetError(
            f"the tasks of {self.name} are on the server at {self.config.address}",
            remedy="evaluate with --server; to score again here, name the taskset itself",
        )

    @property
    def scores_groups(self) -> bool:
        return self._info.requires_group_scoring

    def source(self) -> str | None:
        return self._info.fingerprint


class ServedEpisodes(Taskset[Task, ServedConfig]):
    """A taskset behind a task server. A task is known by its index only: the server shows its prompt when an episode
    of it starts."""

    def __init__(self, config: ServedConfig | None = None) -> None:
        super().__init__(config)
        self.name = self.config.address
        self._info: dict[str, Any] = {}
        self._client: tuple[asyncio.AbstractEventLoop, TaskServerClient] | None = None

    async def learn(self) -> None:
        """Asks the server what it serves. One that does not tell has no end that is known."""
        self._info = await self.client.info()
        self.name = str(self._info.get("name") or self.config.address)
        self.INFINITE = self._info.get("num_tasks") is None  # type: ignore[misc]

    @property
    def client(self) -> TaskServerClient:
        """The client of this event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            token = os.environ.get("TREETUNE_TOKEN") or None
            self._client = loop, TaskServerClient(self.config.address, token=token)
        return self._client[1]

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client[1].close()

    def count(self) -> int | None:
        number: int | None = self._info.get("num_tasks")
        return number

    def task_at(self, index: int) -> Task:
        return Task(reward_spec={INDEX: index})

    def environment(self, task: Task) -> Environment:
        by_index = self._info.get("by_index", True)
        return _RemoteEnvironment(task, self, task.reward_spec[INDEX] if by_index else None)

    async def opening(self, task: Task) -> Observation:
        """What an episode of the task shows first."""
        async with await self.client.start(task.reward_spec[INDEX]) as episode:
            return episode.observation

    def source(self) -> str | None:
        return str(self._info.get("fingerprint", "")) or None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_client": None}


class _RemoteEnvironment(Environment):
    def __init__(self, task: Task, taskset: ServedEpisodes, index: int | None) -> None:
        super().__init__(task)
        self._taskset, self._index = taskset, index
        self._episode: RemoteEpisode | None = None

    async def start(self) -> Observation:
        self._episode = await self._taskset.client.start(self._index)
        return self._episode.observation

    async def step(self, action: Action) -> Step:
        if self._episode is None:
            raise UsageError("the episode was not started")
        return await self._episode.step(action)

    async def close(self) -> None:
        if self._episode is not None:
            await self._episode.cancel()
