"""What a scorer says of an answer, and what a taskset says of a task.

def reward(self, task, answer):
    number = last_number(answer)
    return Score(float(number == task.ground_truth), answer=number, explanation="last number in the text")
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from treetune.errors import EnvironmentFault, TasksetError


class Score(msgspec.Struct, frozen=True):
    """A reward with its reasons. A plain number is enough where there is nothing more to say."""

    reward: float
    answer: str | None = None
    """What was extracted from the text and compared."""
    explanation: str | None = None
    """Why it got this reward, for a person who looks at the trace."""
    metrics: dict[str, float] = {}
    """Named figures, averaged over a run."""

    @classmethod
    def of(cls, value: Any) -> Score:
        score = value if isinstance(value, Score) else cls(finite(value, "reward"))
        finite(score.reward, "reward")
        return score


def finite(value: Any, what: str) -> float:
    """`value` as a float; a NaN or a wrong type is a fault of the scorer, never a silent 0."""
    try:
        if isinstance(value, str | bytes):  # which float() would read
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFault(f"{what} must be a number, got {type(value).__name__}: {value!r}") from None
    if not math.isfinite(number):
        raise EnvironmentFault(f"{what} must be finite, got {number}")
    return number


class Validity(StrEnum):
    VALID = "valid"
    """At least one check ran, and all passed."""
    INVALID = "invalid"
    """A check failed."""
    UNCHECKED = "unchecked"
    """Nothing checked it: it may be fine, nobody knows."""


class Verdict(msgspec.Struct, frozen=True):
    """What `Taskset.validate` answers: use `VALID`, `UNCHECKED` or `invalid("why")`."""

    validity: Validity
    reason: str | None = None

    @classmethod
    def of(cls, value: Any) -> Verdict:
        """Also understands True (valid), False (invalid) and None (unchecked)."""
        if isinstance(value, Verdict):
            return value
        if value is None:
            return UNCHECKED
        if isinstance(value, bool):
            return VALID if value else invalid("validate() returned False")
        remedy = "return VALID, UNCHECKED, invalid('why'), True, False or None"
        raise TasksetError(f"validate() returned {value!r}", remedy=remedy)


VALID = Verdict(Validity.VALID)
UNCHECKED = Verdict(Validity.UNCHECKED)


def invalid(reason: str) -> Verdict:
    return Verdict(Validity.INVALID, reason)
