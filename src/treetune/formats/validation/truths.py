"""Whether a ground truth stands in a row as its trainer's environment reads it. Nothing else tells: it scores 0."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from treetune.contract import Contract, Kind, Stored, kind_of


class TruthFault(NamedTuple):
    rule: str
    expected: str


def stored_fault(contract: Contract, truth: Any) -> TruthFault | None:
    """What is wrong with a ground truth as it is stored, or None."""
    if contract.stored is Stored.TEXT:
        return _text(contract, truth)
    if contract.stored is Stored.TARGET:
        return _target(truth)
    if contract.stored is Stored.JSON:
        return _json(contract, truth)
    problem = contract.problem(truth)
    if problem is None and isinstance(truth, str) and not truth.strip():
        return TruthFault("ground-truth-value", "a text that says something")
    return None if problem is None else TruthFault("ground-truth-type", " or ".join(contract.takes))


def _text(contract: Contract, truth: Any) -> TruthFault | None:
    if not isinstance(truth, str):
        return TruthFault("ground-truth-type", "text")
    if not truth.strip():
        return TruthFault("ground-truth-value", "a text that says something")
    if contract.pattern is not None and not _matcher(contract.pattern)(truth):
        return TruthFault("ground-truth-value", f"text such as {contract.pattern}")
    return None


def _target(truth: Any) -> TruthFault | None:
    target = truth.get("target") if isinstance(truth, dict) else None
    answers = [target] if isinstance(target, str) else target
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        return TruthFault("ground-truth-type", '{"target": [texts]}')
    if not any(answer.strip() for answer in answers):
        return TruthFault("ground-truth-value", "a text that says something")
    return None


def _json(contract: Contract, truth: Any) -> TruthFault | None:
    wanted = f"{' or '.join(kind for kind in contract.takes if kind is not Kind.TEXT)} as JSON in a text"
    if not isinstance(truth, str):
        return TruthFault("ground-truth-type", wanted)
    try:
        value = msgspec.json.decode(truth)
    except (msgspec.DecodeError, UnicodeError):
        return TruthFault("ground-truth-value", wanted)
    kind = kind_of(value)
    return None if kind is not Kind.TEXT and kind in contract.takes else TruthFault("ground-truth-value", wanted)


@lru_cache(maxsize=64)
def _matcher(pattern: str) -> Any:
    return re.compile(pattern).fullmatch
