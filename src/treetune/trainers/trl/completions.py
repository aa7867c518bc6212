"""Completions as TRL gives them to reward functions: text, or the messages of a conversation."""

from __future__ import annotations

from typing import Any

from treetune.task import text_of


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


def count_answers(completion: Any) -> int:
    return 1 if isinstance(completion, str) else sum(message.get("role") == "assistant" for message in completion)
