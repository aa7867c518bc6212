"""Reads rows and tasks from any mix of files and hub datasets, with one batch in memory at a time.

    for task in read_tasks(["~/data/train.parquet", "more/*.jsonl", "openai/gsm8k@main:test"]): ...

Values are as they were written (see `arrow_values`). Errors name the file and the line or row (rows count from 0). JSON
holds one object per line, an array of objects, or one object. CSV values are text; an empty cell is an absent key, a
dot in a column name leads into a mapping (`extra_info.level`), and a cell of `prompt` or of a mapping may hold JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.core.task import Task
from treetune.data.arrow_values import arrow_rows, decode_json, drop_nulls, pause_gc
from treetune.data.rows.formats import Format, detect, format_named
from treetune.data.rows.row_codec import MAPPINGS
from treetune.data.sources.files import (
    Cells,
    check_cells,
    decode_row,
    iter_records,
    open_parquet,
    rows_within,
    take_within,
)
from treetune.data.sources.loading import open_named
from treetune.data.sources.names import (
    BATCH,
    Batch,
    File,
    FileKind,
    HubName,
    ReadError,
    Row,
    Sources,
    find,
)
from treetune.errors import NetworkError, TreetuneError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

OnFault = Callable[[int, str], None]
"""Called with the number of a faulty row and the problem."""


def read_rows(sources: Sources) -> Iterator[Row]:
    """Read rows as they are in the files, without keys that are null."""
    for batch in chain.from_iterable(map(batches_of, find(sources))):
        yield from batch.rows


def read_tasks(sources: Sources, format: str | None = None) -> RowTasks:
    """Read the tasks of trainers' rows. Without a format, each row's columns determine its format."""
    return RowTasks(_read_tasks(sources, None if format is None else format_named(format)))


class RowTasks(chain[Task]):
    """Tasks from rows, which already say how they are scored."""


def _read_tasks(sources: Sources, format: Format | None) -> Iterator[Task]:
    for batch in chain.from_iterable(map(batches_of, find(sources))):
        for position, row in enumerate(batch.rows):
            try:
                yield (format or detect(row)).task_of_pruned(row)
            except TreetuneError as error:
                raise type(error)(f"{batch.place(position)}: {error.message}", remedy=error.remedy) from None


def read_tables(sources: Sources) -> Iterator[pa.Table]:
    """Read rows as Arrow tables. The schema's metadata lists the fields that are JSON text because no Arrow type holds
    their values."""
    import pyarrow as pa

    from treetune.data.rows.parquet import table_of

    for source in find(sources):
        if isinstance(source, File) and source.kind is FileKind.PARQUET:
            for batch in _parquet_batches(source.path):
                yield pa.Table.from_batches([batch])
        else:
            for rows in batches_of(source):
                yield table_of(rows.rows, truths="text")


def batches_of(source: File | HubName) -> Iterator[Batch]:
    """Read rows in batches that know their place in the source."""
    if isinstance(source, HubName):
        return hub_batches(source)
    return _read_parquet(source.path) if source.kind is FileKind.PARQUET else text_batches(source)


# Parquet and the hub


def _read_parquet(path: Path) -> Iterator[Batch]:
    try:
        yield from _number_rows(str(path), map(arrow_rows, _parquet_batches(path)))
    except msgspec.DecodeError as error:
        raise ReadError(f"{path} has text that should be JSON: {error}") from None


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with open_parquet(path) as file:
        # Threads cost more than they gain next to Python.
        for batch in file.iter_batches(rows_within(file, BATCH), use_threads=False):
            yield batch.replace_schema_metadata(file.metadata.metadata)


def _number_rows(name: str, batches: Iterable[list[Row]]) -> Iterator[Batch]:
    first = 0
    for rows in batches:
        yield Batch(name, "row", range(first, first + len(rows)), rows)
        first += len(rows)


def hub_batches(source: HubName) -> Iterator[Batch]:
    try:
        opened = open_named(source)
    except NetworkError as error:
        raise NetworkError(f"{source.name!r} is not a file here: {error.message}", remedy=error.remedy) from error
    except TreetuneError as error:
        raise UsageError(
            f"{source.name!r} is neither a file here nor a dataset on the hub: {error.message}",
            remedy="a dataset is named name[@config][:split], and its split is train by default",
        ) from error
    for flaw in opened.find_changes():
        warnings.warn(f"{source.name}: {flaw}", stacklevel=2)
    tables = opened.batches()
    lists = (
        [drop_nulls(some)] if isinstance(some, list) else map(arrow_rows, some.to_batches(BATCH)) for some in tables
    )
    yield from _number_rows(source.name, chain.from_iterable(lists))


# JSON and CSV


def text_batches(file: File, *, on_fault: OnFault | None = None) -> Iterator[Batch]:
    """Read the rows of a JSON, JSON lines or CSV file.

    With `on_fault`, faulty rows are skipped and the others keep their nulls. A repeated key in a mapping is then a
    fault too, because trainers' loaders refuse it.
    """
    path = file.path
    decode: Callable[[Any], Row] = _decode if on_fault is None else _decode_written
    if file.kind is FileKind.CSV:
        decode = _decode_cells
    try:
        unit, records = iter_records(file)
        while some := take_within(records, BATCH, lambda record: len(record[1])):
            rows: dict[int, Row] = {}
            with pause_gc():
                for number, record in some:
                    try:
                        rows[number] = decode(record)
                    except ValueError as error:  # includes DecodeError and UnicodeDecodeError
                        if on_fault is None:
                            raise ReadError(f"{path}, {unit} {number}: {error}") from None
                        on_fault(number, str(error))
                yield Batch(str(path), unit, list(rows), list(rows.values()))
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror or error}") from None


def _decode(text: bytes) -> Row:
    row = decode_row(text)
    return drop_nulls(row) if b"null" in text else row


def _decode_written(text: bytes) -> Row:
    """Decode a row with its nulls; refuse what trainers' loaders would refuse."""
    row = decode_row(text)
    _read_pairs(text.decode())
    return row


def _refuse_twice(items: list[tuple[str, Any]]) -> None:
    """Raise ValueError if a mapping has a key twice."""
    names = [name for name, _ in items]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in a mapping")


_read_pairs = json.JSONDecoder(object_pairs_hook=_refuse_twice).decode  # `json.loads` would make a decoder per row


def _decode_cells(record: Cells) -> Row:
    names, cells = record[0], check_cells(record)
    row: Row = {}
    for name, cell in zip(names, cells, strict=True):
        head, dot, key = name.partition(".")
        if cell and dot and head in MAPPINGS:
            inner = row.setdefault(head, {})
            if isinstance(inner, dict):
                inner[key] = cell
        elif cell:
            row[name] = _csv_value(name, cell) if name == "prompt" or name in MAPPINGS else cell
    return row


def _csv_value(name: str, cell: str) -> Any:
    """Return a cell's value: parsed JSON if its column holds a mapping or messages, else its text."""
    try:
        value = drop_nulls(decode_json(cell))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return cell
    if name == "prompt":
        messages = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
        return value if messages else cell
    return value if isinstance(value, dict) else cell
