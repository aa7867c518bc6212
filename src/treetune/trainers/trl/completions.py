"""Completions as TRL gives them to reward functions: text, or the messages of a conversation."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from treetune.chat.calls import function_of
from treetune.chat.message import text_of


def text_of_completion(completion: Any) -> str:
    return completion if isinstance(completion, str) else text_of(completion[-1].get("content")) or ""


def last_answer(completion: Any) -> str | None:
    """The answer that calls no tool and so ends a conversation; None where it was cut off before there was one."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    return text_of(last.get("content")) or ""


def count_answers(completion: Any, ended_by: tuple[Container[str], int] | None = None) -> int:
    """How many answers a conversation has. Where a call ended the episode, `ended_by` has the names of its tools and
    how many calls of them it took: what was said after that is no turn of it."""
    if isinstance(completion, str):
        return 1
    turns = made = 0
    for message in completion:
        if message.get("role") == "assistant":
            turns += 1
            if ended_by is not None:
                called = [function_of(call).get("name") for call in message.get("tool_calls") or ()]
                made += sum(name in ended_by[0] for name in called)
                if made >= ended_by[1]:
                    break
    return turns
