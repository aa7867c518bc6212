"""The order of tasks: a pure function from a global index to (epoch, position).

    locate(index=12, count=10, seed=0)   ->   (1, some position in 0..9)

Each epoch is a new permutation in which every position appears exactly once. Only a few round keys are stored, so
a resume needs one integer, and 100 million tasks take no more memory than ten.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import isqrt

from treetune.errors import UsageError

LAST = 2**62
"""The upper bound of indices, exclusive."""
SMALL = 64
"""Up to this count an epoch is one cached shuffle, because a Feistel network shows structure on few positions."""

_ROUNDS = 8
_MASK = (1 << 64) - 1
_MULTIPLIER = 0xD6E8FEB86659FD93


def locate(index: int, count: int, seed: int | None = None) -> tuple[int, int]:
    """The epoch and position of the task at this global index. Without a `seed`, the order is load order."""
    epoch, offset = divmod(index, count)
    if seed is None or count == 1:
        return epoch, offset
    if count <= SMALL:
        return epoch, _shuffle(count, seed, epoch)[offset]
    return epoch, _permute(offset, count, _round_keys(seed, epoch))


def read_index(index: object) -> int:
    """Convert an index to an int; raises `UsageError` if no task can have it."""
    try:
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < LAST:
        raise UsageError(f"an index is a number from 0 to 2**62, got {index!r:.60}")
    return number


def stream_key(seed: int, use: str, number: int) -> bytes:
    """64 bytes that depend on all three arguments. Seeds are hashed together, never added."""
    return hashlib.blake2b(f"{seed}\x00{use}\x00{number}".encode(), person=b"treetune-order").digest()


def derive_seed(seed: int, use: str) -> int:
    """Derive a separate seed for one use."""
    return int.from_bytes(stream_key(seed, use, 0)[:4], "little") >> 1


@lru_cache(maxsize=64)
def _shuffle(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    # 64! has 296 bits, so the 512 of one hash pick a permutation with a bias below 2**-200.
    randomness = int.from_bytes(stream_key(seed, "", epoch), "little")
    positions = list(range(count))
    for last in range(count - 1, 0, -1):
        randomness, chosen = divmod(randomness, last + 1)
        positions[last], positions[chosen] = positions[chosen], positions[last]
    return tuple(positions)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    key = stream_key(seed, "", epoch)
    return tuple(int.from_bytes(key[at : at + 8], "little") for at in range(0, 8 * _ROUNDS, 8))


def _permute(offset: int, count: int, keys: tuple[int, ...]) -> int:
    """A Feistel network over Z_rows x Z_columns; cells beyond `count` are permuted again."""
    rows = isqrt(count - 1) + 1
    columns = (count + rows - 1) // rows
    value = offset
    while True:
        row, column = divmod(value, columns)
        for number in range(0, _ROUNDS, 2):
            mixed = ((column ^ keys[number]) * _MULTIPLIER) & _MASK
            mixed = ((mixed ^ (mixed >> 32)) * _MULTIPLIER) & _MASK
            row = (row + (mixed ^ (mixed >> 32))) % rows
            mixed = ((row ^ keys[number + 1]) * _MULTIPLIER) & _MASK
            mixed = ((mixed ^ (mixed >> 32)) * _MULTIPLIER) & _MASK
            column = (column + (mixed ^ (mixed >> 32))) % columns
        value = row * columns + column
        if value < count:
            return value


def scramble(number: int, seed: int, epoch: int) -> int:
    """A 64-bit rank of a number. Sorting by rank shuffles the numbers for that epoch."""
    keys = _round_keys(seed, epoch)
    mixed = number & _MASK
    for key in keys[:2]:
        mixed = ((mixed ^ key) * _MULTIPLIER) & _MASK
        mixed = ((mixed ^ (mixed >> 32)) * _MULTIPLIER) & _MASK
        mixed ^= mixed >> 32
    return mixed


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
            raise UsageError("a weight is too small beside the others (less than one draw in four thousand million)")
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
