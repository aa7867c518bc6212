"""How sure a share is: bounds of what was counted, and rank correlation. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 2.576
"""99 of 100 bounds hold."""


def least_share(hits: int, tries: int, z: float = Z) -> float:
    """The lower end of Wilson's interval: the share is hardly below it."""
    if not tries or not hits:
        return 0.0
    share = hits / tries
    middle = share + z * z / (2 * tries)
    width = z * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return max(0.0, (middle - width) / (1 + z * z / tries))


def excess_of(share: float, expected: float) -> float:
    """How much of what chance does not pay was paid: 0 where it is as expected, 1 where everything was."""
    return 0.0 if expected >= 1 else max(0.0, (share - expected) / (1 - expected))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, ties counted in the middle; None where one of the two does not vary."""
    one, two = _ranks(first), _ranks(second)
    mean = (len(one) + 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(one, two, strict=True))
    scale = math.sqrt(sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in two))
    return covariance / scale if scale else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for place in order[begin:end]:
            ranks[place] = (begin + 1 + end) / 2
        begin = end
    return ranks
