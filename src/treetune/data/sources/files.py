"""Opens files of parquet, JSON, JSON lines and CSV; rows of text formats are returned undecoded.

    unit, records = iter_records(File(path, FileKind.LINES))
    for number, text in records: decode_row(text)

All files are read here, for trainers' rows and for the tables that tasks are built from. Errors name the file and the
line or row.

A CSV column holds numbers or booleans only if every cell prints back exactly as written: `5` is a number, while `007`,
`1.50`, `+5`, `1e5` or `true` turn their column into text. An empty cell is None in any column; no other text means
null. Whole numbers over 64 bits stay text.
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
"""Bytes of JSON lines to decode at a time."""

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_lines = msgspec.json.Decoder(dict[str, Any]).decode_lines
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode_lines
_BOM = b"\xef\xbb\xbf"

BUFFER = 1 << 20
"""Bytes of a parquet column to read at a time."""

TOGETHER_BYTES = 64 << 20
"""Approximate bytes of rows in memory at a time."""

T = TypeVar("T")

TextRecords = Iterator[tuple[int, Any]]
"""Undecoded rows, each with its line or row number: JSON, or column names and cells."""


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Reading ahead would keep everything that was read in memory until the end.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
            refuse_several(file.schema_arrow.names, path)
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ReadError(f"{path} cannot be read as parquet: {error}") from None


def rows_within(file: Any, most: int) -> int:
    """Return how many rows of a parquet file to read at a time: fewer than `most` if they are large, as images are."""
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    size: int = sum(group.total_byte_size for group in groups) // max(1, file.metadata.num_rows)
    return max(1, min(most, TOGETHER_BYTES // max(1, size)))


def take_within(items: Iterator[T], most: int, size_of: Callable[[T], int]) -> list[T]:
    """Take the next items: at most this many, and fewer once they are large together."""
    taken: list[T] = []
    total = 0
    for item in items:
        taken.append(item)
        total += size_of(item)
        if len(taken) >= most or total >= TOGETHER_BYTES:
            break
    return taken


def iter_records(file: File, layout: Layout | None = None) -> tuple[str, TextRecords]:
    """Return the rows of a JSON or CSV file, and whether their numbers count lines or rows."""
    path, layout = file.path, layout or Layout()
    if file.kind is FileKind.CSV:
        return "row", _iter_cells(path, layout)
    if layout.field is None and (file.kind is FileKind.LINES or holds_lines(path, layout)):
        return "line", _iter_lines(path, layout)
    return "row", _iter_document(path, layout)


def holds_lines(path: Path, layout: Layout = Layout()) -> bool:  # noqa: B008 - it is never changed
    """Whether a `.json` file has an object on each line: its first line is a complete object, and more follows."""
    first, second = (*(text for _, text in islice(_iter_lines(path, layout), 2)), b"", b"")[:2]
    if not second or not first.lstrip().startswith(b"{"):
        return False
    try:
        decode_row(first)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _iter_lines(path: Path, layout: Layout) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
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
    """Yield the rows of JSON lines in blocks, several times faster than line by line. Without `values`, only the keys
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
            # Otherwise there are blank lines, or a line is not an object.
            yield rows if len(rows) == lines else _decode_each(path, first, text.split(b"\n"))
            first += lines


def _decode_each(path: Path, first: int, lines: list[bytes]) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(lines, first):
        if line and not line.isspace():
            try:
                rows.append(decode_row(line))
            except ValueError as error:  # includes DecodeError and UnicodeDecodeError
                raise ReadError(f"{path}, line {number}: {error}") from None
    return rows


def _iter_document(path: Path, layout: Layout) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a JSON array, or the single row. The file is read whole: only its end shows whether an array is
    valid."""
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
    """Return the rows under one key of a document: a list of rows, or a list per column."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ReadError(f"{path}: {error}") from None
    if not isinstance(document, dict) or field not in document:
        keys = ", ".join(document) if isinstance(document, dict) else "it is not a mapping"
        raise ReadError(f"{path} has no key {field!r} ({keys})", remedy="check loading_params.kwargs.field")
    found = document[field]
    if isinstance(found, dict) and found and all(isinstance(values, list) for values in found.values()):
        if len({len(values) for values in found.values()}) > 1:
            raise ReadError(f"{path}: the lists below {field!r} do not have the same length")
        found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    return json.dumps(found).encode()


def decode_row(text: bytes) -> Row:
    """Decode a JSON row as Python's `json` reads it."""
    try:
        return _decode_object(text)
    except msgspec.DecodeError:
        row = _decode_leniently(text)
        if not isinstance(row, dict):
            raise
        return row


def _decode_leniently(text: bytes) -> Any:
    """Decode JSON with numbers that only Python's `json` reads (NaN, Infinity, 1e999). None if something else is
    wrong."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None


Cells = tuple[list[str], list[str]]
"""The column names, and the cells of one row."""

csv.field_size_limit(1 << 30)  # the default limit makes a cell of 128 KB an error


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
    """Return the cells of a row; raises ValueError if their number differs from that of the columns."""
    names, cells = record
    if len(cells) != len(names):
        raise ValueError(
            f"{len(cells)} cells, but only {len(names)} columns have a name: text with commas needs quotes"
        )
    return cells


def refuse_encoding(path: str | Path, error: UnicodeDecodeError) -> ReadError:
    remedy = "convert it (`iconv -f latin1 -t utf-8`), or set loading_params.kwargs.encoding"
    return ReadError(f"{path} is not UTF-8 text: {error}", remedy=remedy)


def refuse_several(names: list[str], path: str | Path) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ReadError(f"{path} has several columns {', '.join(twice)}")


# CSV types

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

CellReader = Callable[[str], Any]


def _read_boolean(cell: str) -> bool:
    return cell == "True"


def _reader_of(cell: str) -> CellReader:
    """Return the reader for which a cell prints back identically."""
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
    """The types of columns by name, over all rows seen so far."""

    def __init__(self) -> None:
        self._readers: dict[str, CellReader] = {}
        self._names: list[str] | None = None
        self._open: list[tuple[int, str]] = []
        """The columns of these names that may still turn out to be text."""

    def look_at(self, names: list[str], cells: Sequence[str]) -> None:
        """Update the types from one more row."""
        if names is not self._names:  # from another file
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
