"""The forms that one message may have: parts or text, the arguments of calls as JSON or as text; which are the same."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec

from treetune.chat.message import Message, text_of
from treetune.system.digest import canonical

_REASONING = ("reasoning_content", "reasoning", "thinking")


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
    if not isinstance(function, dict) or isinstance(arguments := function.get("arguments"), kind):
        return call
    with suppress(ValueError):  # what is no JSON stays as it is
        arguments = json.dumps(arguments, ensure_ascii=False) if kind is str else json.loads(str(arguments))
    return {**call, "function": {**function, "arguments": arguments}}


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages are the same, in whatever form."""
    forms = [with_arguments(flatten(message), dict) for message in (one, other)]
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


def reasoning_of(message: Message) -> str:
    return next((value for key in _REASONING if isinstance(value := message.get(key), str)), "")
