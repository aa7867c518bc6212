"""The result of scoring an answer (`Score`), and of validating a task (`Verdict`).

def reward(self, task, answer):
    number = last_number(answer)
    return Score(float(number == task.ground_truth), answer=number, explanation="last number in the text")
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from treetune.errors import EnvironmentFault, InvalidAction, TasksetError, place_of

if TYPE_CHECKING:
    from treetune.core.task import Task


class Score(msgspec.Struct, frozen=True):
    """A reward with an explanation. Return a plain number if there is nothing to explain."""

    reward: float
    answer: str | None = None
    """The text extracted from the answer and compared."""
    explanation: str | None = None
    """Why it got this reward, shown to people who read the trace."""
    metrics: dict[str, float] = {}
    """Named numbers, averaged over a run."""

    @classmethod
    def of(cls, value: Any) -> Score:
        score = value if isinstance(value, Score) else cls(finite(value, "reward"))
        finite(score.reward, "reward")
        return score


class NotANumberError(EnvironmentFault, ValueError):
    """A reward that is not a finite number. The answer may be the cause: `float("nan")`."""

    got = ""
    """The value that was returned instead: `str '0.0'`, `None`, `nan`."""

    @classmethod
    def of(cls, what: str, expected: str, got: str) -> NotANumberError:
        error = cls(f"{what} must be {expected}, got {got}")
        error.got = got
        return error


class NoScoreError(NotANumberError):
    """`reward` did not return a score."""


def finite(value: Any, what: str) -> float:
    """Return `value` as a float. NaN or a wrong type is a fault of the scorer, never a silent 0."""
    try:
        if isinstance(value, str | bytes):  # float() would parse these
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        got = "None" if value is None else f"{type(value).__name__} {value!r:.200}"
        raise NotANumberError.of(what, "a number", got) from None
    except OverflowError:
        raise NotANumberError.of(what, "finite", "more than a float holds") from None
    if not math.isfinite(number):
        raise NotANumberError.of(what, "finite", str(number))
    return number


def total(rewards: Iterable[float]) -> float:
    """The reward of an episode from its steps: summed exactly and rounded once, so that ten times 0.1 is 1."""
    return math.fsum(rewards)


_BY_DATA = (
    *(ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError, SyntaxError),
    *(RecursionError, MemoryError, re.error),
)
"""Exceptions that code raises on unexpected input. File and network errors are not among them."""


class Rewarding(Protocol):
    """The interface for scoring answers to tasks; implemented by every `Taskset`."""

    name: str

    def reward(self, task: Any, answer: str) -> Any: ...

    async def gold_of(self, task: Any) -> Any: ...


async def judge(taskset: Rewarding, task: Task, answer: str) -> Score:
    """The `reward` of an answer. If `reward` raises, other answers are scored too, to tell a bad answer from a broken
    scorer: if one of them is scored, this answer is invalid and earns 0."""
    try:
        return await score_answer(taskset, task, answer)
    except _BY_DATA as error:
        if isinstance(error, OSError):
            raise
        raised = error
    with suppress(*_BY_DATA):  # if scoring succeeds now, the answer was not the cause
        return await score_answer(taskset, task, answer)
    if not await _takes_another(taskset, task, answer):
        raise raised
    if isinstance(raised, NoScoreError):
        what = problem = raised.message
    else:
        where = f" at {place}" if (place := place_of(raised)) else ""
        what = f"{taskset.name}.reward() raised {type(raised).__name__}{where}"
        problem = f"{what}: {str(raised)[:200]}"
    raise InvalidAction(problem, warning=f"{what} for an answer, which counts as 0") from raised


async def score_answer(taskset: Rewarding, task: Task, answer: str) -> Score:
    """Call `reward` on an answer. Its exceptions propagate; raises `NoScoreError` if it returned something else."""
    from treetune.system.threads import call  # here, because reading rows does not need asyncio

    value = await call(taskset.reward, task, answer)
    try:
        return Score.of(value)
    except NotANumberError as error:
        remedy = "return a finite number, or a Score with one"
        raise NoScoreError(f"{taskset.name}.reward() returned {error.got}", remedy=remedy) from None


async def _takes_another(taskset: Rewarding, task: Task, answer: str) -> bool:
    """Whether the gold answer, or else a plain one, can be scored."""
    gold: Any = None
    with suppress(Exception):
        gold = await taskset.gold_of(task)
    known = [gold] if isinstance(gold, str) else (gold or [])[:1]
    for other in [*known, "", "0"]:
        with suppress(Exception):
            if isinstance(other, str) and other != answer:
                await score_answer(taskset, task, other)
                return True
    return False


class Validity(StrEnum):
    VALID = "valid"
    """At least one check ran, and all passed."""
    INVALID = "invalid"
    """A check failed."""
    UNCHECKED = "unchecked"
    """Nothing was checked."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of `Taskset.validate`: use `VALID`, `UNCHECKED` or `invalid("why")`."""

    validity: Validity
    reason: str | None = None

    @classmethod
    def of(cls, value: Any) -> Verdict:
        """Also accepts True (valid), False (invalid) and None (unchecked)."""
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
