"""Whether a ground truth stands in a row as its trainer's environment reads it. Nothing else tells: it scores 0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from treetune.environment import Contract, Kind, Stored, kind_of


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
    if kind is Kind.TEXT or kind not in contract.takes:
        return TruthFault("ground-truth-value", wanted)
    if kind is Kind.CASES and all(map(_is_plain, value)):
        return None
    if (problem := contract.problem(truth)) is not None:
        return TruthFault("ground-truth-value", f"{wanted}, but it {problem}")
    if kind is Kind.CASES and any(_as_written(one) != _as_written(two) for one, two in _pairs(contract, truth, value)):
        return TruthFault("ground-truth-value", "inputs and outputs that are text")
    return None


def _is_plain(case: dict[str, Any]) -> bool:
    """Whether there is nothing to ask the contract: most cases are text in, text out."""
    texts = isinstance(case["input"], str) and isinstance(case["output"], str)
    return texts and case.get("testtype") in (None, "stdin") and not case.get("metadata")


def _pairs(contract: Contract, truth: str, cases: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    return zip(cases, msgspec.json.decode(contract.encode(truth)), strict=True)


def _as_written(case: dict[str, Any]) -> tuple[Any, Any]:
    return case["input"], case["output"]


@lru_cache(maxsize=64)
def _matcher(pattern: str) -> Any:
    return re.compile(pattern).fullmatch
