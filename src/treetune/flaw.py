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
    """The first ten, by their number in the source, from 0."""

    @classmethod
    def of(cls, rule: str, what: str, first: str, rows: Sequence[int]) -> Self:
        return cls(rule, what, first, len(rows), list(rows[:SHOWN]))

    def join(self, later: Flaw) -> Flaw:
        """The same with further rows."""
        rows = [*self.rows, *later.rows][:SHOWN]
        return msgspec.structs.replace(self, count=self.count + later.count, rows=rows)

    def __str__(self) -> str:
        place = f"row {self.rows[0]}"
        return f"{plural(self.count, 'row')} {self.what}; {f'{place}: {self.first}' if self.first else place}"
