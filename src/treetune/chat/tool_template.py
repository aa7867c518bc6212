"""A ToolTemplate describes how a chat template handles tools: which tools, calls and results it can render.

What it cannot render becomes plain text, so that every model can use tools. Bridges to trainers that pass on only text
use the same functions:

    with_tools(messages, tools)         # lists the tools in the system message, like Qwen's chat templates
    write_as_text(messages)             # calls as the model writes them, results as user messages
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from treetune.chat.call_formats import FORMATS, Schema, check_name, detect_format
from treetune.chat.calls import call_id, function_of, read_arguments, with_arguments, write_call
from treetune.chat.message import Message, text_of
from treetune.errors import UsageError

Render = Callable[..., str | None]
"""Renders a conversation with further template arguments; None if the template refuses it."""


class ToolTemplate(NamedTuple):
    tools: Sequence[Schema]
    format: str
    """The format in which the model writes calls: a name in `FORMATS`."""
    shows_tools: bool
    """Whether the template lists the tools."""
    role: str
    """The role of the message that lists them if the template does not; some templates accept no system message."""
    most_calls: int
    """How many calls per message the template can render: none, one, or (2) any number."""
    empty: str | None
    """The content of a message that has only calls."""
    beside: bool
    """Whether the template renders calls in a message that also has text."""
    arguments: type
    """The type of call arguments: `dict`, or `str` of JSON."""

    @classmethod
    def of(cls, tokenizer: Any, tools: Sequence[Schema], render: Render, format: str | None = None) -> Self:
        mark = f"question{secrets.token_hex(8)}"
        asked = [{"role": "user", "content": mark}]
        plain, shown = render(asked), render(asked, tools=list(tools))
        shows_tools = shown is not None and shown != plain
        role = "user" if render([{"role": "system", "content": mark}, *asked]) is None else "system"
        kind, most_calls, empty = _find_calls(render, asked, mark)
        beside = kind is not None and _writes(render, asked, mark, 1, "And:", kind)
        found = check_name(format) or detect_format(template_of(tokenizer, tools), tokenizer.all_special_tokens)
        if found is None and (shows_tools or most_calls):
            raise UsageError(
                "the chat template has its own format for tools, and Treetune cannot parse its calls",
                remedy=f"set call_format to the closest format: {', '.join(FORMATS)}",
            )
        return cls(tools, found or "hermes", shows_tools, role, most_calls, empty, beside, kind or dict)

    def take(self, messages: Sequence[Message], is_part: bool = False) -> Sequence[Message]:
        """A conversation as the template can render it; for a part of one (`is_part`), without the list of tools."""
        if self.most_calls == 0:
            messages = write_as_text(messages, self.format)
        else:
            messages = [self._take_calls(message) for message in messages]
        if is_part or self.shows_tools:
            return messages
        return with_tools(messages, self.tools, self.format, self.role)

    def _take_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return message
        if len(calls) > self.most_calls == 1 or (message.get("content") and not self.beside):
            return write_calls(message, self.format)
        return message if message.get("content") else {**message, "content": self.empty}


def template_of(tokenizer: Any, tools: Sequence[Schema]) -> str:
    """The chat template that is used with tools; empty if the tokenizer has no text template."""
    try:
        return str(tokenizer.get_chat_template(tools=list(tools)))
    except (AttributeError, NotImplementedError, ValueError):
        return ""


def _find_calls(render: Render, asked: list[Message], mark: str) -> tuple[type | None, int, str | None]:
    """The type of arguments, the number of calls and the content next to them that a template accepts."""
    for number in (2, 1):
        for content in (None, ""):
            for kind in (dict, str):
                if _writes(render, asked, mark, number, content, kind):
                    return kind, number, content
    return None, 0, None


def _writes(render: Render, asked: list[Message], mark: str, number: int, content: str | None, kind: type) -> bool:
    """Whether a template renders calls and their results."""
    names = [f"{mark}call{at}" for at in range(number)]
    calls = [write_call(call_id(0, at), name, {mark: at}) for at, name in enumerate(names)]
    results = [
        {"role": "tool", "tool_call_id": call_id(0, at), "name": name, "content": f"{name}result"}
        for at, name in enumerate(names)
    ]
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    text = render([*asked, with_arguments(said, kind), *results]) or ""
    shown = [text.find(name) < text.rfind(f"{name}result") for name in names if name in text]
    return len(shown) == number and all(shown) and "None" not in text


# Tools as text


def write_instructions(tools: Sequence[Schema], format: str = "hermes") -> str:
    """The text that lists the tools and explains how to call them, as in Qwen's chat templates."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = FORMATS[format].write([("<function-name>", "{}")]).replace("{}", "<args-json-object>")
    if format == "hermes":
        call = call.replace('"<function-name>"', "<function-name>")
        how = "return a json object with function name and arguments within <tool_call></tool_call> XML tags"
    else:
        how = "write"
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\nFor each function call, {how}:\n{call}"
    )


def with_tools(
    messages: Sequence[Message], tools: Sequence[Schema], format: str = "hermes", role: str = "system"
) -> list[Message]:
    """The conversation with its tools listed at the beginning, in a message with this role."""
    listed = write_instructions(tools, format)
    first, *others = list(messages) or [{"role": role, "content": ""}]
    text = text_of(first.get("content")) if first.get("role") == role else None
    if text is None:
        return [{"role": role, "content": listed}, first, *others]
    return [{**first, "content": f"{text}\n\n{listed}" if role == "system" else f"{listed}\n\n{text}"}, *others]


def write_as_text(messages: Sequence[Message], format: str = "hermes") -> list[Message]:
    """The conversation with calls and results as text: calls as the model writes them, results as user messages.
    Results in a row are joined into one message, together with a following user message."""
    written: list[Message] = []
    answers = False
    for message in messages:
        joins, is_result = answers, message.get("role") == "tool"
        if is_result:
            message = _write_result(message)
        if joins and message.get("role") == "user" and isinstance(message.get("content"), str):
            message = {**message, "content": f"{written.pop()['content']}\n{message['content']}"}
        written.append(write_calls(message, format))
        answers = is_result and isinstance(message["content"], str)
    return written


def _write_result(message: Message) -> Message:
    content = message.get("content")
    text = "" if content is None else text_of(content)
    shown = content if text is None else f"<tool_response>\n{text}\n</tool_response>"  # images remain parts
    return {"role": "user", "content": shown}


def write_calls(message: Message, format: str) -> Message:
    calls = [function_of(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    if not calls:
        return message
    found = [(str(call.get("name")), _as_object(call.get("arguments"))) for call in calls]
    parts = [text_of(message.get("content")), FORMATS[format].write(found)]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, parts))}


def _as_object(given: Any) -> str:
    """Arguments as JSON text for a call; anything but an object is wrapped in one."""
    arguments, error = read_arguments(given)
    return json.dumps(arguments if error is None else {"": arguments}, ensure_ascii=False)
