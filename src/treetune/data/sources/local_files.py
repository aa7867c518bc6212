"""Reads local JSON, JSON lines, CSV and parquet files without conversion: text stays text, numbers keep their value.

    files = LocalFiles("json", {"train": [Path("train.jsonl")]}, split="train[:10%]")
    files.columns, files.rows
    for batch in files.batches(): ...

Files are read twice, one batch at a time: first for the columns and the number of rows, then for the values. Rows are
Python values; parquet gives tables. CSV column types come from `CsvTypes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

from treetune.core.finding import Flaw
from treetune.data.arrow_values import arrow_rows, json_fields_of, pause_gc
from treetune.data.sources.files import (
    CsvTypes,
    check_cells,
    decode_row,
    holds_lines,
    iter_line_blocks,
    iter_records,
    open_parquet,
    refuse_encoding,
    rows_within,
    take_within,
)
from treetune.data.sources.names import (
    File,
    FileKind,
    Layout,
    ReadError,
    Row,
    format_called,
    known_kind,
    open_plain,
    spell_format,
    without_compression,
)
from treetune.data.sources.splits import Piece, parse_split
from treetune.errors import EmptyTasksetError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

SourceBatch = Union["pa.Table", list[Row]]

ROWS = 10_000
"""Rows per batch: enough to vectorise, few enough to stay small."""

KINDS = frozenset(("csv", "json", "parquet"))
"""Formats that are read here. A file of one format is never read as another."""


class LocalFiles:
    revision: str | None = None
    fingerprint = ""
    """Empty: the cache key already has the contents of the files."""

    def __init__(
        self,
        kind: str,
        files: Mapping[str, Sequence[Path]],
        split: str | None = None,
        layout: Layout | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """`files` are the files of each split. `columns`: for parquet, which to read."""
        self.kind, self._layout, self._wanted = kind, layout or Layout(), columns
        self._files = {name: [File(path, _shape(path, kind)) for path in paths] for name, paths in files.items()}
        if split is None and len(files) > 1:
            there_are = f"{kind!r} has several splits: {', '.join(files)}"
            raise UsageError(there_are, remedy="set loading_params.kwargs.split")
        self._pieces = parse_split(split or "all", files)
        self._types = CsvTypes()

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns by name with their types: Arrow types for parquet, otherwise `string` if the first rows hold text
        there."""
        names, first = self._scan[1], next(self.batches(), [])
        if not isinstance(first, list):
            return names
        kinds = {name: {type(row[name]) for row in first} - {type(None)} for name in names}
        return {name: "string" if kind == {str} else "other" for name, kind in kinds.items()}

    @property
    def rows(self) -> int:
        return sum(len(rows) for _, rows in self._ranges())

    def find_changes(self) -> list[Flaw]:
        return []

    def batches(self, size: int = ROWS) -> Iterator[SourceBatch]:
        """Yield the rows in order, at most this many at a time, each with every column."""
        counts = self._scan[0]
        for piece, rows in self._ranges():
            first = 0
            for file in self._files[piece.split]:
                count = counts[file]
                yield from self._read(file, range(max(0, rows.start - first), min(count, rows.stop - first)), size)
                first += count

    def _ranges(self) -> list[tuple[Piece, range]]:
        counts = self._scan[0]
        sizes = {split: sum(counts.get(file, 0) for file in files) for split, files in self._files.items()}
        return [(piece, piece.range_of(sizes[piece.split])) for piece in self._pieces]

    def _read(self, file: File, rows: range, size: int) -> Iterator[SourceBatch]:
        """Yield some rows of a file."""
        first = 0
        for batch in self._batches_of(file, size) if len(rows) else ():
            kept = slice(max(0, rows.start - first), max(0, rows.stop - first))
            first += len(batch)
            some = batch[kept] if isinstance(batch, list) else batch.slice(kept.start, kept.stop - kept.start)
            if len(some):
                yield some
            if first >= rows.stop:
                break

    def _batches_of(self, file: File, size: int) -> Iterator[SourceBatch]:
        with self._name_faults(file):
            if file.kind is FileKind.PARQUET:
                yield from self._parquet_batches(file, size)
                return
            blank: Row = dict.fromkeys(self._scan[1])
            batches = self._rows_of(file, size)
            while True:
                with pause_gc():
                    rows = [row if len(row) == len(blank) else {**blank, **row} for row in next(batches, ())]
                if not rows:
                    return
                yield rows

    def _rows_of(self, file: File, size: int) -> Iterator[list[Row]]:
        """Yield the rows of JSON or CSV without conversion, at most this many at a time."""
        if self._has_blocks(file):
            kept: list[Row] = []
            for rows in iter_line_blocks(file.path):
                kept += rows
                while len(kept) >= size:
                    yield kept[:size]
                    kept = kept[size:]
            if kept:
                yield kept
            return
        unit, records = iter_records(file, self._layout)
        while some := take_within(records, size, lambda record: len(record[1])):
            if file.kind is FileKind.CSV:
                yield self._convert_cells([cells for _, cells in some])
            else:
                yield [_decode(record, file, unit, number) for number, record in some]

    def _has_blocks(self, file: File) -> bool:
        return file.kind is FileKind.LINES and self._layout == Layout()

    def _convert_cells(self, records: list[tuple[list[str], list[str]]]) -> list[Row]:
        names = records[0][0]
        columns = [
            [cell or None for cell in cells] if reader is str else [reader(cell) if cell else None for cell in cells]
            for reader, cells in zip(
                self._types.readers_of(names), zip(*(cells for _, cells in records), strict=True), strict=True
            )
        ]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def _parquet_batches(self, file: File, size: int) -> Iterator[SourceBatch]:
        import pyarrow as pa

        columns = self._scan[1]
        with open_parquet(file.path) as opened:
            metadata = opened.metadata.metadata
            json_fields = json_fields_of(metadata) or _holds_json(opened.schema_arrow)
            wanted = [name for name in opened.schema_arrow.names if name in columns]
            for batch in opened.iter_batches(rows_within(opened, size), columns=wanted, use_threads=False):
                if json_fields:  # JSON text that stands for values
                    blank: Row = dict.fromkeys(columns)
                    yield [{**blank, **row} for row in arrow_rows(batch.replace_schema_metadata(metadata))]
                    continue
                table = pa.Table.from_batches([batch])
                for name in columns.keys() - set(wanted):
                    table = table.append_column(name, pa.nulls(len(table), columns[name]))
                yield table.select(list(columns))

    # The first pass

    @cached_property
    def _scan(self) -> tuple[dict[File, int], dict[str, Any]]:
        """Return the number of rows of each file, and the columns."""
        used = dict.fromkeys(piece.split for piece in self._pieces)
        counts: dict[File, int] = {}
        columns: dict[str, Any] = {}
        for file in (file for split in used for file in self._files[split]):
            if file not in counts:
                with self._name_faults(file):
                    counts[file] = self._scan_file(file, columns)
        if not sum(counts.values()):
            for file in counts:
                refuse_name(file.path, self.kind, f"{file} cannot be read as {self.kind}")
            name = next(iter(counts), "the source")
            raise EmptyTasksetError(f"{name} has no rows", remedy="give it rows, or leave it out of data_files")
        return counts, columns

    def _scan_file(self, file: File, columns: dict[str, Any]) -> int:
        """Add the columns of a file; return its number of rows."""
        if file.kind is FileKind.PARQUET:
            with open_parquet(file.path) as opened:
                schema = opened.schema_arrow
                for name in schema.names if self._wanted is None else self._wanted:
                    if name not in schema.names:
                        raise ReadError(f"{file} has no column {name!r}", remedy="check loading_params.kwargs.columns")
                    columns.setdefault(name, schema.field(name).type)
                rows: int = opened.metadata.num_rows
                return rows
        return self._scan_cells(file, columns) if file.kind is FileKind.CSV else self._scan_json(file, columns)

    def _scan_cells(self, file: File, columns: dict[str, Any]) -> int:
        count, names = 0, list[str]()
        unit, records = iter_records(file, self._layout)
        for number, record in records:
            count += 1
            names = record[0]
            try:
                self._types.look_at(names, check_cells(record))
            except ValueError as error:
                raise ReadError(f"{file}, {unit} {number}: {error}") from None
        columns |= dict.fromkeys(names)
        return count

    def _scan_json(self, file: File, columns: dict[str, Any]) -> int:
        count = 0
        for rows in iter_line_blocks(file.path, values=False) if self._has_blocks(file) else self._rows_of(file, ROWS):
            count += len(rows)
            keys = set().union(*rows)
            if not keys <= columns.keys():
                columns |= dict.fromkeys(key for row in rows for key in row if key not in columns)
        return count

    @contextmanager
    def _name_faults(self, file: File) -> Iterator[None]:
        """If a file cannot be read and its name suggests another kind, the error says so."""
        try:
            yield
        except ReadError as error:
            refuse_name(file.path, self.kind, error.message)
            raise
        except UnicodeDecodeError as error:
            raise refuse_encoding(file.path, error) from None
        except OSError as error:
            raise ReadError(f"{file} cannot be read: {error.strerror or error}") from None


def refuse_name(file: Path, kind: str, problem: str) -> None:
    """Raise if a file of one kind is named like one of another kind."""
    ending = without_compression(file).suffix[1:]
    if kind in KINDS and (meant := format_called(ending)) != kind and meant in KINDS:
        raise UsageError(problem, remedy=f"it is called {file.name}: write {spell_format(ending)}") from None


def _shape(path: Path, kind: str) -> FileKind:
    """Decide how to read a file, by its content. A .jsonl file is read by lines even if its first line is damaged."""
    if kind != "json":
        return FileKind(kind)
    try:
        with open_plain(path) as file:
            array = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError:
        array = False  # reported when the file is read
    lines = known_kind(path) is FileKind.LINES or holds_lines(path)
    return FileKind.LINES if lines and not array else FileKind.JSON


def _decode(record: bytes, file: File, unit: str, number: int) -> Row:
    try:
        if unit == "row" and record[:1] == b'"':  # a document may be a list of texts
            return {"text": msgspec.json.decode(record)}
        return decode_row(record)
    except ValueError as error:  # includes DecodeError and UnicodeDecodeError
        raise ReadError(f"{file}, {unit} {number}: {error}") from None


def _holds_json(schema: pa.Schema) -> bool:
    """Whether columns have Arrow's JSON type, which `datasets` writes for mixed types."""
    return any("arrow.json" in str(field.type) for field in schema)
