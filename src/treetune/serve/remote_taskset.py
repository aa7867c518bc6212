"""Tasksets on servers, as seen from a client.

    taskset = load_taskset("tcp://127.0.0.1:5555")     # or http://127.0.0.1:5000
    await taskset.learn()                               # its name and how many tasks it has
    await taskset.first_tasks(3)

A pull server also runs the rollouts. An HTTP server runs only the environment; the policy runs here. The servers of
other projects, which `openenv:URL` and `ors:URL` name, also run only the environment: the taskset asks them for their
tasks when it is created. A task there is identified by its number, and its prompt is the first observation of its
episode.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Self

import msgspec

from treetune.chat.calls import ToolCall, read_calls
from treetune.chat.message import Message
from treetune.config.trust import Origin
from treetune.core.environment import Action, Environment, Observation, Step
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource
from treetune.errors import EnvironmentFault, TasksetError, UsageError, did_you_mean
from treetune.play.protocol import Info
from treetune.play.toolbox import render, split_action
from treetune.serve.errors import ServeError
from treetune.serve.http.client import RemoteEpisode, TaskServerClient
from treetune.serve.http.transport import HttpTransport
from treetune.serve.zmq.client import EnvClient
from treetune.system.threads import run_in_background

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
                f"{self.name} is only a generator: its server cannot return a task by index",
                remedy="show the taskset itself",
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
        """Returns the first tasks. The prompt of a task is the first observation of its episode."""
        tasks = []
        for task in self.select_tasks(count):
            async with await self.client.start(task.reward_spec[INDEX]) as episode:
                tasks.append(msgspec.structs.replace(task, prompt=episode.observation.messages()))
        return tasks

    async def stats(self) -> dict[str, Any]:
        async with HttpTransport(self.config.address, self.token) as transport:
            reply = await transport.ask("GET", "/metrics", None, self.deadline)
        if reply.status == 404:
            raise ServeError(f"{transport.url} has no /metrics", remedy="`treetune serve TARGET --http :PORT` does")
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
        raise UsageError(f"{address!r} is not the address of a server", remedy=f"it must begin with {known}")
    return {"id": f"{__name__}:{cls.__name__}", "address": address}


# Servers of other projects


class ForeignConfig(ServedConfig, frozen=True, kw_only=True):
    address: str = ""
    """The server's address, as in the TARGET. The token is read from TREETUNE_TOKEN."""
    split: str | None = None
    """Which of the server's splits to use; absent: `train`, or its first."""
    prompts: bool = False
    """Use the server's first observation as the prompt of a task; rows need a prompt. This takes a session of the
    server for each task that is drawn."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """The time limit in seconds for one answer of the server."""


class ForeignTasks(Served):
    ADDRESS: ClassVar[str] = ""
    """The address of a class that was made for a TARGET."""
    BASE: ClassVar[type[ForeignTasks] | None] = None
    BY_NUMBER = True
    MULTI_TURN = True  # the server does not report this before an episode
    config_type = ForeignConfig
    config: ForeignConfig

    def __init__(self, config: ForeignConfig | None = None) -> None:
        super().__init__(config)
        if not self.config.address.startswith(("http://", "https://")):
            raise UsageError(
                f"{self.config.address!r} is not an address", remedy="write http://HOST:PORT after the colon"
            )
        self.split = self.config.split or ""
        self.num_tasks: int | None = None
        run_in_background(self._learn_apart())
        self.name = self.name or self.config.address
        self.INFINITE = self.num_tasks is None  # type: ignore[misc]

    @classmethod
    def at_address(cls, address: str, origin: Origin) -> type[Self]:
        """The taskset class for a TARGET with an address."""
        origin.refuse(f"would call a server: {address}")
        return type(f"{cls.__name__}There", (cls,), {"ADDRESS": address, "BASE": cls})

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        # The class of a TARGET is created at run time, so other processes cannot import it.
        made: Any = cls.BASE or cls
        address = config.address or cls.ADDRESS
        return made(msgspec.structs.replace(config, address=address.rstrip("/")), **options)  # type: ignore[no-any-return]

    async def _learn_apart(self) -> None:
        client = self.connect()
        try:
            await self._ask(client)
        finally:
            await client.close()

    @abstractmethod
    def connect(self) -> Any:
        """Returns a client of the server. Each episode opens and closes its own, so the taskset need not be closed."""

    @abstractmethod
    async def _ask(self, client: Any) -> None:
        """Asks the server for its name, its splits and its tasks."""

    def choose_split(self, splits: list[str]) -> str:
        named = self.config.split
        if named is not None and named not in splits:
            problem = f"{self.config.address} has no split {named!r}{did_you_mean(named, splits)}"
            raise UsageError(problem, remedy=f"it has: {', '.join(splits)}")
        return named or ("train" if "train" in splits or not splits else splits[0])

    async def learn(self) -> None:
        """Does nothing: the server was asked when the taskset was created."""

    async def first_tasks(self, count: int) -> list[Task]:
        """The prompt is the first observation of an episode of the task."""
        tasks = []
        for task in self.select_tasks(count):
            prompt, names = await self._look(task)
            tasks.append(msgspec.structs.replace(task, prompt=prompt, tools=names))
        return tasks

    async def _look(self, task: Task) -> tuple[list[Message], list[str]]:
        """Returns the first observation of an episode of the task, and the names of its tools."""
        environment = self.environment(task)
        try:
            shown = await environment.start()
            return shown.messages(), [str(tool["function"]["name"]) for tool in environment.raw_tools]
        finally:
            await environment.close()

    async def stats(self) -> dict[str, Any]:
        raise UsageError(f"{self.config.address} has no figures that `top` can show")

    def count(self) -> int | None:
        return self.num_tasks

    def task_at(self, index: int) -> Task:
        task = Task(reward_spec={"index": index}, data_source=self.name)
        if not self.config.prompts:
            return task
        return msgspec.structs.replace(task, prompt=run_in_background(self._look(task))[0])

    @property
    def scores_groups(self) -> bool:
        return False

    def source(self) -> str | None:
        return f"{self.config.address} {self.split}"


class ForeignEnvironment(Environment):
    """An episode on another project's server, in its own session."""

    RAW_CALLS = True

    def __init__(self, task: Task, client: Any) -> None:
        super().__init__(task)
        self._client = client
        self._session: Any = None

    @property
    def session(self) -> Any:
        if self._session is None:
            raise UsageError("the episode was not started")
        return self._session

    def offer(self, tools: list[dict[str, Any]]) -> None:
        """Offers the model tools as MCP or ORS lists them, in OpenAI's form."""
        self.raw_tools = []
        for tool in tools:
            parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
            function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
            self.raw_tools.append({"type": "function", "function": function})

    async def step(self, action: Action) -> Step:
        text, calls = split_action(action)
        return await self.say(text, calls)

    def make_step(self, shown: Observation, reward: Any, done: Any, metadata: Any) -> Step:
        """Builds a step from a server's answer. Raises EnvironmentFault if the reward or the end has the wrong type."""
        if not isinstance(reward, int | float | None) or not isinstance(done, bool):
            raise EnvironmentFault(f"the server answered reward={reward!r:.60}, done={done!r:.60}")
        info = dict(metadata) if isinstance(metadata, dict) else {}
        return Step(shown, float(reward or 0.0), done, info, bool(done and info.get("truncated")))

    def end_without_call(self) -> Step:
        return Step(done=True, info={"explanation": "an answer without a tool call ends it"})

    @abstractmethod
    async def say(self, text: str, calls: list[Any]) -> Step:
        """Takes a step with the model's text and the calls that it makes."""

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any], call: ToolCall) -> Step:
        """One call of a tool on the server. Sets the call's result or its error."""

    async def call_each(self, calls: list[Any]) -> Step:
        """Calls the tools in order until one ends the episode."""
        whole, messages = Step(calls=read_calls(calls)), []
        for call in whole.calls:
            if call.error is None:
                step = await self.call(call.name, call.arguments if isinstance(call.arguments, dict) else {}, call)
                if call.error is None:
                    whole.reward, whole.done, whole.info = whole.reward + step.reward, step.done, step.info
            content = call.error if call.error is not None else render(call.result)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
            if whole.done:
                break
        whole.observation = Observation("messages", messages)
        return whole

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._client.close()
