"""Calls of tools as messages have them, in OpenAI's form, and results as the messages that a model is shown.

read_calls(message["tool_calls"])            # what was called; what cannot be read says why
render([Item("red")])                        # '[{"name":"red"}]'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.chat.message import Message, text_of, without_surrogates
from treetune.core.environment import Action, Observation
from treetune.core.tool import ToolCall

MOST_CHARACTERS = 30_000
"""Of a result that a model is shown."""


def render(value: Any) -> Any:
    """A result as the content of a message: text, JSON, or parts with images."""
    if isinstance(value, Observation):
        if value.type == "image":
            return [{"type": "image_url", "image_url": {"url": value.content}}]
        value = value.content
    if value is None:
        return ""
    if isinstance(value, list) and value and all(map(_is_part, value)):
        parts = [{**part, "text": _cut(part["text"])} if part["type"] == "text" else part for part in value]
        return without_surrogates(parts)
    if not isinstance(value, str):
        try:
            value = msgspec.json.encode(value, enc_hook=str).decode()
        except UnicodeEncodeError:
            value = msgspec.json.encode(without_surrogates(msgspec.to_builtins(value, enc_hook=str))).decode()
    return _cut(without_surrogates(value))


def parts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The contents of messages, one after the other; a system message is part of what is shown."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = render(message.get("content"))
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return parts


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return (part.get("type") == "text" and isinstance(part.get("text"), str)) or (
        part.get("type") == "image_url" and "image_url" in part
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[cut: {MOST_CHARACTERS} of {len(text)} characters]"


def message_of(action: Action) -> Message | None:
    """The message that an action is, where it is one with calls or a role; else None."""
    content = action.content
    if isinstance(content, dict) and ("tool_calls" in content or content.get("role") == "assistant"):
        return content
    return None


def as_text(message: Message) -> Action:
    """A message without calls, for the `step` of an environment."""
    content = message.get("content")
    text = text_of(content)
    return Action("text", text) if text is not None else Action("json", content)


def read_calls(calls: Sequence[Any]) -> list[ToolCall]:
    """Calls in OpenAI's form, each with an id of its own; what cannot be read has an `error`."""
    used = {call.get("id") for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)}
    seen: set[str] = set()
    made = []
    for number, call in enumerate(calls):
        read = _read_call(call)
        if not read.id or read.id in seen:
            fresh = (f"call_{count}" for count in range(number, number + 2 * len(calls) + 1))
            read.id = next(id for id in fresh if id not in used and id not in seen)
        seen.add(read.id)
        made.append(read)
    return made


def _read_call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        return ToolCall("", "", error="the call cannot be read: it must be an object with a function")
    id: str = call["id"] if isinstance(call.get("id"), str) else ""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return ToolCall(id, "", error="the call names no function: {'function': {'name': ..., 'arguments': ...}}")
    given = function.get("arguments")
    if isinstance(given, dict):
        return ToolCall(id, name, given)
    if given is None or (isinstance(given, str) and not given.strip()):
        return ToolCall(id, name, {})
    if not isinstance(given, str):
        return ToolCall(id, name, given, error="the arguments must be a JSON object")
    try:
        arguments = msgspec.json.decode(given)
    except RecursionError:
        return ToolCall(id, name, given, error="the arguments are nested too deeply")
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        return ToolCall(id, name, given, error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(id, name, arguments, error="the arguments must be a JSON object")
    return ToolCall(id, name, arguments)


def with_calls(message: Message, made: Sequence[ToolCall]) -> Message:
    """The message with its calls as they were read: each has its id, and a name and arguments that are text."""
    calls = message.get("tool_calls") or []
    written = [_write_call(call, read) for call, read in zip(calls, made, strict=False)]
    return message if written == calls else {**message, "tool_calls": written}


def _write_call(call: Any, read: ToolCall) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        text = call if isinstance(call, str) else msgspec.json.encode(call, enc_hook=repr).decode()
        return {"id": read.id, "type": "function", "function": {"name": "", "arguments": text}}
    given = function.get("arguments")
    if not isinstance(given, str):
        given = msgspec.json.encode({} if given is None else given, enc_hook=repr).decode()
        function = {**function, "arguments": given}
    return {**call, "id": read.id, "type": "function", "function": function}
