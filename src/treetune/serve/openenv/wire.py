"""Messages and answers of an OpenEnv server (OpenEnv 0.10).

    {"type": "step", "data": {"message": "42"}}
    {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": true, "metadata": {...}}}

An action has a `message` (the model's text), `tool_calls` in OpenAI's form, or both. Or it is one of OpenEnv's own tool
actions: `{"type": "call_tool", "tool_name", "arguments"}`, `{"type": "list_tools"}`. Faults have the form of pydantic's
errors, which OpenEnv's own servers use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from treetune.chat.calls import call_message
from treetune.chat.message import text_of
from treetune.core.environment import Observation, Step
from treetune.errors import TreetuneError
from treetune.serve.http.wire import check_shape, decode, to_http_error, write_message
from treetune.system.http_error import HttpError, encode

MOST_INDEX = 2**62
_NO_INPUT = object()
_STATUS = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 429}
"""The HTTP status of each error code."""


class Fault(HttpError):
    """An error that is sent as the answer, with its code and further fields."""

    def __init__(self, code: str, message: str, **further: Any) -> None:
        super().__init__(_STATUS.get(code, 500), code.lower(), message)
        self.data = {"message": message, "code": code, **further}
        self.detail = further.get("errors")


def fault_of(error: BaseException) -> Fault:
    """Converts an error to the form of OpenEnv."""
    if isinstance(error, Fault):
        return error
    found = to_http_error(error)
    remedy = error.remedy if isinstance(error, TreetuneError) else None
    message = f"{found}; {remedy}" if remedy else str(found)
    return Fault("CAPACITY_REACHED" if found.status == 429 else "EXECUTION_ERROR", message)


# Incoming messages


class Wrong(NamedTuple):
    """One fault of a message, named as pydantic does."""

    type: str
    loc: tuple[str, ...]
    msg: str
    input: Any

    @classmethod
    def extra(cls, value: Any, *loc: str) -> Wrong:
        return cls("extra_forbidden", loc, "Extra inputs are not permitted", value)

    @classmethod
    def missing(cls, whole: Any, *loc: str) -> Wrong:
        return cls("missing", loc, "Field required", whole)

    @classmethod
    def kind(cls, name: str, value: Any, *loc: str) -> Wrong:
        word = {"dict": "dictionary", "int": "integer"}.get(name, name)
        return cls(f"{name}_type", loc, f"Input should be a valid {word}", value)


def invalid(wrong: list[Wrong]) -> Fault:
    return Fault("VALIDATION_ERROR", "Invalid message", errors=[one._asdict() for one in wrong])


def refuse(wrong: list[Wrong]) -> None:
    if wrong:
        raise invalid(wrong)


def read_message(text: str) -> tuple[Any, Mapping[str, Any]]:
    """Returns the type of a message and the whole message."""
    try:
        data = text.encode()
        check_shape(data)
        message = decode(Any, data)
    except HttpError as error:
        raise Fault("INVALID_JSON", f"Invalid JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Fault("INVALID_JSON", f"Invalid JSON: {error}") from None
    if not isinstance(message, dict):
        raise Fault("SESSION_ERROR", f"a message must be a JSON object, not {type(message).__name__}")
    return message.get("type", ""), message


_EMPTY: dict[str, Any] = {}


def data_of(message: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """Returns the `data` of a message, which may have no other field except its type."""
    data = message.get("data", _NO_INPUT)
    if isinstance(data, dict) and len(message) == 2:
        return data
    wrong = []
    if data is _NO_INPUT:
        wrong = [Wrong.missing(message, "data")] if required else []
    elif not isinstance(data, dict):
        wrong = [Wrong.kind("dict", data, "data")]
    refuse(wrong + [Wrong.extra(value, key) for key, value in message.items() if key not in ("type", "data")])
    return data if isinstance(data, dict) else _EMPTY


def refuse_data(message: Mapping[str, Any]) -> None:
    """Refuses a message that has more than its type."""
    if len(message) != 1:
        refuse([Wrong.extra(value, key) for key, value in message.items() if key != "type"])


class Reset(msgspec.Struct):
    """The fields of a reset. Others are ignored, as in OpenEnv."""

    seed: int | None = None
    """The same seed gives the same task."""
    episode_id: str | None = None
    """The client's name for the episode, which `state` returns."""
    index: int | None = None
    """The index of the task in the split, as the task routes number it."""
    task_index: int | None = None
    """The same as `index`."""
    split: str | None = None

    def task(self, count: int | None) -> int | None:
        """Returns the index of the task; None: the next one."""
        index = self.index if self.index is not None else self.task_index
        if index is None and self.seed is not None:
            index = self.seed % (count or MOST_INDEX)
        if index is not None and not 0 <= index < MOST_INDEX:
            raise Fault("VALIDATION_ERROR", f"there is no task {index}")
        return index


def read_reset(data: Mapping[str, Any], *at: str) -> Reset:
    """`at` is the path to the reset in the body of an HTTP request."""
    wrong = [
        Wrong.kind("int" if kind is int else "string", value, *at, key)
        for key, kind in (("seed", int), ("episode_id", str), ("index", int), ("task_index", int), ("split", str))
        if (value := data.get(key)) is not None and (not isinstance(value, kind) or isinstance(value, bool))
    ]
    refuse(wrong)
    asked = msgspec.convert(data, Reset)
    if at and asked.seed is not None and asked.seed < 0:
        problem = "Input should be greater than or equal to 0"
        raise invalid([Wrong("greater_than_equal", (*at, "seed"), problem, asked.seed)])
    return asked


class ToolAction(NamedTuple):
    """One call of a tool, as OpenEnv's `CallToolAction`."""

    name: str
    arguments: dict[str, Any]

    @property
    def value(self) -> Any:
        return call_message(self.name, self.arguments)


class ListTools(NamedTuple):
    """OpenEnv's `ListToolsAction`."""


_FIELDS = {"message": "string", "tool_calls": "list", "metadata": "dict"}
_CALL_FIELDS = {"type": "string", "tool_name": "string", "arguments": "dict", "metadata": "dict"}
_KINDS: dict[str, type] = {"string": str, "list": list, "dict": dict}


def read_action(data: dict[str, Any]) -> Any:
    """Returns the action in the form that an episode takes, or a `ToolAction` or `ListTools`."""
    if len(data) == 1 and type(text := data.get("message")) is str:
        return text  # most actions
    kind = data.get("type")
    if kind == "list_tools":
        refuse(_check_fields(data, {"type": "string", "metadata": "dict"}))
        return ListTools()
    if kind == "call_tool":
        wrong = [] if "tool_name" in data else [Wrong.missing(data, "tool_name")]
        refuse(wrong + _check_fields(data, _CALL_FIELDS))
        return ToolAction(data["tool_name"], data.get("arguments", {}))
    wrong = [] if "message" in data or "tool_calls" in data else [Wrong.missing(data, "message")]
    refuse(wrong + _check_fields(data, _FIELDS))
    if "tool_calls" in data:
        return write_message(data.get("message", ""), data["tool_calls"])
    return data["message"]


def _check_fields(data: Mapping[str, Any], fields: Mapping[str, str]) -> list[Wrong]:
    wrong = [
        Wrong.kind(kind, data[name], name)
        for name, kind in fields.items()
        if name in data and not isinstance(data[name], _KINDS[kind])
    ]
    return wrong + [Wrong.extra(value, name) for name, value in data.items() if name not in fields]


# Outgoing messages


def show(observation: Observation) -> dict[str, Any]:
    """The observation for the model, as text and as chat messages."""
    if observation.type == "text":
        text = observation.content
        return {"text": text, "messages": [{"role": "user", "content": text}] if text else []}
    messages = observation.messages()
    texts = (text_of(message.get("content")) for message in messages)
    return {"text": "\n\n".join(text for text in texts if text), "messages": messages}


def observed(observation: dict[str, Any], reward: float | None, done: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    """An observation in the form of OpenEnv. The metadata is inside the observation and, if there is any, also next to
    it."""
    observation["metadata"] = metadata
    found = {"observation": observation, "reward": reward, "done": done}
    if metadata:
        found["metadata"] = metadata
    return found


def stepped(step: Step, tool: str | None = None) -> dict[str, Any]:
    """The answer to a step; `tool` is the tool of a `CallToolAction`."""
    shown = show(step.observation)
    if tool is not None:
        shown |= {"tool_name": tool, "result": shown["text"], "error": _tool_error(step)}
    return observed(shown, step.reward, step.done, step.info)


def _tool_error(step: Step) -> dict[str, str] | None:
    error = step.calls[0].error if step.calls else None
    return None if error is None else {"error_type": "execution_error", "message": error}


def describe_tool(tool: dict[str, Any], schema: str) -> dict[str, Any]:
    """Describes a tool; `schema` is the key for the schema of its arguments."""
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description", ""), schema: parameters}


def frame(kind: str, data: Any) -> str:
    return encode({"type": kind, "data": data}).decode()


@cache
def schemas() -> bytes:
    """JSON schemas of actions, observations and states."""
    found = json.loads(resources.files("treetune.serve.openenv").joinpath("schemas.json").read_bytes())
    return encode({**found, "reset_observation": found["observation"]})
