"""A Batch is some rows of one file, and where they stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from treetune.errors import TreetuneError

Row = dict[str, Any]

BATCH = 2_000
"""Rows of one batch."""


class ReadError(TreetuneError):
    """A file that cannot be read as what its name says."""


class Batch(NamedTuple):
    """Rows and where they stand."""

    source: str
    unit: str
    """What the numbers count: `line` or `row`."""
    numbers: Sequence[int]
    rows: list[Row]

    def place(self, position: int) -> str:
        return f"{self.source}, {self.unit} {self.numbers[position]}"
