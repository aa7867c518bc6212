"""A ToolTemplate is how one chat template takes tools: which of tools, calls and results it has words for.

What it has no words for is told in plain text instead, so that every model can be given tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from treetune.chat.call_formats import FORMATS, Schema, call_id, check_name, detect
from treetune.chat.message import Message
from treetune.chat.normalize import with_arguments
from treetune.chat.text_tools import as_text, call_as_text, with_tools
from treetune.errors import UsageError

Render = Callable[..., str | None]
"""The text of a conversation with further arguments of the template; None where the template refuses it."""


class ToolTemplate(NamedTuple):
    tools: Sequence[Schema]
    format: str
    """How the model writes calls: a name in `FORMATS`."""
    told: bool
    """The template tells of the tools by itself."""
    teller: str
    """The role that tells of them otherwise: some templates know no system."""
    most_calls: int
    """How many calls of one message it writes: none, one, or (2) any number."""
    empty: str | None
    """The content of a message that is nothing but calls."""
    beside: bool
    """It writes calls of a message that has a text too."""
    arguments: type
    """Of calls: `dict`, or `str` of JSON."""

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Schema], render: Render, format: str | None = None) -> Self:
        mark = f"question{secrets.token_hex(8)}"
        asked = [{"role": "user", "content": mark}]
        plain, shown = render(asked), render(asked, tools=list(tools))
        told = shown is not None and shown != plain
        teller = "user" if render([{"role": "system", "content": mark}, *asked]) is None else "system"
        kind, most_calls, empty = _find_calls(render, asked, mark)
        beside = kind is not None and _writes(render, asked, mark, 1, "And:", kind)
        found = check_name(format) or detect(template_of(tokenizer, tools), tokenizer.all_special_tokens)
        if found is None and (told or most_calls):
            raise UsageError(
                "the chat template has words of its own for tools, and Treetune does not know how to read its calls",
                remedy=f"name what comes nearest as call_format: {', '.join(FORMATS)}",
            )
        return cls(tools, found or "hermes", told, teller, most_calls, empty, beside, kind or dict)

    def take(self, messages: Sequence[Message], told: bool = False) -> Sequence[Message]:
        """A conversation as the template can show it. Without `told` it is a whole one."""
        if self.most_calls == 0:
            messages = as_text(messages, self.format)
        else:
            messages = [self._take_calls(message) for message in messages]
        return messages if told or self.told else with_tools(messages, self.tools, self.format, self.teller)

    def _take_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return message
        if len(calls) > self.most_calls == 1 or (message.get("content") and not self.beside):
            return call_as_text(message, self.format)
        return message if message.get("content") else {**message, "content": self.empty}


def template_of(tokenizer: Any, tools: Sequence[Schema]) -> str:
    """The chat template that is used where there are tools; nothing where there is none of text."""
    try:
        return str(tokenizer.get_chat_template(tools=list(tools)))
    except (AttributeError, NotImplementedError, ValueError):
        return ""


def _find_calls(render: Render, asked: list[Message], mark: str) -> tuple[type | None, int, str | None]:
    """The arguments, the number of calls and the content beside them that a template takes."""
    for number in (2, 1):
        for content in (None, ""):
            for kind in (dict, str):
                if _writes(render, asked, mark, number, content, kind):
                    return kind, number, content
    return None, 0, None


def _writes(render: Render, asked: list[Message], mark: str, number: int, content: str | None, kind: type) -> bool:
    """Whether a template writes calls and their results."""
    names = [f"{mark}call{at}" for at in range(number)]
    calls = [
        {"id": call_id(0, at), "type": "function", "function": {"name": name, "arguments": {mark: at}}}
        for at, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id(0, at), "name": name, "content": f"{name}result"}
        for at, name in enumerate(names)
    ]
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    text = render([*asked, with_arguments(said, kind), *results]) or ""
    shown = [text.find(name) < text.rfind(f"{name}result") for name in names if name in text]
    return len(shown) == number and all(shown) and "None" not in text
