"""The types of a file's columns, and whether trainers' loader takes several files together.

Parquet says its types; those of JSON follow from all values, as `datasets` reads them. Two files fit where no column
has two types: null fits all but a mapping in a later file, and a mapping may lack keys, unless it is inside a list.
"""

from __future__ import annotations

import math
import re
from calendar import monthrange
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treetune.rows.sources import Row
from treetune.validate.finding import SHOWN
from treetune.validate.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

Feature = str | dict[str, Any] | list[Any]
"""A type: a name, a mapping of keys to types, or a list of one type."""

_KINDS: dict[type, str] = {
    str: "text", int: "integer", float: "float", bool: "boolean", list: "list", dict: "mapping",
}  # fmt: skip
_FEATURES = {"text": "string", "integer": "int64", "float": "double", "boolean": "bool"}
_DATE = re.compile(
    r"(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    r"([T ]([01]\d|2[0-3])(:[0-5]\d(:[0-5]\d)?)?(Z|[+-]([01]\d|2[0-3])(:?[0-5]\d)?)?)?",
    re.ASCII,
)
"""What Arrow's JSON reader takes for a date, if the month has that day."""
_UNSUPPORTED = "unsupported"


class Places:
    """Rows, counted; the first ten by number. A row counts once, however many of its values are meant."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []
        self.last: int | None = None

    def add(self, row: int) -> None:
        if row != self.last:
            self.last = row
            self.count += 1
            if self.count <= SHOWN:
                self.first.append(row)

    def add_many(self, numbers: Sequence[int], mask: Any) -> None:
        """The rows at the places of a mask."""
        places = mask.nonzero()[0]
        self.first += [numbers[int(place)] for place in places[: SHOWN - len(self.first)]]
        self.count += len(places)


class Shape:
    """The types of one place in the rows of a JSON file, and of the places below it."""

    __slots__ = ("counts", "dates", "first", "items", "keys", "large", "nan", "nulls", "parsable", "text")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.nulls = 0
        self.first: int | None = None
        """The first row that has it."""
        self.keys: dict[str, Shape] = {}
        self.items: Shape | None = None
        self.dates = True
        self.text = Places()
        self.large = Places()
        self.parsable = Places()
        """Rows whose text is JSON of something else, such as 7 or true."""
        self.nan = Places()
        """Rows with a number that JSON cannot spell."""

    def take(self, value: Any, row: int) -> None:
        if self.first is None:
            self.first = row
        if value is None:
            self.nulls += 1
            return
        kind = _KINDS.get(type(value), "other")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "mapping":
            for key, item in value.items():
                shape = self.keys.get(key)
                if shape is None:
                    shape = self.keys[key] = Shape()
                shape.take(item, row)
        elif kind == "list":
            self.items = self.items or Shape()
            for item in value:
                self.items.take(item, row)
        elif kind == "text":
            self.text.add(row)
            self.dates = self.dates and _is_date(value)
            if _parsable(value):
                self.parsable.add(row)
        elif kind == "integer" and not -(2**63) <= value < 2**63:
            self.large.add(row)
        elif kind == "float" and not math.isfinite(value):
            self.nan.add(row)

    def feature(self) -> Feature:
        """As `datasets` reads it."""
        kinds = self.counts.keys()
        if not kinds:
            return "null"
        if kinds == {"integer", "float"} or (kinds == {"integer"} and self.large.count):
            return "double"
        if len(kinds) > 1 or "other" in kinds:
            return "json"
        (kind,) = kinds
        if kind == "mapping":
            uniform = all(sum(shape.counts.values()) + shape.nulls == self.counts[kind] for shape in self.keys.values())
            return {key: shape.feature() for key, shape in self.keys.items()} if self.keys and uniform else "json"
        if kind == "list":
            return [self.items.feature() if self.items is not None else "null"]
        return "timestamp[s]" if kind == "text" and self.dates else _FEATURES[kind]

    def faults(self, path: str = "", *, array: bool, kept: bool = False) -> Iterator[tuple[str, str, Places]]:
        """The rules that are broken here and below: rule, what was found, rows.

        `array`: the rows are a JSON array, not lines. `kept`: `datasets` keeps this as JSON, because what it is part of
        has no one type. Then text stays as it is.
        """
        kinds = self.counts.keys()
        as_json = kept or (bool(path) and self.feature() == "json")
        if "text" in kinds and len(kinds) > 1 and not kept and self.parsable.count:
            others = ", ".join(sorted(kinds - {"text"}))
            yield "mixed-types", f"{path} is text here, {others} in other rows", self.parsable
        if (as_json or array) and self.nan.count:
            yield "nan-becomes-null", f"{path} is NaN or infinite here", self.nan
        if kinds == {"text"} and self.dates and not kept:
            yield "reread-dates", f"{path} is a date in every row", self.text
        if self.large.count:
            yield "big-integers", f"{path} is an integer over 64 bits", self.large
        for key, shape in self.keys.items():
            yield from shape.faults(f"{path}.{key}" if path else key, array=array, kept=as_json)
        if self.items is not None:
            yield from self.items.faults(f"{path}[]", array=array, kept=as_json)


def _is_date(text: str) -> bool:
    match = _DATE.fullmatch(text)
    return match is not None and int(match[3]) <= monthrange(int(match[1]) or 2000, int(match[2]))[1]


def _parsable(text: str) -> bool:
    """Whether `datasets`, which parses text in a mixed column again, would make something else of it."""
    return text[:1] in _BEGIN and _LITERAL.fullmatch(text.strip(" \t\r\n")) is not None


_BEGIN = frozenset('-0123456789tfnN{["I \t\r\n')
_LITERAL = re.compile(
    r"-?\d*(\.\d*)?([eE][+-]?\d*)?|true|false|null|NaN|-?Infinity|\{.*\}|\[.*\]|\".*\"", re.DOTALL | re.ASCII
)


def shape_of(rows: Sequence[Row], numbers: Any, shape: Shape) -> None:
    """Take the rows of a batch into the shape of their file."""
    for row, number in zip(rows, numbers, strict=True):
        shape.take(row, number)


def report_shape(shape: Shape, file: str, unit: str, report: Report) -> None:
    """Tell what `datasets` would change, and the integers that it fails on."""
    told: dict[str, tuple[str, set[int], int]] = {}
    for rule, found, rows in shape.faults(array=unit != "line"):
        first, numbers, count = told.get(rule, (found, set(), 0))
        told[rule] = (first, numbers.union(rows.first), max(count, rows.count))
    for rule, (found, numbers, count) in told.items():
        # No parquet column holds messages of which some have text and others lists.
        fixable = not (rule == "mixed-types" and found.startswith("prompt"))
        report.add(rule, file, found, sorted(numbers)[:SHOWN], unit, count=max(count, len(numbers)), helps=fixable)


def schema_feature(schema: pa.Schema) -> dict[str, Feature]:
    return {field.name: type_feature(field.type) for field in schema}


def type_feature(kind: pa.DataType) -> Feature:
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return "json" if kind.extension_name == "arrow.json" else _UNSUPPORTED
    if types.is_struct(kind):
        return {field.name: type_feature(field.type) for field in kind}
    if types.is_list(kind):
        return [type_feature(kind.value_type)]
    if types.is_fixed_size_list(kind) or types.is_large_list(kind):
        return [type_feature(kind.value_type), str(kind)]
    if types.is_dictionary(kind):
        return type_feature(kind.value_type)
    if any(known(kind) for known in (types.is_map, types.is_union, types.is_list_view, types.is_large_list_view)):
        return _UNSUPPORTED
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return _UNSUPPORTED
    return str(kind)


def unsupported(feature: Feature, path: str = "") -> str | None:
    """The path of a type that `datasets` does not know."""
    if isinstance(feature, dict):
        below = (unsupported(item, f"{path}.{key}" if path else key) for key, item in feature.items())
        return next((found for found in below if found), None)
    if isinstance(feature, list):
        return unsupported(feature[0], f"{path}[]")
    return path if feature == _UNSUPPORTED else None


def difference(feature: Mapping[str, Feature], before: Mapping[str, Feature], path: str = "") -> str | None:
    """Where a file has a type that the loader does not put together with the files before it, or None."""
    for key in feature.keys() & before.keys():
        place = f"{path}.{key}" if path else key
        mine, theirs = feature[key], before[key]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if found := difference(mine, theirs, place):
                return found
        elif isinstance(mine, dict) or not _fits(mine, theirs):
            return f"{place} is {_shown(mine)} here, {_shown(theirs)} in"
    return None


def merged(before: Mapping[str, Feature], feature: Mapping[str, Feature]) -> dict[str, Feature]:
    """The types of files that go together."""
    both = dict(before)
    for key, mine in feature.items():
        theirs = both.get(key, "null")
        if isinstance(mine, dict) and isinstance(theirs, dict):
            both[key] = merged(theirs, mine)
        elif key not in both or _is_null(theirs):
            both[key] = mine
    return both


def _is_null(feature: Feature) -> bool:
    """Null, or lists of nothing else, such as empty ones."""
    return _is_null(feature[0]) if isinstance(feature, list) else feature == "null"


def _fits(one: Feature, other: Feature) -> bool:
    """Null fits all, a list of nulls all lists; inside a list all keys must be there."""
    if isinstance(one, list) and isinstance(other, list):
        return one == other or (one[1:] == other[1:] and (_is_null(one) or _is_null(other)))
    return "null" in (one, other) or one == other


def _shown(feature: Feature) -> str:
    if isinstance(feature, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in sorted(feature.items())) + "}"
    if isinstance(feature, list):
        return f"{feature[1]}" if len(feature) > 1 else f"list<{_shown(feature[0])}>"
    return feature
