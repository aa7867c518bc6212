"""The types that `datasets` infers for a file's columns: SkyRL loads its rows with that library, all files of a list
together.

Parquet states its types. JSON types follow from all values; for JSON lines from the first 10 MB, which the rest must
fit. Two files fit if no column has two types. A null fits everything except a mapping in a later file, and a mapping
may lack keys unless it is inside a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.core.finding import SHOWN
from treetune.data.arrow_values import find_clashes
from treetune.data.sources.names import Row, open_plain
from treetune.data.validate.rules import FilesReport

if TYPE_CHECKING:
    import pyarrow as pa


Feature = str | dict[str, Any] | list[Any]
"""A type: a name, a mapping of keys to types, or a list with one type."""

BLOCK = 10 << 20
"""Bytes of JSON lines that `datasets` reads at a time."""


def type_feature(kind: pa.DataType, path: str, unsupported: list[str]) -> Feature:
    """Return the feature for a parquet type. Paths of types that `datasets` does not know are added to
    `unsupported`."""
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        return {field.name: type_feature(field.type, f"{path}.{field.name}", unsupported) for field in kind}
    if types.is_list(kind):
        return [type_feature(kind.value_type, f"{path}[]", unsupported)]
    if types.is_dictionary(kind):
        return type_feature(kind.value_type, path, unsupported)
    if types.is_fixed_size_list(kind) or types.is_large_list(kind):
        type_feature(kind.value_type, f"{path}[]", unsupported)
    elif isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":
            return "json"
        unsupported.append(path)
    unknown = (types.is_map, types.is_union, types.is_list_view, types.is_large_list_view)
    if any(is_kind(kind) for is_kind in (*unknown, types.is_decimal32, types.is_decimal64)):
        unsupported.append(path)
    return str(kind)


def find_difference(feature: Mapping[str, Feature], before: Mapping[str, Feature]) -> str | None:
    """Return where a file's types clash with those of the files before it, or None."""
    return next(iter(find_clashes(_drop_nulls(feature), before)), None)


def _drop_nulls(feature: Mapping[str, Feature]) -> dict[str, Feature]:
    known = {key: kind for key, kind in feature.items() if kind != "null"}
    return {key: _drop_nulls(kind) if isinstance(kind, dict) else kind for key, kind in known.items()}


def merge(before: Mapping[str, Feature], feature: Mapping[str, Feature]) -> dict[str, Feature]:
    """Merge the types of files that fit together."""
    both = dict(before)
    for key, mine in feature.items():
        theirs = both.get(key, "null")
        if isinstance(mine, dict) and isinstance(theirs, dict):
            both[key] = merge(theirs, mine)
        elif theirs in ("null", ["null"]):
            both[key] = mine
    return both


class Places(msgspec.Struct):
    """Counts rows, and stores the numbers of the first ten. A row with several faults counts once."""

    count: int = 0
    first: list[int] = []
    last: int | None = None

    def add(self, row: int) -> None:
        if row != self.last:
            self.last = row
            self.count += 1
            if self.count <= SHOWN:
                self.first.append(row)


_KINDS = {str: "text", int: "integer", float: "float", bool: "boolean", list: "list", dict: "mapping"}
_FEATURES = {"text": "string", "integer": "int64", "float": "double", "boolean": "bool"}
_FITTING = {
    "string": {"text", "integer", "float", "boolean"},
    "int64": {"integer"},
    "double": {"integer", "float"},
    "bool": {"boolean"},
    "timestamp[s]": {"text"},
    "null": set[str](),
}
"""Kinds that later lines may have, by the type in the first 10 MB."""


class Shape:
    """The types at one place in a JSON file's rows, and at the places below it."""

    __slots__ = ("counts", "dates", "first", "items", "keys", "nulls", "rows")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        """The first row that has this place."""
        self.counts: dict[str, int] = {}
        self.nulls = 0
        self.keys: dict[str, Shape] = {}
        self.items: Shape | None = None
        self.dates = True
        """Whether every text is a date."""
        self.rows = {rule: Places() for rule in ("mixed-types", "nan-becomes-null", "reread-dates", "big-integers")}
        """The rows that would break each rule."""

    def add(self, value: Any, row: int) -> None:
        if value is None:
            self.nulls += 1
            return
        kind = _KINDS.get(type(value), "other")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "mapping":
            for key, item in value.items():
                shape = self.keys.get(key)
                if shape is None:
                    shape = self.keys[key] = Shape(row)
                shape.add(item, row)
        elif kind == "list":
            self.items = self.items or Shape(row)
            for item in value:
                self.items.add(item, row)
        elif kind == "text":
            if self.dates:
                self.dates = _is_date(value)
                self.rows["reread-dates"].add(row)
            if _is_parsable(value):
                self.rows["mixed-types"].add(row)
        elif kind == "integer" and not -(2**63) <= value < 2**63:
            self.rows["big-integers"].add(row)
        elif kind == "float" and not math.isfinite(value):
            self.rows["nan-becomes-null"].add(row)

    def feature(self) -> Feature:
        """Return the type as `datasets` reads it."""
        kinds = self.counts.keys()
        if not kinds:
            return "null"
        if kinds == {"integer", "float"} or (kinds == {"integer"} and self.rows["big-integers"].count):
            return "double"
        if len(kinds) > 1 or "other" in kinds:
            return "json"
        (kind,) = kinds
        if kind == "mapping":
            uniform = all(sum(shape.counts.values()) + shape.nulls == self.counts[kind] for shape in self.keys.values())
            return self.features() if self.keys and uniform else "json"
        if kind == "list":
            return [self.items.feature() if self.items is not None else "null"]
        return "timestamp[s]" if kind == "text" and self.dates else _FEATURES[kind]

    def features(self) -> dict[str, Feature]:
        return {key: shape.feature() for key, shape in self.keys.items()}

    def below(self, path: str) -> Iterator[tuple[str, str, Shape]]:
        """Yield the key and path of each place inside a value."""
        for key, shape in self.keys.items():
            yield key, f"{path}.{key}" if path else key, shape
        if self.items is not None:
            yield "", f"{path}[]", self.items

    def faults(self, path: str = "", *, array: bool, kept: bool = False) -> Iterator[tuple[str, str, Places]]:
        """Yield the rules broken here and below: rule, finding, rows.

        `array`: the rows are a JSON array, not lines. `kept`: `datasets` stores this value as JSON because the value
        around it has no single type; then text stays unchanged.
        """
        kinds = self.counts.keys()
        as_json = kept or (bool(path) and self.feature() == "json")
        found = {"big-integers": f"{path} is an integer over 64 bits"}
        if as_json or array:
            found["nan-becomes-null"] = f"{path} is NaN or infinite here"
        if "text" in kinds and len(kinds) > 1 and not kept:
            found["mixed-types"] = f"{path} is text here, {', '.join(sorted(kinds - {'text'}))} in other rows"
        if kinds == {"text"} and self.dates and not kept:
            found["reread-dates"] = f"{path} is a date in every row"
        for rule, what in found.items():
            if self.rows[rule].count:
                yield rule, what, self.rows[rule]
        for _, place, shape in self.below(path):
            yield from shape.faults(place, array=array, kept=as_json)

    def misfit(self, first: Feature, path: str = "") -> str | None:
        """Return where a row does not fit the types of the first 10 MB, or None."""
        kinds = self.counts.keys()
        if first == "json" or not kinds:
            return None
        if isinstance(first, str):
            fitting = _FITTING[first]
        else:
            inner = first if isinstance(first, dict) else {"": first[0]}
            fitting = {"mapping" if isinstance(first, dict) else "list"}
            for key, place, shape in self.below(path):
                if key not in inner:
                    return f"{place} first appears in line {shape.first}"
                if found := shape.misfit(inner[key], place):
                    return found
        if kinds <= fitting and (first != "timestamp[s]" or self.dates):
            return None
        beginning = first if isinstance(first, str) else "other"
        return f"{path} is {', '.join(sorted(kinds))} in the whole file, but {beginning} at first"


_DATE = re.compile(
    r"(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    r"([T ]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d)?)?(Z|[+-]([01]\d|2[0-3])(:?[0-5]\d)?)?)?",
    re.ASCII,
)
"""The text that Arrow's JSON reader reads as a date, if the month has that day."""
_BEGIN = frozenset('-0123456789tfnN{["I \t\r\n')
_LITERAL = re.compile(
    r"-?\d*(\.\d*)?([eE][+-]?\d*)?|true|false|null|NaN|-?Infinity|\{.*\}|\[.*\]|\".*\"", re.DOTALL | re.ASCII
)


def _is_date(text: str) -> bool:
    if (match := _DATE.fullmatch(text)) is None:
        return False
    try:
        date(int(match[1]) or 2000, int(match[2]), int(match[3]))
    except ValueError:
        return False
    return True


def _is_parsable(text: str) -> bool:
    """Whether `datasets`, which parses text in a mixed column again, would change the text."""
    return text[:1] in _BEGIN and _LITERAL.fullmatch(text.strip(" \t\r\n")) is not None


class JsonTypes:
    """The types of one JSON file. `path` is None for hub rows, which `datasets` has already read."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._shape = Shape()
        self._first: dict[str, Feature] | None = None
        """The types of the first 10 MB, if the file is longer."""
        self._lines = math.inf
        """The number of lines in the first 10 MB."""
        self._unit = ""

    def add(self, rows: Sequence[Row], numbers: Sequence[int], unit: str) -> None:
        """Add rows with their nulls."""
        if not self._unit and unit == "line" and self._path is not None:
            with open_plain(self._path) as file:
                block = file.read(BLOCK) + file.readline()
                self._lines = block.count(b"\n") if file.read(1) else math.inf
        self._unit = unit
        for row, number in zip(rows, numbers, strict=True):
            if number > self._lines and self._first is None:
                self._first = self._shape.features()
            self._shape.add(row, number)

    @property
    def features(self) -> dict[str, Feature]:
        return self._shape.features() if self._first is None else self._first

    def report_to(self, report: FilesReport) -> None:
        """Report what `datasets` changes or fails on."""
        if self._path is None:
            return
        found_by_rule: dict[str, tuple[str, set[int], int]] = {}
        for rule, found, rows in self._shape.faults(array=self._unit != "line"):
            found, numbers, count = found_by_rule.get(rule, (found, set(), 0))
            found_by_rule[rule] = (found, numbers.union(rows.first), max(count, rows.count))
        for rule, (found, numbers, count) in found_by_rule.items():
            # No parquet column can hold messages of which some have text and others lists.
            helps = not (rule == "mixed-types" and found.startswith("prompt"))
            first, count = sorted(numbers)[:SHOWN], max(count, len(numbers))
            report.add(rule, str(self._path), found, first, self._unit, count=count, helps=helps)
        if self._first is not None and (misfit := self._shape.misfit(self._first)):
            report.add("late-types", str(self._path), misfit)
