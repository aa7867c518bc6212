"""Files of parquet, JSON, JSON lines and CSV, opened: the rows of text are not decoded yet.

    unit, records = iter_records(File(path, FileKind.LINES))
    for number, text in records: decode_row(text)

All files are read here, for trainers' rows and for the tables that tasks are made of. An error names the file and the
line or row.

A CSV column holds numbers or booleans only where every cell prints back as it stands: `5` is a number, and `007`,
`1.50`, `+5`, `1e5` and `true` make text of their column. An empty cell is None in any column, and no other text is
taken for null. Whole numbers over 64 bits stay text, which is their digits.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treetune.data.sources.names import (
    File,
    FileKind,
    Layout,
    ReadError,
    Row,
    open_plain,
)

BLOCK = 1 << 20
"""Bytes of JSON lines that are decoded at a time."""

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_lines = msgspec.json.Decoder(dict[str, Any]).decode_lines
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode_lines
_BOM = b"\xef\xbb\xbf"

BUFFER = 1 << 20
"""Bytes of a column of parquet that are read at a time."""

TOGETHER_BYTES = 64 << 20
"""Bytes of rows that are in memory at a time, more or less."""

T = TypeVar("T")

TextRecords = Iterator[tuple[int, Any]]
"""Rows that are not decoded, each with the number of its line or row: JSON, or the names of columns and the cells."""


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffering ahead keeps what was read until the end.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
            refuse_several(file.schema_arrow.names, path)
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ReadError(f"{path} cannot be read as parquet: {error}") from None


def rows_within(file: Any, most: int) -> int:
    """How many rows of a parquet file are read at a time: fewer than `most` where they are large, as images are."""
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    size: int = sum(group.total_byte_size for group in groups) // max(1, file.metadata.num_rows)
    return max(1, min(most, TOGETHER_BYTES // max(1, size)))


def take_within(items: Iterator[T], most: int, size_of: Callable[[T], int]) -> list[T]:
    """The next items, at most so many, and no more once they are large together."""
    taken: list[T] = []
    total = 0
    for item in items:
        taken.append(item)
        total += size_of(item)
        if len(taken) >= most or total >= TOGETHER_BYTES:
            break
    return taken


def iter_records(file: File, layout: Layout | None = None) -> tuple[str, TextRecords]:
    """The rows of a file of JSON or CSV, and what their numbers count."""
    path, layout = file.path, layout or Layout()
    if file.kind is FileKind.CSV:
        return "row", _iter_cells(path, layout)
    if layout.field is None and (file.kind is FileKind.LINES or holds_lines(path, layout)):
        return "line", _iter_lines(path, layout)
    return "row", _iter_document(path, layout)


def holds_lines(path: Path, layout: Layout = Layout()) -> bool:  # noqa: B008 - it is never changed
    """Whether a `.json` file has an object on each line: the first is whole, and more follows."""
    first, second = (*(text for _, text in islice(_iter_lines(path, layout), 2)), b"", b"")[:2]
    if not second or not first.lstrip().startswith(b"{"):
        return False
    try:
        decode_row(first)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _iter_lines(path: Path, layout: Layout) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with open_plain(path) as file:
        lines: Iterable[bytes] = file
        if layout.encoding is not None:
            decoded = io.TextIOWrapper(file, encoding=layout.encoding, newline="\n")  # type: ignore[type-var]
            lines = map(str.encode, decoded)
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text and not text.isspace():
                yield number, text


def iter_line_blocks(path: Path, *, values: bool = True) -> Iterator[list[Row]]:
    """The rows of JSON lines, some at a time, several times faster than line by line; without `values` only the keys
    are decoded."""
    decode = _decode_lines if values else _decode_keys
    with open_plain(path) as file:
        first = 1
        while block := file.read(BLOCK):
            block += file.readline()
            lines = block.count(b"\n") + (not block.endswith(b"\n"))
            text = block.removeprefix(_BOM) if first == 1 else block
            try:
                rows = decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                rows = []
            # Else there are blank lines, or one that is no object.
            yield rows if len(rows) == lines else _decode_each(path, first, text.split(b"\n"))
            first += lines


def _decode_each(path: Path, first: int, lines: list[bytes]) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(lines, first):
        if line and not line.isspace():
            try:
                rows.append(decode_row(line))
            except ValueError as error:  # which a DecodeError and a UnicodeDecodeError are
                raise ReadError(f"{path}, line {number}: {error}") from None
    return rows


def _iter_document(path: Path, layout: Layout) -> Iterator[tuple[int, bytes]]:
    """The rows of a JSON array, or one row. Read whole: only its end shows whether an array is well-formed."""
    with open_plain(path) as file:
        content = file.read()
    if layout.encoding is not None:
        content = content.decode(layout.encoding).encode()
    content = content.removeprefix(_BOM)
    if not content.strip():
        raise ReadError(f"{path} is empty", remedy="an empty list of rows is []")
    if layout.field is not None:
        content = _encode_field(path, content, layout.field)
    if not content.lstrip().startswith(b"["):
        return iter([(0, content)])
    try:
        return enumerate(map(bytes, msgspec.json.decode(content, type=list[msgspec.Raw])))
    except msgspec.DecodeError as error:
        if (values := _decode_leniently(content)) is not None:
            return enumerate(json.dumps(value).encode() for value in values)
        _, _, byte = str(error).rstrip(")").rpartition("(byte ")
        line = f", line {content.count(bytes([10]), 0, int(byte)) + 1}" if byte.isdigit() else ""
        raise ReadError(f"{path}{line}: {error}") from None


def _encode_field(path: Path, content: bytes, field: str) -> bytes:
    """The rows below one key of a document: a list of them, or a list for each column."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ReadError(f"{path}: {error}") from None
    if not isinstance(document, dict) or field not in document:
        keys = ", ".join(document) if isinstance(document, dict) else "it is no mapping"
        raise ReadError(f"{path} has no key {field!r} ({keys})", remedy="look at loading_params.kwargs.field")
    found = document[field]
    if isinstance(found, dict) and found and all(isinstance(values, list) for values in found.values()):
        if len({len(values) for values in found.values()}) > 1:
            raise ReadError(f"{path}: the lists below {field!r} are not of one length")
        found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    return json.dumps(found).encode()


def decode_row(text: bytes) -> Row:
    """A row of JSON, as Python's `json` reads it."""
    try:
        return _decode_object(text)
    except msgspec.DecodeError:
        row = _decode_leniently(text)
        if not isinstance(row, dict):
            raise
        return row


def _decode_leniently(text: bytes) -> Any:
    """What JSON holds with numbers that only Python's `json` reads (NaN, Infinity, 1e999); None where something else
    is wrong with it."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None


Cells = tuple[list[str], list[str]]
"""The names of the columns, and what stands in one row."""

csv.field_size_limit(1 << 30)  # else a cell of 128 KB is an error


def _iter_cells(path: Path, layout: Layout) -> Iterator[tuple[int, Cells]]:
    with open_plain(path) as content:
        text = io.TextIOWrapper(content, encoding=layout.encoding or "utf-8-sig", newline="")  # type: ignore[type-var]
        lines = csv.reader(text, strict=True, delimiter=layout.delimiter, quotechar=layout.quotechar)
        try:
            first = next(lines, []) if layout.header else []
            names = layout.names or [name or f"Unnamed: {number}" for number, name in enumerate(first)]
            refuse_several(names, path)
            for number, cells in enumerate(lines):
                names = names or [str(place) for place in range(len(cells))]
                if cells:
                    yield number, (names, cells)
        except csv.Error as error:
            raise ReadError(f"{path} cannot be read as CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise refuse_encoding(path, error) from None


def check_cells(record: Cells) -> list[str]:
    """The cells of a row; raises ValueError where they are not as many as the columns."""
    names, cells = record
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells, where {len(names)} columns have a name: text with commas needs quotes")
    return cells


def refuse_encoding(path: str | Path, error: UnicodeDecodeError) -> ReadError:
    remedy = "convert it (`iconv -f latin1 -t utf-8`), or set loading_params.kwargs.encoding"
    return ReadError(f"{path} is no UTF-8 text: {error}", remedy=remedy)


def refuse_several(names: list[str], path: str | Path) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ReadError(f"{path} has several columns {', '.join(twice)}")


# Types of CSV

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

CellReader = Callable[[str], Any]


def _read_boolean(cell: str) -> bool:
    return cell == "True"


def _reader_of(cell: str) -> CellReader:
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
        self._readers: dict[str, CellReader] = {}
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

    def readers_of(self, names: Sequence[str]) -> list[CellReader]:
        return [self._readers.get(name, str) for name in names]
