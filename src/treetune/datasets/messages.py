"""Chat messages from a dataset's column: checked, and spelled with `role` and `content`."""

from __future__ import annotations

from typing import Any

from treetune.task import Message

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""How the `from`/`value` spelling names roles."""

_SPOKEN = ("content", "value", "tool_calls")
"""Where a message holds what it says."""


def says_nothing(messages: Any) -> bool:
    """Whether a conversation asks nothing: there is none, or nobody but the system says a word."""
    if messages is None or messages == []:
        return True
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    return not any(
        (message.get("role") or message.get("from")) != "system" and any(_words(message, key) for key in _SPOKEN)
        for message in messages
    )


def _words(message: Message, key: str) -> bool:
    value = message.get(key)
    return bool(value.strip() if isinstance(value, str) else value)


def chat_messages(value: Any, system_prompt: str | None) -> list[Message]:
    """The messages of one row, every key kept; raises ValueError with what is wrong."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, got {_shown(value)}")
    messages = [_message(entry, number) for number, entry in enumerate(value)]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"message {number} is {_shown(entry)}, not a mapping with role and content")
    message = {key: value for key, value in entry.items() if value is not None or key == "content"}
    if "role" not in message and "from" in message:
        role = _ROLES.get(str(message["from"]))
        if role is None:
            raise ValueError(f"message {number} is from {message['from']!r}; known: {', '.join(_ROLES)}")
        rest = {key: value for key, value in message.items() if key not in ("from", "value", "content")}
        message = {"role": role, "content": message.get("value"), **rest}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role: {_shown(entry)}")
    # Tool calls may stand alone; anything else must say something.
    if message.get("content") is None and not message.get("tool_calls"):
        raise ValueError(f"message {number} ({message['role']}) has no content")
    return message


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
