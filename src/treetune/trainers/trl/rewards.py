"""Completions as TRL gives them to reward functions, and the reward function of rows that Treetune built.

    GRPOTrainer("MODEL", train_dataset=load_dataset("parquet", data_files="PATH"), reward_funcs=score_rows)

A completion is text, or the messages of a conversation. Such rows come from `treetune build --format trl`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from treetune.chat.calls import function_of
from treetune.chat.message import text_of
from treetune.data.rows.formats import FORMATS
from treetune.trainers.single_turn import play_rows, scorer_in


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


_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What reward functions are given beside the dataset's columns."""


def score_rows(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """The reward of each completion; a reward function of a `GRPOTrainer`."""
    named = {name: values for name, values in columns.items() if name not in _OF_TRL}
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: values[number] for name, values in named.items()}
        row["prompt"] = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        scorer = scorer_in(row.get("extra_info"), row.get("data_source"))
        rows.append((scorer, FORMATS["trl"].task_of(row, whole=False), text_of_completion(completion)))
    return [result.reward for result in play_rows(rows)]
