"""The order of tasks: a pure function from a global index to (epoch, position).

    locate(index=12, count=10, seed=0)   ->   (1, some position in 0..9)

Each epoch is a new permutation in which every position appears exactly once. Only a few round keys are stored, so
a resume needs one integer, and 100 million tasks take no more memory than ten.
"""

from __future__ import annotations

import hashlib
import operator
from functools import lru_cache
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
