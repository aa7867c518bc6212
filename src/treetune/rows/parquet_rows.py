"""The rows of a parquet file, read on demand: a row group at a time, the last few of which are kept.

    rows = ParquetRows("train.parquet")
    len(rows), rows[5]

A file of any size costs `KEPT` bytes of memory, or one row group where that is larger. A row comes as `read_rows` gives
it: without keys that are null, and with JSON text parsed.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import StorageError, TasksetError
from treetune.rows.arrow_values import json_fields_of, to_rows
from treetune.rows.reading import BUFFER
from treetune.rows.round_trip import parse_json_fields
from treetune.rows.sources import Batch, Row

if TYPE_CHECKING:
    import pyarrow as pa

KEPT = 64 << 20
"""Bytes of row groups that are kept in memory."""

TOGETHER = 64
"""Rows that are made together where they are asked for one after the other."""


class ParquetRows:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._opened: tuple[int, Any] | None = None
        self._ends: list[int] = []
        self._json_fields: list[str] = []
        self._groups: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._next = 0
        self._ahead: dict[int, Row] = {}
        """Rows that were made with the one before them; each is given once, for its values can be changed."""

    def __len__(self) -> int:
        with self._lock:
            self._open()
            return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        with self._lock:
            file = self._open()
            if not 0 <= number < (self._ends[-1] if self._ends else 0):
                raise IndexError(number)
            if number not in self._ahead:
                count = TOGETHER if number == self._next and number else 1
                self._ahead = {number + place: row for place, row in enumerate(self._make(file, number, count))}
            self._next = number + 1
            return self._ahead.pop(number)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def _open(self) -> Any:
        """The file, opened once in each process: a forked one must not share its position."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._opened is None or self._opened[0] != os.getpid():
            self._forget()
            try:
                file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=BUFFER)
            except (pa.ArrowException, OSError) as error:
                raise self._damage_error(error) from None
            sizes = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
            self._ends = list(accumulate(sizes))
            self._json_fields = json_fields_of(file.metadata.metadata)
            self._opened = os.getpid(), file
        return self._opened[1]

    def _make(self, file: Any, number: int, count: int) -> list[Row]:
        group = bisect_right(self._ends, number)
        first = self._ends[group - 1] if group else 0
        some = self._group(file, group).slice(number - first, count)
        rows = to_rows(some.schema.names, some.columns, some.num_rows)
        try:
            return [parse_json_fields(row, self._json_fields) for row in rows] if self._json_fields else rows
        except msgspec.DecodeError as error:
            raise self._damage_error(error) from None

    def _group(self, file: Any, number: int) -> pa.RecordBatch:
        import pyarrow as pa

        if number in self._groups:
            self._groups.move_to_end(number)
            return self._groups[number]
        try:
            table = file.read_row_group(number, use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise self._damage_error(error) from None
        self._groups[number] = table.to_batches()[0]
        while len(self._groups) > 1 and sum(group.nbytes for group in self._groups.values()) > KEPT:
            self._groups.popitem(last=False)
        return self._groups[number]

    def _damage_error(self, error: Exception) -> StorageError:
        return StorageError(f"{self.path} cannot be read as rows: {error}", remedy="write or build the file again")


class PackedRows(ParquetRows):
    """The rows of a file that `write_packed` wrote."""

    def _make(self, file: Any, number: int, count: int) -> list[Row]:
        return [unpack(row["row"]) for row in super()._make(file, number, count)]


def write_packed(batches: Iterable[Batch], path: Path) -> int:
    """Rows of any source as parquet that holds each in one value, exactly; gives their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, rows = pa.schema([("row", pa.binary())]), 0
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
        for batch in batches:
            packed = [pack_row(row, batch, position) for position, row in enumerate(batch.rows)]
            writer.write_table(pa.table({"row": pa.array(packed, pa.binary())}, schema=schema))
            rows += len(packed)
    return rows


# Values as MessagePack and back, exactly. It has no integers over 64 bits and no decimals: these are marked texts.

_INTEGER, _DECIMAL = 1, 2
_encoder = msgspec.msgpack.Encoder()


def pack_row(row: Any, batch: Batch, position: int) -> bytes:
    """A row of a batch, or a value of it."""
    try:
        return pack(row)
    except TypeError as error:
        raise TasksetError(f"{batch.place(position)}: {error}", remedy="leave that column out") from None


def pack(value: Any) -> bytes:
    return _encoder.encode(_mark(value))


def unpack(packed: bytes) -> Any:
    return _decoder.decode(packed)


def _mark(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _mark(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_INTEGER, b"%x" % value)
    return msgspec.msgpack.Ext(_DECIMAL, str(value).encode()) if isinstance(value, Decimal) else value


def _unmark(code: int, text: memoryview) -> Any:
    return int(bytes(text), 16) if code == _INTEGER else Decimal(str(text, "ascii"))


_decoder = msgspec.msgpack.Decoder(ext_hook=_unmark)
