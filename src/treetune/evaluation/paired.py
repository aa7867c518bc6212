"""Whether a mean of paired differences is more than chance, and what it would take to know.

    Paired([0.0, 1.0, 0.5, ...]).p_value      # one difference for each task

The test flips the sign of each difference: if nothing changed, either sign was as likely. It is exact for few
differences that are not 0, drawn at random (with a fixed seed) for some more, and normal for many. Where there are
too few tasks for that, the rollouts of each task change sides instead (`shuffled_p_value`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

FEWEST_TASKS = 6
"""With fewer, no pattern of signs is rarer than one in 20."""
SURE = 0.05
"""What counts as more than chance."""
_EXACT, _DRAWN, _DRAWS, _SHUFFLES = 16, 64, 40_000, 10_000
_DETECTED = 1.959964 + 0.841621
"""In standard errors: what is found four times out of five."""
_ALMOST = 1e-12
"""Sums of the same numbers in another order differ by less."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Paired:
    def __init__(self, differences: Sequence[float] | Floats) -> None:
        self.differences = np.asarray(differences, np.float64)

    def __len__(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def stderr(self) -> float | None:
        if len(self) < 2:
            return None
        return float(self.differences.std(ddof=1) / math.sqrt(len(self)))

    @cached_property
    def p_value(self) -> float:
        """How often chance alone gives a mean this far from 0."""
        changed = self.differences[self.differences != 0]
        if not len(changed):
            return 1.0
        seen = abs(changed.sum())
        if len(changed) <= _EXACT:
            return float((np.abs(_flip(changed)) >= seen - _ALMOST).mean())
        if len(changed) <= _DRAWN:
            drawn = np.zeros(_DRAWS)
            random = np.random.default_rng(0)
            for start in range(0, len(changed), 8):  # a random byte is eight signs, of which there are 256 sums
                eight = changed[start : start + 8]
                drawn += _flip(eight)[random.integers(0, 2 ** len(eight), _DRAWS)]
            # What was seen is one of the draws, so no p-value is 0.
            return float(((np.abs(drawn) >= seen - _ALMOST).sum() + 1) / (_DRAWS + 1))
        return math.erfc(seen / math.sqrt(2 * float(changed @ changed)))

    @property
    def detectable(self) -> float | None:
        """The least difference that so many tasks would show four times out of five."""
        return None if self.stderr is None else _DETECTED * self.stderr

    def tasks_to_settle(self) -> int | None:
        """How many tasks would show a difference of this size four times out of five; None where there is none."""
        if self.stderr is None or not self.mean:
            return None
        spread = float(self.differences.std(ddof=1))
        return max(2, math.ceil((_DETECTED * spread / self.mean) ** 2))


def _flip(differences: Floats) -> Floats:
    """Their sums with every pattern of signs."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def shuffled_p_value(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """The same where tasks are few: if nothing changed, each rollout of a task might have come from either run."""
    random = np.random.default_rng(0)
    seen, drawn = 0.0, np.zeros(_SHUFFLES)
    for old, new in zip(before, after, strict=True):
        pooled = np.array([*old, *new], np.float64)
        seen += pooled[len(old) :].mean() - pooled[: len(old)].mean()
        mixed = random.permuted(np.broadcast_to(pooled, (_SHUFFLES, len(pooled))), axis=1)
        drawn += mixed[:, len(old) :].mean(axis=1) - mixed[:, : len(old)].mean(axis=1)
    return float(((np.abs(drawn) >= abs(seen) - _ALMOST).sum() + 1) / (_SHUFFLES + 1))
