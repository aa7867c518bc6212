"""Calls of tools: what one is, the one reader of the forms in which messages have them, and the one writer.

    read_calls(message["tool_calls"])                       # [ToolCall("call_0", "search", {"query": "red"})]
    write_call("call_0", "search", {"query": "red"})        # as OpenAI's API has it
    with_arguments(message, dict)                           # the same calls, their arguments as objects

The arguments of a call are an object, or JSON text of one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.chat.message import Message, flatten_content, reasoning_of, text_of
from treetune.system.digest import canonical


class ToolCall(msgspec.Struct):
    """A call that a model made, and what came of it."""

    id: str
    """By which its result is known: the `tool_call_id` of the message."""
    name: str
    """The tool."""
    arguments: Any = None
    """As they were read from JSON; the text itself where it is none."""
    result: Any = ""
    """What the model was shown: text, or parts with images."""
    seconds: float = 0.0
    """How long it took."""
    error: str | None = None
    """What went wrong; None where the tool gave its result."""


# Reading


def read_calls(calls: Any) -> list[ToolCall]:
    """Calls of a message, each with an id of its own; one that cannot be read has an `error`."""
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
        return ToolCall(id, "", error="the call names no function: {'function': {'name': ..., 'arguments': ...}}")
    arguments, error = read_arguments(function.get("arguments"))
    return ToolCall(id, name, arguments, error=error)


def read_arguments(given: Any) -> tuple[Any, str | None]:
    """The arguments of a call as an object; else as they were given, and what is wrong with them."""
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
    """The inner part of a tool or a call as OpenAI has them; the whole where it stands alone."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


# Writing


def write_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form: its arguments are text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": write_arguments(arguments)}}


def write_arguments(arguments: Any) -> str:
    """Arguments as JSON text. Text stays as it is; no arguments are an empty object."""
    if isinstance(arguments, str):
        return arguments or "{}"
    try:
        return msgspec.json.encode({} if arguments is None else arguments, enc_hook=repr).decode()
    except (OverflowError, UnicodeEncodeError):  # an integer beyond 64 bits, half of a surrogate pair
        return json.dumps(arguments, separators=(",", ":"), default=repr)


def call_message(name: str, arguments: Any, id: str = "call_0") -> Message:
    """The message of a model that calls one tool."""
    return {"role": "assistant", "content": "", "tool_calls": [write_call(id, name, arguments)]}


def call_id(turn: int, number: int) -> str:
    """What names a call that came without a name: nine letters, as Mistral's templates want it."""
    return f"c{turn % 10_000:04}{number % 10_000:04}"


def with_calls(message: Message, made: Sequence[ToolCall]) -> Message:
    """The message with its calls as they were read: each has its id, and a name and arguments that are text."""
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
    """The message with the arguments of its tool calls as `dict`, or as `str` of JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, kind) for call in calls]}


def _call_with_arguments(call: Any, kind: type) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(arguments := function.get("arguments"), kind):
        return call
    if kind is str:
        arguments = json.dumps(arguments, ensure_ascii=False)  # with spaces, as chat templates write them
    else:
        arguments, _ = read_arguments(arguments)  # what is no JSON stays as it is
    return {**call, "function": {**function, "arguments": arguments}}


# Comparing


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages are the same, in whatever form."""
    forms = [with_arguments(flatten_content(message), dict) for message in (one, other)]
    try:
        return canonical(forms[0]) == canonical(forms[1])
    except (TypeError, ValueError, msgspec.MsgspecError):
        return forms[0] == forms[1]


def is_shown_by(message: Message, shown: str) -> bool:
    """Whether a text holds all of a message, be its tool calls spelled as they may."""
    content, calls = (text_of(message.get("content")) or "").strip(), message.get("tool_calls") or []
    if not calls and not reasoning_of(message):
        return content == shown
    names = [str(call.get("function", call).get("name")) for call in calls]
    return all(part.strip() in shown for part in (reasoning_of(message), content, *names))
