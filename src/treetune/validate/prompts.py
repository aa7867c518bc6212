"""Prompts as 64-bit keys, to find those that come twice: equal text in equally long messages, equal keys.

A key is the xxh3 of the contents one after another, plus a sum that tells where each message ends. Both files of rows
and Arrow columns give the same keys, so that a JSON file can be compared with a parquet file.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.rows.arrow_values import encode_json
from treetune.validate.arrays import bytes_of, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Keys = np.ndarray[Any, np.dtype[np.uint64]]


def key_of(prompt: Any) -> int:
    """The key of a prompt that is a list of messages; 0 of any other, which is never told as repeated."""
    from xxhash import xxh3_64_intdigest

    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return 0
    contents = [_bytes(message.get("content")) for message in prompt]
    ends = sum(len(content) * (place + 1) for place, content in enumerate(contents))
    return (xxh3_64_intdigest(b"".join(contents)) + ends * _ODD) & _MASK


def keys_of(starts: np.ndarray[Any, Any], contents: pa.Array) -> Keys:
    """The keys of many prompts: `starts` are the places of their first messages, and the end of the last."""
    from xxhash import xxh3_64_intdigest

    offsets, data = offsets_of(contents), bytes_of(contents)
    bounds = offsets[starts].tolist()
    texts = (data[begin:end] for begin, end in pairwise(bounds))
    hashes = np.fromiter(map(xxh3_64_intdigest, texts), np.uint64, len(bounds) - 1)
    counts = np.diff(starts)
    place = np.arange(starts[0], starts[-1]) - np.repeat(starts[:-1], counts) + 1
    lengths = np.diff(offsets)[starts[0] : starts[-1]].astype(np.int64)
    total = np.concatenate(([0], np.cumsum(lengths * place)))
    ends = total[starts[1:] - starts[0]] - total[starts[:-1] - starts[0]]
    keys = hashes + ends.astype(np.uint64) * np.uint64(_ODD)
    keys[counts == 0] = 0
    return np.asarray(keys)


def _bytes(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="replace")
    return b"" if content is None else encode_json(content)
