"""Tasksets on servers, as seen from a client.

    taskset = load_taskset("tcp://127.0.0.1:5555")     # or http://127.0.0.1:5000
    await taskset.learn()                               # its name and how many tasks it has
    await taskset.first_tasks(3)

A pull server also runs the rollouts. An HTTP server runs only the environment; the policy runs here.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

import msgspec

from treetune.config.trust import Origin
from treetune.core.draws import TasksetConfig
from treetune.core.environment import Action, Environment, Observation, Step
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import Tool, ToolSource
from treetune.errors import TasksetError, UsageError
from treetune.play.protocol import Info
from treetune.serve.errors import ServeError
from treetune.serve.http.client import RemoteEpisode, TaskServerClient
from treetune.serve.http.transport import HttpTransport
from treetune.serve.zmq.client import EnvClient

INDEX = "task_index"


class ServedConfig(TasksetConfig, frozen=True, kw_only=True):
    address: str
    """The server's address: tcp://HOST:PORT or http://HOST:PORT. The token is read from TREETUNE_TOKEN."""


class Served(Taskset[Task, ServedConfig]):
    """A taskset on a pull server, which runs the rollouts. A new protocol is a subclass and a line in `SERVERS`."""

    BY_NUMBER: ClassVar[bool] = False
    """Tasks are known only by their index."""
    RUNS_CODE = True
    models: list[str] | None = None
    """The server's models; None if the server runs only environments and the policy runs here."""

    def __init__(self, config: ServedConfig | None = None) -> None:
        super().__init__(config)
        self._origin.refuse(f"would call a server: {self.config.address}")  # the server gets the token
        self.name = self.config.address
        self.token = os.environ.get("TREETUNE_TOKEN") or None
        self.server_key = os.environ.get("TREETUNE_SERVER_KEY") or None
        self.deadline = 30.0
        """Time limit in seconds for requests that the server answers at once."""
        self._info = Info()
        self._client: tuple[asyncio.AbstractEventLoop, Any] | None = None

    @property
    def tasks_origin(self) -> Origin:
        return Origin.of_data(f"a task of {self.config.address}")

    @property
    def client(self) -> Any:
        """The client of this event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, self._connect()
        return self._client[1]

    def _connect(self) -> Any:
        return EnvClient(self.config.address, token=self.token, server_key=self.server_key, deadline=self.deadline)

    def open_host(self) -> EnvClient:
        """Returns the host that runs the rollouts, if the server has models."""
        return EnvClient(self.config.address, token=self.token, server_key=self.server_key)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_client": None}

    async def learn(self) -> None:
        """Asks the server what it serves."""
        info = await self.client.info()
        self.describe_as(info)
        self.models = info.models

    def describe_as(self, info: Info) -> None:
        self._info = info
        self.name = info.name
        self.INFINITE = info.num_tasks is None  # type: ignore[misc]

    async def first_tasks(self, count: int) -> list[Task]:
        """Returns the first tasks with their prompts. No cursor moves."""
        if not self._info.by_index:
            raise UsageError(
                f"{self.name} is only a generator: its server has no task at an index", remedy="show the taskset itself"
            )
        known = self._info.num_tasks
        return [await self.client.sample(index) for index in range(count if known is None else min(count, known))]

    async def stats(self) -> dict[str, Any]:
        return dict(await self.client.stats())

    def count(self) -> int | None:
        return self._info.num_tasks

    def task_at(self, index: int) -> Task:
        raise TasksetError(
            f"the tasks of {self.name} are on the server at {self.config.address}",
            remedy="evaluate with --server; to score again here, name the taskset itself",
        )

    def environment(self, task: Task) -> Environment:
        return _PulledEnvironment(task, self)

    def offers_tools(self, task: Task) -> bool:
        return False  # the server runs the calls

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        return []

    @property
    def scores_groups(self) -> bool:
        return self._info.requires_group_scoring

    def source(self) -> str | None:
        return self._info.fingerprint or None


class ServedEpisodes(Served):
    """A taskset on a task server. A task is known only by its index; the server shows the prompt when an episode
    starts."""

    def _connect(self) -> TaskServerClient:
        return TaskServerClient(self.config.address, token=self.token)

    async def learn(self) -> None:
        """Asks the server what it serves. If it has no info, the number of tasks is unknown."""
        found = await self.client.info()
        info = Info(name=str(found.get("name") or self.config.address), num_tasks=found.get("num_tasks"))
        info.by_index, info.fingerprint = found.get("by_index", True), str(found.get("fingerprint", ""))
        self.describe_as(info)

    async def first_tasks(self, count: int) -> list[Task]:
        """Returns the first tasks. The prompt of a task is what its episode shows first."""
        tasks = []
        for task in self.select_tasks(count):
            async with await self.client.start(task.reward_spec[INDEX]) as episode:
                tasks.append(msgspec.structs.replace(task, prompt=episode.observation.messages()))
        return tasks

    async def stats(self) -> dict[str, Any]:
        async with HttpTransport(self.config.address, self.token) as transport:
            reply = await transport.ask("GET", "/metrics", None, self.deadline)
        if reply.status == 404:
            raise ServeError(f"{transport.url} shows no /metrics", remedy="`treetune serve TARGET --http :PORT` does")
        return reply.read(dict[str, Any])

    def task_at(self, index: int) -> Task:
        return Task(reward_spec={INDEX: index})

    def environment(self, task: Task) -> Environment:
        return _RemoteEnvironment(task, self, task.reward_spec[INDEX] if self._info.by_index else None)


class _PulledEnvironment(Environment):
    """An episode on a pull server, for a task that was sampled from it."""

    RAW_CALLS = True

    def __init__(self, task: Task, taskset: Served) -> None:
        super().__init__(task)
        self._taskset = taskset
        self._episode: str | None = None

    async def start(self) -> Observation:
        started = await self._taskset.client.start(self.task)
        self._episode, self.raw_tools = started.episode, started.tools
        return started.observation  # type: ignore[no-any-return]

    async def step(self, action: Action) -> Step:
        step: Step = await self._taskset.client.step(self._episode, action)
        if step.done:
            self._episode = None
        return step

    async def close(self) -> None:
        if self._episode is not None:
            await self._taskset.client.cancel(self._episode)


class _RemoteEnvironment(Environment):
    RAW_CALLS = True

    def __init__(self, task: Task, taskset: ServedEpisodes, index: int | None) -> None:
        super().__init__(task)
        self._taskset, self._index = taskset, index
        self._episode: RemoteEpisode | None = None

    async def start(self) -> Observation:
        self._episode = await self._taskset.client.start(self._index)
        self.raw_tools = self._episode.tools
        return self._episode.observation

    async def step(self, action: Action) -> Step:
        if self._episode is None:
            raise UsageError("the episode was not started")
        return await self._episode.step(action)

    async def close(self) -> None:
        if self._episode is not None:
            await self._episode.cancel()


SERVERS = {"tcp": Served, "ipc": Served, "http": ServedEpisodes, "https": ServedEpisodes}
"""The taskset class for each address scheme."""


def read_server_node(address: str) -> dict[str, Any]:
    """The config node for a TARGET that is an address."""
    cls = SERVERS.get(address.partition("://")[0])
    if cls is None:
        known = ", ".join(f"{scheme}://" for scheme in SERVERS)
        raise UsageError(f"{address!r} is not the address of a server", remedy=f"it begins with {known}")
    return {"id": f"{__name__}:{cls.__name__}", "address": address}
