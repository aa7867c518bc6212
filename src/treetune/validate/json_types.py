"""The types of a JSON file as `datasets` reads it: all rows together, but of JSON lines the first 10 MB.

    types = JsonTypes(source)
    types.take(chunk)
    types.tell(report)     # what changes, or breaks, when `datasets` reads it

What comes later must fit what came first: a column that is new there breaks the loader.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from treetune.rows.sources import File, HubName, open_plain
from treetune.validate.chunks import Chunk
from treetune.validate.report import Report
from treetune.validate.shape import Feature, Shape, report_shape, shape_of

BLOCK = 10 << 20
"""Bytes of JSON lines that `datasets` reads at a time."""

_FITTING = {
    "string": {"text", "integer", "float", "boolean"},
    "int64": {"integer"},
    "double": {"integer", "float"},
    "bool": {"boolean"},
    "timestamp[s]": {"text"},
    "null": set[str](),
}
"""What a later block may have where the first has a type."""


class JsonTypes:
    def __init__(self, source: File | HubName) -> None:
        self._path = source.path if isinstance(source, File) else None
        self._shape = Shape()
        self._first: dict[str, Feature] | None = None
        """The types of the first block, where there are more."""
        self._lines: int | None = None
        """How many lines the first block has."""
        self._file = self._unit = ""

    def take(self, chunk: Chunk) -> None:
        if not self._file and chunk.unit == "line" and self._path is not None:
            self._lines = lines_of_block(self._path)
        self._file, self._unit = chunk.file, chunk.unit
        cut = len(chunk.numbers)
        if self._lines is not None and self._first is None:
            cut = bisect_right(chunk.numbers, self._lines)
        shape_of(chunk.given[:cut], chunk.numbers[:cut], self._shape)
        if cut < len(chunk.numbers):
            self._first = self._features()
            shape_of(chunk.given[cut:], chunk.numbers[cut:], self._shape)

    @property
    def features(self) -> dict[str, Feature]:
        return self._features() if self._first is None else self._first

    def tell(self, report: Report) -> None:
        report_shape(self._shape, self._file, self._unit, report)
        if self._first is not None and (found := misfit(self._shape, self._first)):
            report.add("late-types", self._file, found)

    def _features(self) -> dict[str, Feature]:
        return {key: below.feature() for key, below in self._shape.keys.items()}


def lines_of_block(path: Path) -> int | None:
    """How many lines the first block has; None where there is no other."""
    with open_plain(path) as file:
        block = file.read(BLOCK)
        block += file.readline()
        return block.count(b"\n") if file.read(1) else None


def misfit(shape: Shape, first: Feature, path: str = "") -> str | None:
    """Where rows do not fit the types of the first block; `shape` is that of all rows."""
    kinds = shape.counts.keys()
    if first == "json" or not kinds:
        return None
    if isinstance(first, dict):
        for key, below in shape.keys.items():
            place = f"{path}.{key}" if path else key
            if key not in first:
                return f"{place} comes first in line {below.first}"
            if found := misfit(below, first[key], place):
                return found
        fitting = {"mapping"}
    elif isinstance(first, list):
        fitting = {"list"}
        if shape.items is not None and (found := misfit(shape.items, first[0], f"{path}[]")):
            return found
    else:
        fitting = _FITTING[first]
    if kinds <= fitting and (first != "timestamp[s]" or shape.dates):
        return None
    return f"{path} is {', '.join(sorted(kinds))} in all, and {first if isinstance(first, str) else 'other'} at first"
