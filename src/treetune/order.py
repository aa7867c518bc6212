"""The order of tasks: a pure function from a global index to (epoch, position).

    locate(index=12, count=10, seed=0)   ->   (1, some position in 0..9)

Each epoch is a fresh permutation in which every position appears exactly once. Nothing is stored but a few
round keys, so resuming is one integer and 100 million tasks cost no more memory than ten.
"""

from __future__ import annotations

import hashlib
import operator
from functools import lru_cache
from math import isqrt

from treetune.errors import UsageError

LAST = 2**62
"""Where indices end."""
SMALL = 64
"""Up to here an epoch is one whole cached shuffle: a Feistel network shows structure on few positions."""

_ROUNDS = 8
_MASK = (1 << 64) - 1
_MULTIPLIER = 0xD6E8FEB86659FD93


def locate(index: int, count: int, seed: int | None = None) -> tuple[int, int]:
    """Where the task with this global index lies. `seed` None keeps load order."""
    epoch, offset = divmod(index, count)
    if seed is None or count == 1:
        return epoch, offset
    if count <= SMALL:
        return epoch, _shuffle(count, seed, epoch)[offset]
    return epoch, _permute(offset, count, _round_keys(seed, epoch))


def checked_index(index: object) -> int:
    """An index as a number; refused where no task can have it."""
    try:
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < LAST:
        raise UsageError(f"an index is a number from 0 to 2**62, got {index!r:.60}")
    return number


def stream_key(seed: int, use: str, number: int) -> bytes:
    """64 bytes that depend on all three together: seeds are hashed, never added."""
    return hashlib.blake2b(f"{seed}\x00{use}\x00{number}".encode(), person=b"treetune-order").digest()


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
    """A Feistel network over Z_rows x Z_columns; the few cells beyond `count` are walked past."""
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
