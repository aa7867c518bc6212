"""`openenv:http://HOST:PORT`: the environment of an OpenEnv server as a taskset.

    treetune eval openenv:http://127.0.0.1:8000 -m MODEL -n 20

A task is what the server's task routes number, or a seed where it has none; then there is no end of them. What a model
says goes into the one text field of the server's actions. Where an action has no such field, the model answers with
JSON. Tools of the server are told to the model as tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from treetune.chat.calls import ToolCall, read_calls
from treetune.chat.message import Message
from treetune.config.trust import Origin
from treetune.core.environment import Action, Environment, Observation, Step
from treetune.core.task import Task
from treetune.core.tool_messages import split_action
from treetune.errors import EnvironmentFault, InvalidAction, UsageError
from treetune.serve.foreign import ForeignConfig, ForeignTasks, as_schema, tool_message
from treetune.serve.openenv.client import OpenEnvClient, OpenEnvSession, Refused

_ENVELOPE = ("metadata", "reward", "done")
"""What an observation has beside what it shows."""


class OpenEnvConfig(ForeignConfig, frozen=True, kw_only=True):
    action_field: str | None = None
    """The field of an action that what a model says goes into; by default the only text field that is required."""
    observation_field: str | None = None
    """The field of an observation that a model is shown; by default all of it, as JSON where it has several."""
    patience: float = 600.0
    """How long a free session of the server is waited for."""


class Actions(NamedTuple):
    """How the server wants to be acted on."""

    field: str | None
    """Where what a model says goes; None where it has to be JSON."""
    schema: dict[str, Any]
    takes_calls: bool
    """Calls in OpenAI's form."""
    takes_tools: bool
    """Only calls of one tool, in OpenEnv's own form."""


class OpenEnvTasks(ForeignTasks):
    """The environment of an OpenEnv server."""

    config_type = OpenEnvConfig
    config: OpenEnvConfig
    actions: Actions

    def connect(self) -> OpenEnvClient:
        config = self.config
        return OpenEnvClient(config.address, self.token, timeout=config.timeout, patience=config.patience)

    async def _ask(self, client: OpenEnvClient) -> None:
        found = await client.get("/metadata")
        self.name = str(found.get("name") or "") if isinstance(found, dict) else ""
        schemas = await client.get("/schema")
        if not isinstance(schemas, dict) or not isinstance(schemas.get("action"), dict):
            raise UsageError(f"{self.config.address} is no OpenEnv server: it has no /schema")
        self.actions = _read_actions(schemas["action"], self.config.action_field)
        names = await client.get("/list_environments")
        if isinstance(names, list) and names:
            await self._ask_tasks(client, str(names[0]))

    async def _ask_tasks(self, client: OpenEnvClient, name: str) -> None:
        """Where the server numbers its tasks."""
        name = quote(name, safe="")
        splits = await client.get(f"/{name}/splits")
        if not isinstance(splits, list):
            return
        self.split = self.choose_split([str(split["name"]) for split in splits])
        counted = await client.get(f"/{name}/num_tasks", {"split": self.split})
        if isinstance(counted, dict):
            self.num_tasks = int(counted["num_tasks"])

    def environment(self, task: Task) -> Environment:
        return OpenEnvEnvironment(task, self)

    def reset_of(self, task: Task) -> dict[str, Any]:
        """What is asked of the server for a task."""
        index = task.reward_spec["index"]
        return {"seed": index} if self.num_tasks is None else {"split": self.split, "index": index}


def taskset_class(address: str, origin: Origin) -> type[OpenEnvTasks]:
    """The taskset that `openenv:ADDRESS` stands for."""
    origin.refuse(f"would call a server: {address}")
    return type("OpenEnvTasksThere", (OpenEnvTasks,), {"ADDRESS": address, "BASE": OpenEnvTasks})


def _read_actions(schema: dict[str, Any], named: str | None) -> Actions:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    texts = [name for name, one in properties.items() if isinstance(one, dict) and one.get("type") == "string"]
    required = [name for name in texts if name in (schema.get("required") or [])]
    field = named or (required[0] if len(required) == 1 else texts[0] if len(texts) == 1 else None)
    is_tool = "tool_name" in properties
    return Actions(None if is_tool and named is None else field, schema, "tool_calls" in properties, is_tool)


class OpenEnvEnvironment(Environment):
    RAW_CALLS = True

    def __init__(self, task: Task, taskset: OpenEnvTasks) -> None:
        super().__init__(task)
        self._taskset, self._actions = taskset, taskset.actions
        self._client: OpenEnvClient | None = None
        self._session: OpenEnvSession | None = None

    async def start(self) -> Observation:
        self._client = self._taskset.connect()
        self._session, data = await self._client.start(self._taskset.reset_of(self.task))
        metadata = data.get("metadata") or {}
        if self._actions.takes_calls and isinstance(metadata.get("tools"), list):
            self.raw_tools = metadata["tools"]
        elif self._actions.takes_tools:
            listed = await self._ask_tools()
            self.raw_tools = [as_schema(tool) for tool in listed]
        opening = self._read_observation(data.get("observation"))
        if self._actions.field is None and not self.raw_tools:
            schema = json.dumps(self._actions.schema)
            told = {"role": "user", "content": f"Answer with one JSON object of this schema: {schema}"}
            return Observation("messages", [*opening.messages(), told])
        return opening

    async def _ask_tools(self) -> list[Any]:
        assert self._session is not None
        found = await self._session.call("tools/list", {})
        return list(found["tools"]) if isinstance(found, dict) else []

    async def step(self, action: Action) -> Step:
        text, calls = split_action(action)
        if calls and not self._actions.takes_calls:
            return await self._call(read_calls(calls))
        if calls:
            return self._read_step(await self._ask("step", {"message": text, "tool_calls": calls}))
        if self._actions.field is not None:
            return self._read_step(await self._ask("step", {self._actions.field: text}))
        if self.raw_tools:
            return Step(done=True, info={"explanation": "the answer calls no tool, which ends it"})
        return self._read_step(await self._ask("step", _read_json(text)))

    async def _call(self, calls: list[ToolCall]) -> Step:
        """One step of the server for each call, until one ends it."""
        messages: list[Message] = []
        earned, done, info = 0.0, False, {}
        for call in calls:
            if call.error is None:
                arguments = call.arguments if isinstance(call.arguments, dict) else {}
                request = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
                step = self._read_step(await self._ask("step", request))
                earned, done, info = earned + step.reward, step.done, step.info
                call.result = self._read_result(step.observation)
            messages.append(tool_message(call))
            if done:
                break
        return Step(Observation("messages", messages), earned, done, info, calls=calls)

    def _read_result(self, observation: Observation) -> Any:
        """What a tool gave: FastMCP's results say it in `data`, or in blocks of text."""
        shown = observation.content
        result = shown.get("result") if isinstance(shown, dict) else shown
        if isinstance(shown, dict) and (error := shown.get("error")):
            return error.get("message", str(error)) if isinstance(error, dict) else str(error)
        if isinstance(result, dict) and result.get("data") is not None:
            return result["data"]
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            return "\n".join(str(part.get("text", part)) for part in result["content"] if isinstance(part, dict))
        return result

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise UsageError("the episode was not started")
        try:
            found: dict[str, Any] = await self._session.ask(kind, data)
        except Refused as error:
            if kind == "step" and error.code == "VALIDATION_ERROR":
                raise InvalidAction(f"the server takes no such action: {error.message}") from None
            raise
        return found

    def _read_step(self, data: dict[str, Any]) -> Step:
        reward, done, metadata = data.get("reward"), data.get("done", False), data.get("metadata")
        if not isinstance(reward, int | float | None) or not isinstance(done, bool):
            raise EnvironmentFault(f"the server answered reward={reward!r:.60}, done={done!r:.60}")
        info = metadata if isinstance(metadata, dict) else {}
        truncated = bool(done and info.get("truncated"))
        return Step(self._read_observation(data.get("observation")), float(reward or 0.0), done, info, truncated)

    def _read_observation(self, shown: Any) -> Observation:
        if not isinstance(shown, dict):
            return Observation.of(shown)
        if (field := self._taskset.config.observation_field) is not None:
            return Observation.of(shown.get(field))
        messages = shown.get("messages")
        if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
            return Observation("messages", messages) if messages else Observation()
        rest = {key: value for key, value in shown.items() if key not in _ENVELOPE}
        texts = [value for value in rest.values() if isinstance(value, str)]
        return Observation("text", texts[0]) if len(rest) == len(texts) == 1 else Observation("json", rest)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._client is not None:
            await self._client.close()


def _read_json(text: str) -> dict[str, Any]:
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = msgspec.json.decode(text[begin : end + 1])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidAction("the answer has no JSON object, which an action of this environment is")
    return found
