"""Draws from several streams in proportion: the sources of a mixture, or tasks by their pass rates.

    Interleave([3, 1], seed=0).at(1000)        # the stream of draw 1000, and the number of the draw within that stream

`Interleave` has fixed weights, and `Staged` shares that change from stage to stage. Both compute any draw as a pure
function of its index. `Credits` draws one arm at a time, for shares that may differ at every draw. `Spread` merges
streams with an end.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import msgspec

from treetune.core.order import stream_key
from treetune.errors import UsageError

LEAST_SHARE = 1e-6
"""An arm with a smaller share is not drawn."""
_CIRCLE = 1 << 32
_STEP = 2654435769
"""The golden section of the circle, odd so that 2**32 draws visit every point once."""


class Interleave:
    def __init__(self, weights: Sequence[float], seed: int | None = None) -> None:
        if not weights:
            raise UsageError("a mixture needs at least one source")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise UsageError(f"a weight must be a positive number, got {weight}")
        shares = [Fraction(weight) for weight in weights]
        total = sum(shares)
        self._ends = [round(_CIRCLE * end / total) for end in accumulate(shares)]
        if any(start == end for start, end in zip([0, *self._ends], self._ends, strict=False)):
            raise UsageError("a weight is too small compared with the others (less than one draw in four billion)")
        self._offset = 0 if seed is None else int.from_bytes(stream_key(seed, "interleave", 0)[:8], "little") % _CIRCLE
        # Draws mostly come in order. Keeping the counts before the next index avoids computing them.
        self._cursor = (0, [0] * len(self._ends))

    def at(self, index: int) -> tuple[int, int]:
        """The stream for draw `index`, and the number of the draw within that stream."""
        reached, before = self._cursor
        if index != reached:
            before = self.counts_before(index)
        point = (self._offset + index * _STEP) % _CIRCLE
        stream = next(number for number, end in enumerate(self._ends) if point < end)
        within = before[stream]
        after = list(before)
        after[stream] += 1
        self._cursor = (index + 1, after)
        return stream, within

    def counts_before(self, index: int) -> list[int]:
        """How often each stream was drawn before `index`: draws below its end point, minus those of earlier streams."""
        start, rounds = self._offset, _floor_sum(index, _CIRCLE, _STEP, self._offset)
        below = [index + rounds - _floor_sum(index, _CIRCLE, _STEP, start + _CIRCLE - end) for end in self._ends]
        return [high - low for low, high in zip([0, *below], below, strict=False)]


class Spread:
    """Merges streams in proportion: item j of a stream with n items is placed at j / n, and items are sorted by place.
    Every prefix has each stream in proportion, and the first items of all streams come first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._total = sum(sizes)

    def at(self, index: int) -> tuple[int, int]:
        """The stream of the item at `index`, and the number of the item within that stream."""
        for stream, size in enumerate(self._sizes):
            if not size:
                continue
            # An item lags its proportional place by at most as many places as there are streams.
            for within in range(min(index * size // self._total, size - 1), -1, -1):
                before = self._before(stream, within)
                if before == index:
                    return stream, within
                if before < index:
                    break
        raise IndexError(index)

    def _before(self, stream: int, within: int) -> int:
        """How many items come before this one. At the same place, earlier streams come first."""
        size = self._sizes[stream]
        before = 0
        for number, other in enumerate(self._sizes):
            whole, rest = divmod(within * other, size)
            before += whole + bool(rest or (number < stream and other))
        return before


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a * i + b) // m for i from 0 to n - 1, by Euclid's algorithm."""
    total = 0
    while n > 0:
        quotient, a = divmod(a, m)
        total += n * (n - 1) // 2 * quotient
        quotient, b = divmod(b, m)
        total += n * quotient
        top = a * n + b
        if top < m:
            break
        n, b = divmod(top, m)
        m, a = a, m
    return total


def normalise(weights: Sequence[float]) -> list[float]:
    """Shares that sum to 1; tiny ones become 0. If all weights are 0, the arms have equal shares."""
    total = math.fsum(weights)
    if not total:
        return [1 / len(weights)] * len(weights)
    return [weight / total if weight / total >= LEAST_SHARE else 0.0 for weight in weights]


class Staged:
    """Arms whose shares change from stage to stage. Any index can be computed without the ones before it."""

    def __init__(
        self, starts: Sequence[int], shares: Callable[[int], Sequence[float]], seed: int | None = None
    ) -> None:
        """`shares` returns the shares of all arms in a stage."""
        self._starts = starts
        self._seed = seed
        self._shares = shares
        self._stages: list[_Stage] = []
        self._lock = threading.Lock()
        """Several threads make tasks, and stages are computed when they are first reached."""

    def at(self, index: int) -> tuple[int, int]:
        """The arm for draw `index`, and the number of the draw within that arm."""
        stage = self._stage(bisect_right(self._starts, index) - 1)
        number, within = stage.interleave.at(index)
        return stage.arms[number], stage.offsets[number] + within

    def _stage(self, number: int) -> _Stage:
        if len(self._stages) <= number:
            with self._lock:
                while len(self._stages) <= number:
                    self._stages.append(self._next_stage())
        return self._stages[number]

    def _next_stage(self) -> _Stage:
        number = len(self._stages)
        shares = self._shares(number)
        arms = [arm for arm, share in enumerate(shares) if share]
        drawn = [0] * len(shares)
        start = self._starts[number]
        if number:
            before = self._stages[-1]
            drawn = list(before.drawn)
            counts = before.interleave.counts_before(start)
            for arm, offset, count in zip(before.arms, before.offsets, counts, strict=True):
                drawn[arm] = offset + count
        interleave = Interleave([shares[arm] for arm in arms], self._seed)
        # The new interleave continues the points of the previous stage, so only draws from `start` on count.
        counts = interleave.counts_before(start)
        offsets = [drawn[arm] - count for arm, count in zip(arms, counts, strict=True)]
        return _Stage(arms, interleave, offsets, drawn)


class _Stage(msgspec.Struct):
    arms: list[int]
    """The arms drawn in this stage."""
    interleave: Interleave
    offsets: list[int]
    """For each arm: what to add to its count in the interleave to get its count over all draws."""
    drawn: list[int]
    """How often each arm was drawn before this stage."""


class Credits:
    """Draws arms by shares that may differ at every draw: each arm earns its share, and the arm with the most credit
    pays 1. So every arm stays within a few draws of the sum of its shares."""

    def __init__(self, arms: int) -> None:
        self.values = [0.0] * arms

    def draw(self, shares: Sequence[float]) -> int:
        values = self.values
        best = -1
        for arm, share in enumerate(shares):
            if share:
                values[arm] += share
                if best < 0 or values[arm] > values[best]:
                    best = arm
        values[best] -= 1
        return best
