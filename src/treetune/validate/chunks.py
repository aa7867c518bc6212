"""The rows of a file a chunk at a time, whatever is wrong with it: what cannot be read is a finding, the rest goes on.

Parquet comes as Arrow, which can be screened; JSON comes as rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treetune.errors import TreetuneError, UsageError
from treetune.rows.arrow_values import drop_nulls, json_fields_of, pause_gc, to_rows
from treetune.rows.reading import hub_batches, text_batches
from treetune.rows.round_trip import parse_json_fields
from treetune.rows.sources import Batch, File, HubName, Kind, Row
from treetune.validate.arrays import taken
from treetune.validate.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

SIZE = 16_384
"""Rows of a chunk of parquet: what is fastest and small."""
BUFFER = 1 << 20
"""Bytes that are read of a column at a time."""


class Chunk(NamedTuple):
    file: str
    unit: str
    numbers: Sequence[int]
    rows: list[Row] | None
    """Of JSON, without nulls."""
    given: Sequence[Row] = ()
    """The same with the nulls that were written: `datasets` makes something of them."""
    table: pa.RecordBatch | None = None
    json_fields: Sequence[str] = ()

    def rows_at(self, positions: np.ndarray[Any, Any], *, as_written: bool = False) -> list[Row]:
        """Some of the rows, as Python values without nulls.

        As trainers see them: what no parquet column holds is JSON text. `as_written`: as Treetune reads them.
        """
        if self.rows is not None:
            return [self.rows[position] for position in positions]
        if self.table is None or not len(positions):
            return []
        some = self.table if len(positions) == self.table.num_rows else taken(self.table, positions)
        with pause_gc():
            rows = to_rows(some.schema.names, some.columns, some.num_rows)
            if as_written and self.json_fields:
                rows = [parse_json_fields(row, self.json_fields) for row in rows]
            return rows


def readable_batches(sources: Iterable[File | HubName]) -> Iterator[Batch]:
    """The rows of all sources that can be read; what cannot is told by `validate`."""
    for source in sources:
        for chunk in chunks_of(source, Report(), quick=False):
            rows = chunk.rows_at(np.arange(len(chunk.numbers)), as_written=True)
            yield Batch(chunk.file, chunk.unit, chunk.numbers, rows)


def chunks_of(source: File | HubName, report: Report, *, quick: bool) -> Iterator[Chunk]:
    """The chunks of one source; what cannot be read is told to the report."""
    name = str(source)
    count = 0
    try:
        for chunk in _chunks(source, report, quick):
            count += len(chunk.numbers)
            yield chunk
    except UsageError:  # a dataset that the hub does not have
        raise
    except Exception as error:  # whatever a damaged file makes a reader raise
        message = error.message if isinstance(error, TreetuneError) else f"{error}"
        report.add("unreadable", name, f"after {count:,} rows: {message}" if count else message)
        return
    if not count and not any(rule == "unreadable" and file == name for rule, file in report.by_place):
        report.add("no-rows", name, "no rows")


def _chunks(source: File | HubName, report: Report, quick: bool) -> Iterator[Chunk]:
    if isinstance(source, File) and source.kind is Kind.PARQUET:
        yield from _parquet(source.path, report, quick)
        return
    name = str(source)
    if isinstance(source, HubName):
        batches = hub_batches(source)
    else:
        if source.kind is Kind.CSV:
            report.add("unreadable", name, "trainers read no rows from CSV; `treetune convert` writes parquet of it")
        unit = "line" if source.kind is Kind.LINES else "row"
        batches = text_batches(source, on_fault=lambda number, why: report.add("unreadable", name, why, [number], unit))
    for batch in batches:
        yield Chunk(name, batch.unit, batch.numbers, drop_nulls(batch.rows), batch.rows)


def _parquet(path: Path, report: Report, quick: bool) -> Iterator[Chunk]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
        names = file.schema_arrow.names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TreetuneError(f"it has several columns {', '.join(twice)}")
        metadata = file.metadata.metadata
        fields = json_fields_of(metadata)
        wanted = _cheap(_leaves(file)) if quick else None
        first = 0
        for batch in file.iter_batches(SIZE, columns=wanted, use_threads=False):
            places = range(first, first + batch.num_rows)
            first += batch.num_rows
            batch, numbers = _readable(batch, places, str(path), report)
            yield Chunk(str(path), "row", numbers, None, (), batch, fields)


def _leaves(file: Any) -> list[str]:
    return [file.schema.column(number).path for number in range(len(file.schema))]


def _cheap(leaves: list[str]) -> list[str]:
    """The leaves of a file that rules read which need no contents."""
    found = []
    for column, mine in groupby(leaves, lambda leaf: leaf.partition(".")[0]):
        if column in _UNREAD:
            continue
        all_of_it = list(mine)
        wanted = [leaf for leaf in all_of_it if _CHEAP[column] in leaf] if column in _CHEAP else all_of_it
        # Any leaf tells whether a column is there.
        found += wanted or all_of_it[:1]
    return found


_CHEAP = {
    "prompt": ".role",
    "reward_spec": ".ground_truth",
    "reward_model": ".ground_truth",
    "extra_info": "extra_info.max_turns",
}
"""What is read of a column without contents."""
_UNREAD = ("data_source", "ability")


def _readable(
    batch: pa.RecordBatch, numbers: Sequence[int], file: str, report: Report
) -> tuple[pa.RecordBatch, Sequence[int]]:
    """A batch without the rows whose text is no UTF-8: parquet does not look, and readers of values fail there."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
        return batch, numbers
    except pa.ArrowInvalid as error:
        cause = str(error)
    good = []
    for position in range(batch.num_rows):
        try:
            batch.slice(position, 1).validate(full=True)
            to_rows(batch.schema.names, batch.slice(position, 1).columns, 1)
            good.append(position)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            report.add("unreadable", file, cause.partition("\n")[0], [numbers[position]])
    return batch.take(pa.array(good, pa.int64())), [numbers[position] for position in good]
