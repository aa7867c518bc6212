"""The rule reward: does the answer say what the ground truth says?

The answer is what follows the last `####`, else the last `\\boxed{...}`, else, for a number, the last number of the
text, else the whole text. Numbers are compared as numbers (1,000 equals 1000.0); of several ground truths any will do.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from treetune.score import Score

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def score(answer: str, ground_truth: Any) -> Score:
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    extracted = extract(answer, numeric=all(_number(truth) is not None for truth in truths))
    right = any(same(extracted, truth) for truth in truths)
    shown = " or ".join(str(truth) for truth in truths)
    return Score(float(right), answer=extracted, explanation="right" if right else f"expected {shown}")


def extract(answer: str, *, numeric: bool) -> str:
    if "####" in answer:
        return answer.rpartition("####")[2].strip()
    if (boxed := _last_boxed(answer)) is not None:
        return boxed.strip()
    if numeric and (numbers := _NUMBER.findall(answer)):
        return str(numbers[-1])
    return answer.strip()


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


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None
