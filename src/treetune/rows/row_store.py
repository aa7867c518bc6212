"""Any row of a source, at once: of parquet as the file has it, of JSON and the hub from a store in the cache.

    ParquetRows("train.parquet")[5]
    store = RowStore.open(source, cache, prompt_key="prompt", env_class_key="env_class")
    prompt, others, uid = store.row(5)

`ParquetRows` reads a row group at a time and keeps the last few: a file of any size costs `KEPT` bytes of memory, or
one row group where that is larger. A row comes as `read_rows` gives it.

JSON is read from its beginning, and a trainer that wants one row here and one there cannot wait for row groups of
thousands. So a `RowStore` keeps each row as MessagePack, with its uid and its number in the source. Its key is the
content of the source.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from treetune.errors import StorageError, TasksetError
from treetune.rows.arrow_values import json_fields_of, pause_gc, to_rows
from treetune.rows.cache import Cache, Sidecar, config_hash, content_hash
from treetune.rows.formats import row_uid
from treetune.rows.loading import open_source
from treetune.rows.reading import BUFFER, batches_of
from treetune.rows.round_trip import parse_json_fields
from treetune.rows.sources import Batch, File, HubName, ReadError, Row

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
"""Of the file's layout and of how uids are made."""

TOGETHER = 64
"""Rows that are read together: few, for a training loop wants one here and one there."""

CHUNK = 32
"""Times as many are in memory in a pass over all of them."""

COLUMNS = ["prompt", "others", "uid", "number"]


class RowStore:
    def __init__(self, path: Path, source: str, rows: int, unit: str, without_env_class: int) -> None:
        self.path, self.source, self.rows, self.without_env_class = path, source, rows, without_env_class
        self.chunks = -(-rows // (CHUNK * TOGETHER))
        self._unit = unit
        self._opened: tuple[int, Any] | None = None

    @classmethod
    def open(cls, source: File | HubName, cache: Cache, *, prompt_key: str, env_class_key: str) -> Self:
        """The store of a source; written where the cache has none."""
        name, identity = str(source), _identify(source, cache)
        config = {"prompt_key": prompt_key, "env_class_key": env_class_key, "version": VERSION}
        key = f"rows_{config_hash(config, {'content': identity})}"

        def build(path: Path) -> Sidecar:
            found = _write(path, source, prompt_key, env_class_key)
            if _identify(source, cache) != identity:
                raise ReadError(f"{name} changed while it was read", remedy="try again when it is whole")
            return Sidecar(config={**config, **found}, source=name, rows=found["rows"], fingerprint=identity)

        sidecar, _ = cache.get_or_build(key, build)
        known = sidecar.config
        return cls(cache.path(key), name, sidecar.rows, known["unit"], known["without_env_class"])

    def row(self, number: int) -> tuple[Any, Row, str]:
        """The prompt, the other columns, and the uid that the row says or, where it says none, that of its problem."""
        prompt, others, uid, _ = self._read(number)
        return unpack(prompt), unpack(others), uid.decode()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        """A row whose prompt is in the column `prompt`."""
        prompt, others, _ = self.row(number)
        return others if prompt is None else {"prompt": prompt, **others}

    def place(self, number: int) -> str:
        return f"{self.source}, {self._unit} {int(self._read(number)[-1])}"

    def prompts(self, first: int = 0, step: int = 1) -> Iterator[list[Any]]:
        """The prompts of every `step`th chunk, from the `first` on."""
        for values in self._column("prompt", range(first, self.chunks, step)):
            with pause_gc():
                yield list(map(unpack, values))

    def uids(self) -> Iterator[bytes]:
        for values in self._column("uid", range(self.chunks)):
            yield from values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _column(self, name: str, chunks: range) -> Iterator[list[bytes]]:
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            options = pa.ipc.IpcReadOptions(included_fields=[COLUMNS.index(name)])
            reader = pa.ipc.open_file(file, options=options)
            for first in (chunk * CHUNK for chunk in chunks):
                batches = map(reader.get_batch, range(first, min(first + CHUNK, reader.num_record_batches)))
                yield [value for batch in batches for value in batch.column(0).to_pylist()]

    def _read(self, number: int) -> list[bytes]:
        """The values of a row. The file is opened once in each process: a forked one must not share its position."""
        import pyarrow as pa

        try:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), pa.ipc.open_file(pa.OSFile(str(self.path)))
            batch = self._opened[1].get_batch(number // TOGETHER)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(
                f"{self.path} is gone or damaged: {error}", remedy="delete it and make the dataset again"
            ) from None
        return [column[number % TOGETHER].as_py() for column in batch.columns]


def _identify(source: File | HubName, cache: Cache) -> str:
    """What the content of a source is."""
    if isinstance(source, HubName):
        opened = open_source(source.loading_params())
        return f"{source} {opened.revision} {opened.fingerprint}"
    try:
        # The kind counts: the same bytes may be rows as .json and none as .jsonl.
        return f"{source.kind} {content_hash(source.path, cache.folder / 'contents')}"
    except OSError as error:
        raise ReadError(f"{source} cannot be read: {error.strerror}") from None


def _write(path: Path, source: File | HubName, prompt_key: str, env_class_key: str) -> dict[str, Any]:
    """Writes the rows of a source; gives what a store knows of it."""
    import pyarrow as pa

    rows, without_env_class, unit = 0, 0, "row"
    waiting: list[tuple[bytes, ...]] = []
    schema = pa.schema([(name, pa.binary()) for name in COLUMNS])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:

        def write(count: int) -> None:
            table = pa.record_batch(list(map(_make_array, zip(*waiting[:count], strict=True))), schema=schema)
            for first in range(0, count, TOGETHER):
                writer.write_batch(table.slice(first, TOGETHER))
            del waiting[:count]

        for batch in batches_of(source):
            with pause_gc():
                without_env_class += sum(row.get(env_class_key) is None for row in batch.rows)
                waiting += _pack_rows(batch, prompt_key, env_class_key)
            rows, unit = rows + len(batch.rows), batch.unit
            if whole := len(waiting) // TOGETHER * TOGETHER:
                write(whole)
        if waiting:
            write(len(waiting))
    return {"rows": rows, "unit": unit, "without_env_class": without_env_class}


def _make_array(values: Sequence[bytes]) -> pa.Array:
    """Not by `pa.array`, which imports pandas: 40 MB and half a second."""
    import pyarrow as pa

    ends = array("i", accumulate(map(len, values), initial=0))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


def _pack_rows(batch: Batch, prompt_key: str, env_class_key: str) -> Iterator[tuple[bytes, ...]]:
    for position, (row, number) in enumerate(zip(batch.rows, batch.numbers, strict=True)):
        uid = row_uid(row, prompt_key, env_class_key).encode()
        prompt = row.pop(prompt_key, None)
        yield pack_row(prompt, batch, position), pack_row(row, batch, position), uid, b"%d" % number


KEPT = 64 << 20
"""Bytes of row groups that are kept in memory."""


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
