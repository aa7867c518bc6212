"""Chat messages and their text.

text_of({"role": "user", "content": "Hi"}["content"])     # "Hi"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
"""A chat message: `role`, `content`, and any other field of the chat format (`name`, `tool_calls`)."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


def text_of(content: Any) -> str | None:
    """The content of a message as text. Text parts are joined by newlines. None if there is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text") or "") for part in content)
    return None


def add_paragraph(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with this paragraph added to the last user message, unless one of them already has it."""
    if any(text in str(message.get("content")) for message in messages):
        return list(messages)
    last = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if last is None:
        return [*messages, {"role": "user", "content": text}]
    content = messages[last].get("content")
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content or ''}\n\n{text}"
    return [*messages[:last], {**messages[last], "content": longer}, *messages[last + 1 :]]


def flatten_content(message: Message) -> Message:
    """The message with its parts joined into one text, if they are all text."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    text = text_of(content)
    return message if text is None else {**message, "content": text}


def reasoning_of(message: Message) -> str:
    """The reasoning that a model server sends in addition to the content."""
    return next((value for key in _REASONING if isinstance(value := message.get(key), str)), "")


def without_surrogates(value: Any) -> Any:
    """Make texts, also in lists and dicts, encodable: the two halves of a surrogate pair become one character; a single
    half, which a model can sample but UTF-8 cannot encode, is written out: `\\ud800`."""
    if isinstance(value, str):
        return value if value.isascii() else _join_surrogates(value)
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return [without_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def _join_surrogates(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "backslashreplace").decode()


def begins_answer(messages: Sequence[Message]) -> bool:
    """Whether a prompt ends with the beginning of the answer, that is, with an assistant message."""
    return bool(messages) and messages[-1].get("role") == "assistant"
