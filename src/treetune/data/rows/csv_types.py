"""What the columns of CSV files hold: numbers or booleans only where every cell prints back as it stands.

    types = CsvTypes()
    types.look_at(["id", "price"], ["7", "1.50"])
    types.readers_of(["id", "price"])      # [int, str]

So `5` is a number, and `007`, `1.50`, `+5`, `1e5` and `true` make text of their column. An empty cell is None in any
column, and no other text is taken for null. Whole numbers over 64 bits stay text, which is their digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

Reader = Callable[[str], Any]


def _read_boolean(cell: str) -> bool:
    return cell == "True"


def _reader_of(cell: str) -> Reader:
    """What reads a cell so that it prints back identically."""
    if cell in ("True", "False"):
        return _read_boolean
    if _INTEGER.fullmatch(cell) is not None and -(2**63) <= int(cell) < 2**63:
        return int
    try:
        number = float(cell)
    except ValueError:
        return str
    return float if math.isfinite(number) and repr(number) == cell else str


class CsvTypes:
    """The types of columns, by name, over all rows that were looked at."""

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._names: list[str] | None = None
        self._open: list[tuple[int, str]] = []
        """The columns of these names that may still turn out to be text."""

    def look_at(self, names: list[str], cells: Sequence[str]) -> None:
        """Learns the types from one more row."""
        if names is not self._names:  # of another file
            self._names = names
            self._open = [(place, name) for place, name in enumerate(names) if self._readers.get(name) is not str]
        closed = False
        for place, name in self._open:
            if cell := cells[place]:
                reader = _reader_of(cell)
                if self._readers.setdefault(name, reader) is not reader:
                    self._readers[name] = reader = str
                closed = closed or reader is str
        if closed:
            self._open = [(place, name) for place, name in self._open if self._readers.get(name) is not str]

    def readers_of(self, names: Sequence[str]) -> list[Reader]:
        return [self._readers.get(name, str) for name in names]
