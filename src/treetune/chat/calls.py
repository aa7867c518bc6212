"""Tool calls: the struct, the single parser of their forms in messages, and the single writer.

    read_calls(message["tool_calls"])                       # [ToolCall("call_0", "search", {"query": "red"})]
    write_call("call_0", "search", {"query": "red"})        # in the form of OpenAI's API
    with_arguments(message, dict)                           # the same calls with their arguments as objects

The arguments of a call are an object, or an object as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.chat.message import Message, flatten_content, reasoning_of, text_of
from treetune.system.digest import canonical


class ToolCall(msgspec.Struct):
    """A tool call of a model, and its result."""

    id: str
    """The id that its result refers to: the `tool_call_id` of the message."""
    name: str
    """The name of the tool."""
    arguments: Any = None
    """The parsed arguments; the original text if it is not JSON."""
    result: Any = ""
    """The result that the model sees: text, or parts with images."""
    seconds: float = 0.0
    """The duration of the call."""
    error: str | None = None
    """The error; None if the tool returned a result."""


# Reading


def read_calls(calls: Any) -> list[ToolCall]:
    """Parse the calls of a message. Each gets a unique id; calls that cannot be parsed have an `error`."""
    calls = calls if isinstance(calls, list) else [calls]
    used = {call.get("id") for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)}
    seen: set[str] = set()
    made = []
    for number, call in enumerate(calls):
        read = read_call(call)
        if not read.id or read.id in seen:
            fresh = (f"call_{count}" for count in range(number, number + 2 * len(calls) + 1))
            read.id = next(id for id in fresh if id not in used and id not in seen)
        seen.add(read.id)
        made.append(read)
    return made


def read_call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        return ToolCall("", "", error="the call cannot be read: it must be an object with a function")
    id: str = call["id"] if isinstance(call.get("id"), str) else ""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return ToolCall(
            id, "", error="the call does not name a function: {'function': {'name': ..., 'arguments': ...}}}"
        )
    arguments, error = read_arguments(function.get("arguments"))
    return ToolCall(id, name, arguments, error=error)


def read_arguments(given: Any) -> tuple[Any, str | None]:
    """Returns the arguments of a call as an object, and None; if they cannot be read, the arguments as given, and the
    problem."""
    if isinstance(given, dict):
        return given, None
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}, None
    if not isinstance(given, str):
        return given, "the arguments must be a JSON object"
    try:
        arguments = msgspec.json.decode(given)
    except RecursionError:
        return given, "the arguments are nested too deeply"
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        return given, f"the arguments are not JSON: {error}"
    return arguments, None if isinstance(arguments, dict) else "the arguments must be a JSON object"


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """The `function` part of a tool or call in OpenAI's form; the value itself if it has no such part."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


# Writing


def write_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form, with arguments as text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": write_arguments(arguments)}}


def write_arguments(arguments: Any) -> str:
    """Arguments as JSON text. Text is not changed; missing arguments become an empty object."""
    if isinstance(arguments, str):
        return arguments or "{}"
    try:
        return msgspec.json.encode({} if arguments is None else arguments, enc_hook=repr).decode()
    except (OverflowError, UnicodeEncodeError):  # an integer beyond 64 bits, or half a surrogate pair
        return json.dumps(arguments, separators=(",", ":"), default=repr)


def call_message(name: str, arguments: Any, id: str = "call_0") -> Message:
    """An assistant message that calls one tool."""
    return {"role": "assistant", "content": "", "tool_calls": [write_call(id, name, arguments)]}


def call_id(turn: int, number: int) -> str:
    """An id for a call without one: nine characters, as Mistral's templates require."""
    return f"c{turn % 10_000:04}{number % 10_000:04}"


def with_calls(message: Message, made: Sequence[ToolCall]) -> Message:
    """The message with its calls as parsed: each has its id, and its name and arguments as text."""
    calls = message.get("tool_calls") or []
    written = [_rewrite_call(call, read) for call, read in zip(calls, made, strict=False)]
    return message if written == calls else {**message, "tool_calls": written}


def _rewrite_call(call: Any, read: ToolCall) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        text = call if isinstance(call, str) else msgspec.json.encode(call, enc_hook=repr).decode()
        return write_call(read.id, "", text)
    if not isinstance(given := function.get("arguments"), str):
        function = {**function, "arguments": write_arguments(given)}
    return {**call, "id": read.id, "type": "function", "function": function}


def with_arguments(message: Message, kind: type) -> Message:
    """The message with the arguments of its tool calls as `dict`, or as JSON `str`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, kind) for call in calls]}


def _call_with_arguments(call: Any, kind: type) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(arguments := function.get("arguments"), kind):
        return call
    if kind is str:
        arguments = json.dumps(arguments, ensure_ascii=False)  # with spaces, like chat templates
    else:
        arguments, _ = read_arguments(arguments)  # unchanged if it is not JSON
    return {**call, "function": {**function, "arguments": arguments}}


# Comparing


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages are equal, regardless of their form."""
    forms = [with_arguments(flatten_content(message), dict) for message in (one, other)]
    try:
        return canonical(forms[0]) == canonical(forms[1])
    except (TypeError, ValueError, msgspec.MsgspecError):
        return forms[0] == forms[1]


def is_shown_by(message: Message, shown: str) -> bool:
    """Whether a text contains all of a message; tool calls may be spelled in any way."""
    content, calls = (text_of(message.get("content")) or "").strip(), message.get("tool_calls") or []
    if not calls and not reasoning_of(message):
        return content == shown
    names = [str(call.get("function", call).get("name")) for call in calls]
    return all(part.strip() in shown for part in (reasoning_of(message), content, *names))
