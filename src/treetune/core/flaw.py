"""What is wrong with rows that tasks are made of: those that were left out, and those that no answer solves.

    flaw = Flaw("rows-dropped", "dropped: no ground truth", "answer is None", count=3, rows=[2, 5, 9])
    str(flaw)      # "3 rows dropped: no ground truth; row 2: answer is None"

Whoever reads tasks is warned of it, and `treetune validate` makes a finding of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from treetune.errors import plural

SHOWN = 10
"""How many rows a flaw names."""


class Flaw(msgspec.Struct, frozen=True):
    rule: str
    what: str
    """What became of the rows, or what they are."""
    first: str
    """What is wrong with the first of them."""
    count: int
    rows: list[int]
    """By their number in the source, from 0; once it is joined with others, the first ten."""

    @classmethod
    def of(cls, rule: str, what: str, first: str, rows: Sequence[int]) -> Self:
        return cls(rule, what, first, len(rows), list(rows))

    def join(self, later: Flaw | None) -> Flaw:
        """The same with further rows."""
        rows, more = (later.rows, later.count) if later is not None else ([], 0)
        return msgspec.structs.replace(self, count=self.count + more, rows=[*self.rows, *rows][:SHOWN])

    def __str__(self) -> str:
        place = f"row {self.rows[0]}"
        return f"{plural(self.count, 'row')} {self.what}; {f'{place}: {self.first}' if self.first else place}"
