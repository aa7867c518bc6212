"""Rows and tasks out of any mix of files and hub datasets, one batch in memory at a time.

    for task in read_tasks(["~/data/train.parquet", "more/*.jsonl", "openai/gsm8k@main:test"]): ...

Values are as they were written (see `values`); a fault is told with its file and line or row (rows count from 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from treetune.errors import NetworkError, TreetuneError, UsageError
from treetune.rows.arrow_values import json_value, pruned, rows_of, uncollected
from treetune.rows.batch import BATCH, Batch, ReadError, Row
from treetune.rows.csv_files import text_batches
from treetune.rows.format import FormatOf
from treetune.rows.round_trip import parsed
from treetune.rows.sources import File, HubName, Kind, Sources, find
from treetune.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

BUFFER = 1 << 20
"""Bytes of a column of parquet that are read at a time."""


def read_rows(sources: Sources, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows as they stand in the files, without keys that are null; of `columns` only, where given."""
    for batch in read_batches(sources, columns=columns):
        yield from batch.rows


def read_tasks(sources: Sources, format: str | None = None) -> RowTasks:
    """The tasks of trainers' rows. Without a format each row is in the one that has its columns."""
    return RowTasks(_tasks(sources, FormatOf(format)))


class RowTasks:
    """Tasks that come from rows: how they are scored stood there."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return self._tasks

    def __next__(self) -> Task:
        return next(self._tasks)


def _tasks(sources: Sources, formats: FormatOf) -> Iterator[Task]:
    for batch in read_batches(sources):
        for position, row in enumerate(batch.rows):
            try:
                yield formats.of(row).task_of_pruned(row)
            except TreetuneError as error:
                raise type(error)(f"{batch.place(position)}: {error.message}", remedy=error.remedy) from None


def read_tables(sources: Sources, *, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows as Arrow tables. Fields that are JSON text, because no Arrow type holds their values, are listed in the
    metadata of the schema."""
    import pyarrow as pa

    from treetune.rows.parquet import table_of

    for source in find(sources):
        if isinstance(source, File) and source.kind is Kind.PARQUET:
            for batch in _parquet_batches(source.path, columns):
                yield pa.Table.from_batches([batch])
        else:
            for rows in batches_of(source, columns):
                yield table_of(rows.rows)


def read_batches(sources: Sources, *, columns: Sequence[str] | None = None) -> Iterator[Batch]:
    """The rows in batches that know their places."""
    for source in find(sources):
        for batch in batches_of(source, columns):
            if batch.rows:
                yield batch


def batches_of(source: File | HubName, columns: Sequence[str] | None = None) -> Iterator[Batch]:
    if isinstance(source, File) and source.kind is Kind.PARQUET:
        return _parquet(source.path, columns)
    found = hub_batches(source) if isinstance(source, HubName) else text_batches(source)
    return found if columns is None else (_only(batch, columns) for batch in found)


def _only(batch: Batch, columns: Sequence[str]) -> Batch:
    return batch._replace(rows=[{name: row[name] for name in columns if name in row} for row in batch.rows])


# Parquet


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Batch]:
    first = 0
    for batch in _parquet_batches(path, columns):
        rows = _arrow_rows(batch)
        places = Batch(str(path), "row", range(first, first + len(rows)), rows)
        json_fields = json_fields_of(batch.schema.metadata)
        for position, row in enumerate(rows if json_fields else ()):
            try:
                parsed(row, json_fields)
            except msgspec.DecodeError as error:
                raise ReadError(f"{places.place(position)}: {', '.join(json_fields)} should be JSON: {error}") from None
        yield places
        first += len(rows)


def _parquet_batches(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffering ahead keeps what was read until the end; threads cost more than they give beside Python.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
            names = file.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise ReadError(f"{path} has several columns {', '.join(sorted(twice))}")
            wanted = None if columns is None else [name for name in columns if name in names]
            metadata = file.metadata.metadata
            for batch in file.iter_batches(BATCH, columns=wanted, use_threads=False):
                yield batch.replace_schema_metadata(metadata)
    except (pa.ArrowException, OSError) as error:
        raise ReadError(f"{path} cannot be read as parquet: {error}") from None


def _arrow_rows(batch: pa.RecordBatch) -> list[Row]:
    with uncollected():
        return rows_of(batch.schema.names, batch.columns, batch.num_rows)


def json_fields_of(metadata: dict[bytes, bytes] | None) -> list[str]:
    from treetune.rows.schema import JSON_FIELDS

    fields: list[str] = json_value((metadata or {}).get(JSON_FIELDS, b"[]"))
    return fields


# The hub


def hub_batches(source: HubName) -> Iterator[Batch]:
    from treetune.rows.hub_source import open_source

    try:
        opened = open_source(source.loading_params())
    except NetworkError as error:
        raise NetworkError(f"{source.name!r} is no file here: {error.message}", remedy=error.remedy) from error
    except TreetuneError as error:
        raise UsageError(
            f"{source.name!r} is no file here, and no dataset of the hub: {error.message}",
            remedy="a dataset is named name[@config][:split], and its split is train unless said otherwise",
        ) from error
    first = 0
    for batch in opened.batches():
        for rows in [pruned(batch)] if isinstance(batch, list) else _table_rows(batch):
            yield Batch(source.name, "row", range(first, first + len(rows)), rows)
            first += len(rows)


def _table_rows(table: pa.Table) -> Iterable[list[Row]]:
    return (_arrow_rows(batch) for batch in table.to_batches(BATCH))
