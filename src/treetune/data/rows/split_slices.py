"""Which rows a `split` of `load_dataset` means: `train`, `train[:10%]`, `train[100:200]+test`, `all`.

pieces = parse_split("train[:10%]+test", ["train", "test"])
[(piece.split, piece.range_of(1000)) for piece in pieces]      # [("train", range(0, 100)), ("test", range(0, 1000))]
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from treetune.errors import UsageError

_PIECE = re.compile(
    r"(?P<split>\w+(?:\.\w+)*)(?:\[(?P<start>-?[\d_]+%?)?:(?P<stop>-?[\d_]+%?)?\])?(?:\((?P<rounding>[^)]*)\))?"
)


class Piece(NamedTuple):
    split: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False
    whole: bool = False
    """Whether one percent is a whole number of rows, as `(pct1_dropremainder)` says."""

    def range_of(self, rows: int) -> range:
        """The rows of a split that has so many."""
        start = self._place(0 if self.start is None else self.start, rows)
        stop = rows if self.stop is None else self._place(self.stop, rows)
        return range(start, max(start, stop))

    def _place(self, boundary: int, rows: int) -> int:
        if self.percent and self.whole:
            if rows < 100:
                problem = f"split: {self.split!r} has {rows} rows, fewer than 100, and (pct1_dropremainder) takes none"
                raise UsageError(problem, remedy="leave (pct1_dropremainder) out")
            boundary *= rows // 100
        elif self.percent:
            boundary = round(boundary * rows / 100.0)
        return min(max(rows + boundary, 0) if boundary < 0 else boundary, rows)


def parse_split(text: str, splits: Collection[str]) -> list[Piece]:
    """The pieces whose rows follow each other. `splits` are those that there are; `all` is each of them."""
    if text == "all":
        return [Piece(split) for split in splits]
    pieces: list[Piece] = []
    for part in re.split(r"\s*\+\s*", text.strip()):
        match = _PIECE.fullmatch(part)
        if match is None or match["rounding"] not in (None, "closest", "pct1_dropremainder"):
            remedy = "write train, train[:100], train[:10%] or train[:50%]+test"
            raise UsageError(f"loading_params.kwargs.split: {text!r} is no split", remedy=remedy)
        bounds = [match["start"], match["stop"]]
        start, stop = (None if bound is None else int(bound.rstrip("%")) for bound in bounds)
        percent = any(bound is not None and bound.endswith("%") for bound in bounds)
        if percent and any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
            raise UsageError(f"loading_params.kwargs.split: {text!r} has a share above 100%")
        if match["split"] not in splits:
            problem = f"Unknown split {match['split']!r}: there is {', '.join(splits)}"
            raise UsageError(problem, remedy="look at loading_params.kwargs.split; files without one are train")
        pieces.append(Piece(match["split"], start, stop, percent, match["rounding"] == "pct1_dropremainder"))
    return pieces
