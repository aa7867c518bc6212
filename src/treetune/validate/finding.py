"""A Finding is one rule that one file, or taskset, breaks: where, what was found, what is expected, what to do."""

from __future__ import annotations

from enum import StrEnum

import msgspec

SHOWN = 10
"""How many rows a finding names."""


class Severity(StrEnum):
    ERROR = "error"
    """It breaks the training, or spoils it silently."""
    WARNING = "warning"
    """It may be meant."""


class Finding(msgspec.Struct):
    rule: str
    severity: Severity
    file: str
    unit: str
    """What `rows` counts: `row` from 0, `line` from 1, or `task` by its idx."""
    rows: list[int]
    """The first ten; none where the whole file is meant."""
    count: int
    """How many rows; 0 where the whole file is meant."""
    found: str
    expected: str = ""
    fix: str = ""
