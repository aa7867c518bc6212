"""Chats as other programs keep them, as the turns of a trace.

turns, final = turns_of(prompt, messages)       # the prompt is what the first turn observed
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from treetune.task import Message
from treetune.tools import ToolCall
from treetune.trace import Turn


def turns_of(prompt: Sequence[Message], messages: Sequence[Message]) -> tuple[list[Turn], list[Message]]:
    """A turn for each answer of the model, with what was new to it before; and what came after its last answer. In the
    prompt there may be answers too, which are nobody's turn."""
    turns: list[Turn] = []
    observed = list(prompt)
    for message in messages:
        if message.get("role") == "assistant":
            turns.append(Turn(observed=observed, message=message, calls=calls_of(message)))
            observed = []
            continue
        if message.get("role") == "tool" and turns:
            _note_result(turns[-1].calls, message)
        observed.append(message)
    if not turns:
        return [Turn(observed=observed)], []
    return turns, observed


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of tools that a message makes, without their results."""
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        found.append(ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), _arguments_of(function)))
    return found


def _arguments_of(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _note_result(calls: list[ToolCall], message: Message) -> None:
    """By the id of the call; where there is none, the next that has no result yet."""
    wanted = message.get("tool_call_id")
    open_calls = [call for call in calls if (call.id == wanted if wanted else call.result == "")]
    if open_calls:
        open_calls[0].result = message.get("content") or ""


def call_of(name: str, arguments: Any, id: str) -> dict[str, Any]:
    """A call as OpenAI's API has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
