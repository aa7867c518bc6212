"""Tools in plain text: for models whose chat template has no place for them, and trainers that pass on only text.

with_tools(messages, tools)        # the system describes them, as Qwen's chat templates do
as_text(messages)                  # calls as a model writes them, results as messages of the user's
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from treetune.chat.call_formats import FORMATS, Schema, function_of
from treetune.chat.message import Message, text_of


def describe(tools: Sequence[Schema], format: str = "hermes") -> str:
    """What a model is told of its tools, where its chat template does not tell it: as Qwen's templates put it."""
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
    messages: Sequence[Message], tools: Sequence[Schema], format: str = "hermes", teller: str = "system"
) -> list[Message]:
    """The conversation with its tools described at the beginning, by the system or the user."""
    told = describe(tools, format)
    first, *others = list(messages) or [{"role": teller, "content": ""}]
    text = text_of(first.get("content")) if first.get("role") == teller else None
    if text is None:
        return [{"role": teller, "content": told}, first, *others]
    return [{**first, "content": f"{text}\n\n{told}" if teller == "system" else f"{told}\n\n{text}"}, *others]


def as_text(messages: Sequence[Message], format: str = "hermes") -> list[Message]:
    """The conversation without calls and results: calls as a model writes them, results as messages of the user's, one
    for all that stand together with what the user says then."""
    written: list[Message] = []
    answers = False
    for message in messages:
        joins, is_result = answers, message.get("role") == "tool"
        if is_result:
            message = _result_as_text(message)
        if joins and message.get("role") == "user" and isinstance(message.get("content"), str):
            message = {**message, "content": f"{written.pop()['content']}\n{message['content']}"}
        written.append(call_as_text(message, format))
        answers = is_result and isinstance(message["content"], str)
    return written


def _result_as_text(message: Message) -> Message:
    content = message.get("content")
    text = "" if content is None else text_of(content)
    shown = content if text is None else f"<tool_response>\n{text}\n</tool_response>"  # images stay parts
    return {"role": "user", "content": shown}


def call_as_text(message: Message, format: str) -> Message:
    calls = [function_of(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    if not calls:
        return message
    found = [(str(call.get("name")), _as_object(call.get("arguments"))) for call in calls]
    parts = [text_of(message.get("content")), FORMATS[format].write(found)]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, parts))}


def _as_object(arguments: Any) -> str:
    """Arguments as they are written into a call: anything else than an object is shown as a text of it."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = {"": arguments}
    return json.dumps(value if isinstance(value, dict) else {"": value}, ensure_ascii=False)
