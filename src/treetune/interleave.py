"""How several streams are mixed: a pure function from an index to (stream, index in that stream).

    Interleave([3, 1]).at(7)   ->   (0, 5): endless ones by weight; the eighth draw is the sixth of stream 0
    Spread([3, 2]).at(3)       ->   (1, 1): finite ones by their sizes, each item once

Draw i falls on the point i * step mod 2**32, and each stream owns a stretch of that circle as long as its
weight. Such a sequence is spread as evenly as one can be, so every batch has close to the right shares; and how often a
stream came up before i is a sum of floors with a closed form, so any index can be reached without replaying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from treetune.errors import UsageError
from treetune.order import stream_key

_CIRCLE = 1 << 32
_STEP = 2654435769
"""The golden ratio's share of the circle, odd so that 2**32 draws visit every point once."""


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
            raise UsageError("a weight is too small beside the others (less than one draw in four thousand million)")
        self._offset = 0 if seed is None else int.from_bytes(stream_key(seed, "interleave", 0)[:8], "little") % _CIRCLE
        # Draws mostly come in order: knowing the counts before the next index saves the closed form.
        self._cursor = (0, [0] * len(self._ends))

    def at(self, index: int) -> tuple[int, int]:
        """The stream that draw `index` takes from, and which of that stream's own draws it is."""
        reached, before = self._cursor
        if index != reached:
            before = self._counts_before(index)
        point = (self._offset + index * _STEP) % _CIRCLE
        stream = next(number for number, end in enumerate(self._ends) if point < end)
        within = before[stream]
        after = list(before)
        after[stream] += 1
        self._cursor = (index + 1, after)
        return stream, within

    def _counts_before(self, index: int) -> list[int]:
        below = [self._below(index, end) for end in self._ends]
        return [high - low for low, high in zip([0, *below], below, strict=False)]

    def _below(self, index: int, end: int) -> int:
        """How many of the draws before `index` fall on a point below `end`."""
        return (
            index
            + _floor_sum(index, _CIRCLE, _STEP, self._offset)
            - _floor_sum(index, _CIRCLE, _STEP, self._offset + _CIRCLE - end)
        )


class Spread:
    """Item j of a stream of n stands at j / n, and all items come in the order of where they stand. So every stretch
    from the beginning has each stream in proportion, and the first items of all streams come first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._total = sum(sizes)

    def at(self, index: int) -> tuple[int, int]:
        """The stream of the item at `index`, and which of that stream's items it is."""
        for stream, size in enumerate(self._sizes):
            if not size:
                continue
            # The item is at most as many places behind its share as there are streams.
            last = index * size // self._total
            first = max(0, (index - 2 * len(self._sizes)) * size // self._total)
            for within in range(min(last, size - 1), first - 1, -1):
                before = self._before(stream, within)
                if before == index:
                    return stream, within
                if before < index:
                    break
        raise IndexError(index)

    def _before(self, stream: int, within: int) -> int:
        """How many items stand before this one; of those at the same place, the ones of earlier streams do."""
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
