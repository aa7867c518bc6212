"""Checks the token ids and logprobs that a model's server, engine or trainer reports as sampled.

    ids = check_ids(choice["token_ids"], "sampled token")
    logprobs = check_logprobs(choice["logprobs"])

A single NaN would corrupt a training step, and a negative id would crash a trainer. Such a sample is rejected as a
fault of its sender (`PolicyError`), with the value and its position.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from treetune.errors import PolicyError

HIGHEST_ID = 2**31 - 1
"""Trainers store ids in 32 bits."""
ROUNDING = 0.01
"""How far above 0 rounding can lift the logprob of a certain token. Such a logprob counts as 0."""
_REMEDY = "check the server or engine of the model: it sent a sample that cannot be trained on"


TokenId = Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_ID)]
_Ids = list[TokenId]
_Logprobs = list[Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=0.0)]]


def check_ids(ids: Any, what: str) -> list[int]:
    """Return the ids as plain non-negative integers; `what` names an id in the error."""
    values = _as_list(ids, what)
    with suppress(msgspec.ValidationError):  # the fast path, which almost always succeeds
        return msgspec.convert(values, _Ids)
    return [_check_id(value, at, what, len(values)) for at, value in enumerate(values)]


def check_logprobs(logprobs: Any) -> list[float]:
    """Return the logprobs of sampled tokens as plain floats of at most 0."""
    what = "the logprob of sampled token"
    values = _as_list(logprobs, what)
    with suppress(msgspec.ValidationError):
        return msgspec.convert(values, _Logprobs)
    return [_check_logprob(value, at, what, len(values)) for at, value in enumerate(values)]


def _as_list(values: Any, what: str) -> list[Any]:
    if isinstance(values, list):
        return values
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise PolicyError(f"{what}: expected a list, got {values!r:.60}", remedy=_REMEDY)
    return list(values)


def _check_id(value: Any, at: int, what: str, count: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)  # accepts numpy and torch integers too
    except TypeError:
        raise _refusal(what, at, count, value, "an integer") from None
    if not 0 <= found <= HIGHEST_ID:
        raise _refusal(what, at, count, found, f"a token id from 0 to {HIGHEST_ID}")
    return found


def _check_logprob(value: Any, at: int, what: str, count: int) -> float:
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refusal(what, at, count, value, "a number") from None
    if not math.isfinite(found):
        raise _refusal(what, at, count, found, "finite")
    if found > ROUNDING:
        raise _refusal(what, at, count, found, "at most 0")
    return min(found, 0.0)


def _refusal(what: str, at: int, count: int, value: Any, expected: str) -> PolicyError:
    return PolicyError(f"{what} {at} of {count} is {value!r:.60}, and must be {expected}", remedy=_REMEDY)
