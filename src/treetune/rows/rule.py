"""The rule reward: does the answer say what the ground truth says?

The answer is the line after the last `####`, else the last `\\boxed{...}`, else, for a number, the last number of the
text, else the whole text. Numbers are compared as numbers (1,000 equals 1000.0); of several ground truths any will do.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from treetune.score import UNCHECKED, VALID, Score, Verdict
from treetune.taskset import ConfigT, Taskset, TaskT

RULE = "rule"
"""How a row says that it is scored so: its `scorer`."""

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def score(answer: str, ground_truth: Any) -> Score:
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    extracted = extract(answer, numeric=all(_number(truth) is not None for truth in truths))
    right = any(same(extracted, truth) for truth in truths)
    shown = " or ".join(str(truth) for truth in truths)
    return Score(float(right), answer=extracted, explanation="right" if right else f"expected {shown}")


def extract(answer: str, *, numeric: bool) -> str:
    text = answer.strip()
    marked = "####" in text
    if marked:
        text = next(iter(text.rpartition("####")[2].strip().splitlines()), "").strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    if not numeric or _number(text) is not None:
        return text
    numbers = _NUMBER.findall(text)
    # After a mark the number comes first ("#### 72 apples"); in running text the last one is the result.
    return str(numbers[0 if marked else -1]) if numbers else text


def same(one: str, other: Any) -> bool:
    first, second = _number(one), _number(other)
    if first is not None and second is not None:
        return first == second
    return one.strip() == str(other).strip()


def _number(value: Any) -> Decimal | None:
    text = str(value).strip().replace(",", "").replace("$", "").rstrip(".").removesuffix("%")
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, braces inside it counted."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None


class RuleTaskset(Taskset[TaskT, ConfigT]):
    """A taskset whose answers are scored by the rule."""

    def reward(self, task: TaskT, answer: str) -> Any:
        if task.ground_truth is None:
            return super().reward(task, answer)
        return score(answer, task.ground_truth)

    def gold(self, task: TaskT) -> Any:
        if task.env_class is not None:
            return super().gold(task)
        truth = task.ground_truth
        any_truth = truth[0] if isinstance(truth, list) and truth else truth
        return None if any_truth is None else str(any_truth)

    def validate(self, task: TaskT) -> Verdict:
        return VALID if task.ground_truth is not None and task.messages else UNCHECKED
