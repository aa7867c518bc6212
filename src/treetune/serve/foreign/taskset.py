"""Environments on servers of other projects, as tasksets: the code that `openenv:URL` and `ors:URL` share.

    taskset = load_taskset("openenv:http://127.0.0.1:8000")
    taskset.count()                                     # None if the server numbers no tasks

The server is asked for its tasks when the taskset is created. A task is identified by its number; its prompt is the
first observation of its episode. An error of the server is a failure without a reward.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Self

import msgspec

from treetune.chat.calls import ToolCall, read_calls
from treetune.chat.message import Message
from treetune.config.trust import Origin
from treetune.core.environment import Action, Environment, Observation, Step
from treetune.core.task import Task
from treetune.core.tool_messages import render, split_action
from treetune.errors import EnvironmentFault, UsageError, did_you_mean
from treetune.serve.remote_taskset import Served, ServedConfig
from treetune.system.threads import run_in_background


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
    MULTI_TURN = True  # the server does not say before an episode
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
        raise UsageError(f"{self.config.address} has no figures that `top` knows")

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


def class_at(base: type[ForeignTasks], address: str, origin: Origin) -> type[ForeignTasks]:
    """Returns the taskset class for a TARGET with an address."""
    origin.refuse(f"would call a server: {address}")
    return type(f"{base.__name__}There", (base,), {"ADDRESS": address, "BASE": base})


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

    async def step(self, action: Action) -> Step:
        text, calls = split_action(action)
        return await self.say(text, calls)

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


def end_without_call() -> Step:
    return Step(done=True, info={"explanation": "the answer calls no tool, which ends it"})


def make_step(shown: Observation, reward: Any, done: Any, metadata: Any) -> Step:
    """Builds a step from a server's answer. Raises EnvironmentFault if the reward or the end has the wrong type."""
    if not isinstance(reward, int | float | None) or not isinstance(done, bool):
        raise EnvironmentFault(f"the server answered reward={reward!r:.60}, done={done!r:.60}")
    info = dict(metadata) if isinstance(metadata, dict) else {}
    return Step(shown, float(reward or 0.0), done, info, bool(done and info.get("truncated")))


def as_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Converts a tool as MCP or ORS lists it to OpenAI's form."""
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}
