"""When is an answer the reference? AgentBench's three matchers, built in.

    MATCHERS["integer-match"]("42", "42\\n")          # True
    problem_with_reference("integer-match", "many")   # "is no integer"

The names are those of AgentBench's scripts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

INTEGER = re.compile(r"[+-]?\d+")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B|bytes?)?", re.I)
UNITS = {unit: 1024**power for power, unit in enumerate(["", "K", "M", "G", "T", "P"])}
SIZE_TOLERANCE = 0.05
"""`du -h` rounds to two digits, and people convert."""


def integer(text: str) -> int | None:
    return int(text.strip()) if INTEGER.fullmatch(text.strip()) else None


def size(text: str) -> float | None:
    """Bytes of a size as people write it: `1.2G`, `340 MB`, `512`."""
    found = SIZE.fullmatch(text.strip())
    return float(found[1]) * UNITS[found[2].upper()] if found else None


def plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def integers_match(answer: str, reference: str) -> bool:
    return integer(answer) is not None and integer(answer) == integer(reference)


def strings_match(answer: str, reference: str) -> bool:
    return plain(answer) == plain(reference)


def sizes_match(answer: str, reference: str) -> bool:
    given, right = size(answer), size(reference)
    return given is not None and right is not None and abs(given - right) <= SIZE_TOLERANCE * right


MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "integer-match": integers_match,
    "string-match": strings_match,
    "size-match": sizes_match,
}


def problem_with_reference(matcher: str, reference: str) -> str | None:
    """Why no answer could match it, or None."""
    if not reference.strip():
        return "is empty"
    if matcher == "integer-match" and integer(reference) is None:
        return "is no integer"
    if matcher == "size-match" and size(reference) is None:
        return "is no size"
    return None
