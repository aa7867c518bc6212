"""Texts that are nearly the same, by MinHash: the share of equal minima estimates the share of common shingles.

    pairs = find_pairs(texts, others)           # (index of a text, index of another, how alike from 0 to 1)

Signatures are cut into bands; only texts that share a band are compared, so it takes time in proportion to the texts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

HASHES, BANDS = 128, 32
"""Of a signature. With four minima a band, two texts that are 0.8 alike share none in one case of twenty million."""
WORDS = 3
"""Words of a shingle."""
LEAST = 0.8
_generator = np.random.default_rng(12)
_MASKS = _generator.integers(0, 1 << 63, HASHES, dtype=np.uint64)
_FACTORS = _generator.integers(1 << 62, 1 << 63, HASHES, dtype=np.uint64) | np.uint64(1)
_WORD = re.compile(r"\w+")


def normalise(text: str) -> str:
    """What two texts must share to be the same: words and numbers, in their order."""
    return " ".join(_WORD.findall(text.casefold()))


def shingles(text: str) -> set[str]:
    words = _WORD.findall(text.casefold())
    if len(words) <= WORDS:
        return {" ".join(words)}
    return {" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)}


def signature(text: str) -> np.ndarray:
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(part.encode()) for part in shingles(text)), dtype=np.uint64)
    # Numbers of 64 bits that wrap around; the upper half is well mixed, and each column an order of its own.
    mixed = ((hashes[:, None] ^ _MASKS) * _FACTORS) >> np.uint64(32)
    minima: np.ndarray = mixed.min(axis=0)
    return minima


def find_pairs(texts: Sequence[str], others: Sequence[str], least: float = LEAST) -> Iterator[tuple[int, int, float]]:
    """Pairs that are at least so much alike, by their real shingles; the same texts too."""
    width = HASHES // BANDS
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for number, text in enumerate(others):
        minima = signature(text)
        for band in range(BANDS):
            buckets[band, minima[band * width : (band + 1) * width].tobytes()].append(number)
    for number, text in enumerate(texts):
        minima = signature(text)
        near = {
            other
            for band in range(BANDS)
            for other in buckets.get((band, minima[band * width : (band + 1) * width].tobytes()), ())
        }
        own = shingles(text)
        for other in sorted(near):
            theirs = shingles(others[other])
            alike = len(own & theirs) / len(own | theirs)
            if alike >= least:
                yield number, other, alike
