"""Converts tool results to the messages that a model sees, and reads actions that are messages.

render([Item("red")])                        # '[{"name":"red"}]'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.chat.message import Message, text_of, without_surrogates
from treetune.core.environment import Action, Observation

MOST_CHARACTERS = 30_000
"""The maximum length of a result that a model sees."""


def render(value: Any) -> Any:
    """A result as message content: text, JSON, or parts with images."""
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
    """The contents of all messages, in order, including system messages."""
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
    """The message in an action, if it has tool calls or the assistant role; else None."""
    content = action.content
    if isinstance(content, dict) and ("tool_calls" in content or content.get("role") == "assistant"):
        return content
    return None


def split_action(action: Action) -> tuple[str, list[Any]]:
    """The text of an action, and the tool calls in its message."""
    if (message := message_of(action)) is None:
        return action.text, []
    return str(render(message.get("content")) or ""), message.get("tool_calls") or []


def as_text(message: Message) -> Action:
    """Convert a message without calls to an action for the `step` of an environment."""
    content = message.get("content")
    text = text_of(content)
    return Action("text", text) if text is not None else Action("json", content)
