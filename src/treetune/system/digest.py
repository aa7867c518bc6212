"""Hashes of plain values. Equal values have equal hashes, however they were written.

digest({"a": 1, "b": None}) == digest({"a": 1})
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder(order="sorted")


def canonical(value: Any) -> bytes:
    encoded = _encoder.encode(value)
    # None and non-finite floats both encode as null, so the slow walk is only needed if there is a null.
    if b"null" in encoded:
        encoded = _encoder.encode(_without_nones(msgspec.to_builtins(value, str_keys=True, order="sorted")))
    return encoded


def digest(value: Any, size: int = 16) -> str:
    return hashlib.blake2b(canonical(value), digest_size=size).hexdigest()


def _without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nones(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return value
