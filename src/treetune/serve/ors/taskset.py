"""`ors:http://HOST:PORT`: an environment of an ORS server as a taskset.

    treetune eval ors:http://127.0.0.1:8080 -m MODEL -n 20 --taskset.split test

Its tools are told to the model, which earns by calling them. What a model says without a call goes to the one tool that
takes one text, where there is such a tool; else it ends the episode.
"""

from __future__ import annotations

import os
from typing import Any

from treetune.chat.calls import ToolCall, read_calls
from treetune.chat.message import Message
from treetune.config.trust import Origin
from treetune.core.environment import Action, Environment, Observation, Step
from treetune.core.task import Task
from treetune.core.tool_messages import render, split_action
from treetune.errors import EnvironmentFault, UsageError
from treetune.serve.foreign import ForeignConfig, ForeignTasks, as_schema, tool_message
from treetune.serve.openenv.rpc import ANSWER
from treetune.serve.ors.client import CallRefused, OrsClient, OrsSession

_OWN_ANSWER = (ANSWER, "text")


class OrsConfig(ForeignConfig, frozen=True, kw_only=True):
    environment: str | None = None
    """Which of the server's environments; absent: its first."""
    answer_tool: str | None = None
    """The tool that is given what a model says without a call; by default the only one that takes one text."""


class OrsTasks(ForeignTasks):
    """An environment of an ORS server."""

    config_type = OrsConfig
    config: OrsConfig
    environment_name = ""

    def connect(self) -> OrsClient:
        token = self.token or os.environ.get("ORS_API_KEY") or None
        return OrsClient(self.config.address, token, timeout=self.config.timeout)

    async def _ask(self, client: OrsClient) -> None:
        names = await client.ask("GET", "/list_environments")
        if not isinstance(names, list) or not names:
            raise UsageError(f"{self.config.address} is no ORS server: it lists no environments")
        self.environment_name = self._choose_environment([str(name) for name in names])
        self.name = self.environment_name
        splits = await client.ask("GET", f"/{self.environment_name}/splits")
        self.split = self.choose_split([str(split["name"]) for split in splits or []])
        counted = await client.ask("POST", f"/{self.environment_name}/num_tasks", {"split": self.split})
        if isinstance(counted, dict):
            self.num_tasks = int(counted["num_tasks"])

    def _choose_environment(self, names: list[str]) -> str:
        named = self.config.environment
        if named is not None and named.lower() not in map(str.lower, names):
            problem = f"{self.config.address} has no environment {named!r}"
            raise UsageError(problem, remedy=f"it has: {', '.join(names)}")
        return named or names[0]

    def environment(self, task: Task) -> Environment:
        return OrsEnvironment(task, self)


def taskset_class(address: str, origin: Origin) -> type[OrsTasks]:
    """The taskset that `ors:ADDRESS` stands for."""
    origin.refuse(f"would call a server: {address}")
    return type("OrsTasksThere", (OrsTasks,), {"ADDRESS": address, "BASE": OrsTasks})


class OrsEnvironment(Environment):
    RAW_CALLS = True

    def __init__(self, task: Task, taskset: OrsTasks) -> None:
        super().__init__(task)
        self._taskset = taskset
        self._client: OrsClient | None = None
        self._session: OrsSession | None = None
        self._answer: tuple[str, str] | None = None
        """The tool that takes what is said, and how it calls it."""

    async def start(self) -> Observation:
        taskset = self._taskset
        task = {"split": taskset.split, "index": self.task.reward_spec["index"]}
        self._client = taskset.connect()
        self._session = await self._client.create(taskset.environment_name, task)
        prompt = await self._session.prompt()
        tools = await self._session.tools()
        self._answer = _find_answer(tools, taskset.config.answer_tool)
        # Our own server offers `answer` to those who can only call tools, and nobody has to here.
        own = self._answer == _OWN_ANSWER
        self.raw_tools = [as_schema(tool) for tool in tools if not own or tool["name"] != ANSWER]
        return _read_blocks(prompt)

    async def step(self, action: Action) -> Step:
        if self._session is None:
            raise UsageError("the episode was not started")
        text, calls = split_action(action)
        if calls:
            return await self._call(self._session, read_calls(calls))
        if self._answer is None:
            return Step(done=True, info={"explanation": "the answer calls no tool, which ends it"})
        try:
            return _read_output(await self._session.call(self._answer[0], {self._answer[1]: text}))
        except CallRefused as error:
            return Step(error.message, info={"explanation": error.message})

    async def _call(self, session: OrsSession, calls: list[ToolCall]) -> Step:
        messages: list[Message] = []
        whole = Step(calls=calls)
        for call in calls:
            if call.error is None:
                try:
                    arguments = call.arguments if isinstance(call.arguments, dict) else {}
                    step = _read_output(await session.call(call.name, arguments))
                    whole.reward, whole.done, whole.info = whole.reward + step.reward, step.done, step.info
                    call.result = render(step.observation)
                except CallRefused as error:
                    call.error = error.message
            messages.append(tool_message(call))
            if whole.done:
                break
        whole.observation = Observation("messages", messages)
        return whole

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.delete()
        if self._client is not None:
            await self._client.close()


def _find_answer(tools: list[Any], named: str | None) -> tuple[str, str] | None:
    """The tool that takes one text, and the name of that text."""
    found = []
    for tool in tools:
        properties = (tool.get("input_schema") or {}).get("properties") or {}
        texts = [name for name, one in properties.items() if isinstance(one, dict) and one.get("type") == "string"]
        if len(texts) == len(properties) == 1:
            found.append((str(tool["name"]), texts[0]))
    if named is not None:
        found = [one for one in found if one[0] == named]
        if not found:
            raise UsageError(f"answer_tool: {named!r} is no tool that takes one text")
    if _OWN_ANSWER in found:
        return _OWN_ANSWER
    return found[0] if len(found) == 1 else None


def _read_output(output: dict[str, Any]) -> Step:
    reward, finished, metadata = output.get("reward"), output.get("finished", False), output.get("metadata")
    if not isinstance(reward, int | float | None) or not isinstance(finished, bool):
        raise EnvironmentFault(f"the server answered reward={reward!r:.60}, finished={finished!r:.60}")
    info = dict(metadata) if isinstance(metadata, dict) else {}
    shown = _read_blocks(output.get("blocks"))
    return Step(shown, float(reward or 0.0), finished, info, bool(finished and info.get("truncated")))


def _read_blocks(blocks: Any) -> Observation:
    """Text, or a message with images."""
    parts: list[dict[str, Any]] = []
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, dict) and block.get("type") == "image":
            url = f"data:{block.get('mimeType')};base64,{block.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(block, dict):
            parts.append({"type": "text", "text": str(block.get("text", ""))})
    if all(part["type"] == "text" for part in parts):
        return Observation("text", "\n\n".join(part["text"] for part in parts))
    return Observation("messages", [{"role": "user", "content": parts}])
