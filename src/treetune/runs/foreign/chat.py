"""Chats as other programs keep them, as the turns of a trace.

turns, final = turns_of(prompt, messages)       # the prompt is what the first turn observed
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from treetune.chat.calls import ToolCall, read_call
from treetune.chat.message import Message
from treetune.core.trace import Turn


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
    """The calls of tools that a message makes, without their results and errors."""
    return [msgspec.structs.replace(read_call(call), error=None) for call in message.get("tool_calls") or []]


def _note_result(calls: list[ToolCall], message: Message) -> None:
    """By the id of the call; where there is none, the next that has no result yet."""
    wanted = message.get("tool_call_id")
    open_calls = [call for call in calls if (call.id == wanted if wanted else call.result == "")]
    if open_calls:
        open_calls[0].result = message.get("content") or ""


def split_chat(prompt: str, answer: str) -> tuple[list[Message], list[Message]] | None:
    """The messages of a prompt and of what came after it, where both are ChatML with its special tokens; None where
    they are anything else."""
    given, whole = _messages_in(prompt), _messages_in(prompt + answer)
    if given is None or whole is None:
        return None
    count = len(given) if prompt.rstrip().endswith(_ENDS) else len(given) - 1  # the last one is the answer's beginning
    return whole[:count], whole[count:]


_BEGINS, _ENDS = "<|im_start|>", "<|im_end|>"
_MESSAGE = re.compile(
    r"\s*<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|(?=<\|im_start\|>)|\Z)(?:<\|endoftext\|>)*", re.DOTALL
)


def _messages_in(text: str) -> list[Message] | None:
    if not text.lstrip().startswith(_BEGINS):
        return None
    messages, at = [], 0
    while at < len(text.rstrip()):
        found = _MESSAGE.match(text, at)
        if found is None:
            return None
        messages.append({"role": found[1], "content": found[2]})
        at = found.end()
    return messages
