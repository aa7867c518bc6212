"""Chat messages in the forms that programs write them, and how to tell whether two of them say the same.

flatten({"role": "user", "content": [{"type": "text", "text": "Hi"}]})   ->   {"role": "user", "content": "Hi"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.canonical import canonical
from treetune.task import Message

_TAG = re.compile(r"</?[a-z_|][^<>\n]{0,60}>|\s", re.I)
_REASONING = ("reasoning_content", "reasoning", "thinking")


def begins_answer(messages: Sequence[Message]) -> bool:
    """Whether messages that a model is shown end with the beginning of its answer: a message of the assistant's."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def text_of(content: Any) -> str | None:
    """The content of a message as text: parts that are all text are joined by lines. None where it is more."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text") or "") for part in content)
    return None


def flatten(message: Message) -> Message:
    """The message with its parts as one text, where they are all text."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    text = text_of(content)
    return message if text is None else {**message, "content": text}


def with_arguments(message: Message, kind: type) -> Message:
    """The message with the arguments of its tool calls as `dict`, or as `str` of JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, kind) for call in calls]}


def _call_with_arguments(call: Any, kind: type) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), kind):
        return call
    arguments = function.get("arguments")
    if kind is str:
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def same(one: Message, other: Message) -> bool:
    """Whether two messages are the same, in whatever form."""
    forms = [with_arguments(flatten(message), dict) for message in (one, other)]
    try:
        return canonical(forms[0]) == canonical(forms[1])
    except (TypeError, ValueError, msgspec.MsgspecError):
        return forms[0] == forms[1]


def is_said_by(message: Message, said: str) -> bool:
    """Whether a message is what a text says: its reasoning, its content and its tool calls, and nothing else."""
    parts = [reasoning_of(message), text_of(message.get("content")) or ""]
    calls = calls_of(message)
    if not calls and not parts[0]:
        return parts[1].strip() == said.strip()
    rest, values = _values_in(said) if calls else (said, [])
    if [canonical(value) for value in values] != [canonical(call) for call in calls]:
        return False
    return _TAG.sub("", rest) == _TAG.sub("", "".join(parts))


def is_shown_by(message: Message, shown: str) -> bool:
    """Whether a text holds all of a message, be its tool calls spelled as they may."""
    content, calls = (text_of(message.get("content")) or "").strip(), calls_of(message)
    if not calls and not reasoning_of(message):
        return content == shown
    return all(part.strip() in shown for part in (reasoning_of(message), content, *(call["name"] for call in calls)))


def reasoning_of(message: Message) -> str:
    return next((value for key in _REASONING if isinstance(value := message.get(key), str)), "")


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The name and the arguments of each tool call."""
    calls = with_arguments(message, dict).get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)] if calls else []
    return [{"name": str(function.get("name")), "arguments": function.get("arguments")} for function in functions]


def _values_in(text: str) -> tuple[str, list[Any]]:
    """The JSON objects in a text, calls among them with `parameters` for `arguments`; and the text around them."""
    decoder, rest, values, at = json.JSONDecoder(), [], [], 0
    while (start := text.find("{", at)) >= 0:
        rest.append(text[at:start])
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            rest.append("{")
            at = start + 1
            continue
        if value.keys() == {"name", "parameters"}:
            value = {"name": value["name"], "arguments": value["parameters"]}
        values.append(value)
    return "".join([*rest, text[at:]]), values
