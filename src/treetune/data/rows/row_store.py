"""Random access to the rows of a source: parquet is read directly, JSON and hub rows from a store in the cache.

    ParquetRows("train.parquet")[5]
    store = RowStore.open(source, cache, prompt_key="prompt", env_class_key="env_class")
    prompt, others, uid = store.row(5)

`ParquetRows` reads one row group at a time and keeps the last few, up to `KEPT` bytes or one group. JSON can only be
read from its beginning, but a trainer reads single rows anywhere in a file. So a `RowStore` keeps each row as
MessagePack with its uid and its number in the source, under a key that depends on the source's content.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from treetune.core.task import UID_VERSION, uid_of
from treetune.data.arrow_values import arrow_rows, pause_gc
from treetune.data.rows import row_codec
from treetune.data.rows.cache import Cache, Sidecar, config_hash
from treetune.data.rows.formats import FORMATS, detect
from treetune.data.rows.reading import batches_of
from treetune.data.sources.files import BUFFER
from treetune.data.sources.loading import open_named
from treetune.data.sources.names import File, HubName, ReadError, Row
from treetune.errors import StorageError, TasksetError, TreetuneError, UsageError
from treetune.system.digest import digest

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
"""Version of the file layout."""

TOGETHER = 64
"""Rows that are read together. Few, because a training loop reads single rows from all over the file."""

CHUNK = 32
"""A pass over all rows keeps this many times more rows in memory."""

COLUMNS = ["prompt", "others", "uid", "number"]


class RowStore:
    def __init__(self, path: Path, source: str, rows: int, unit: str, without_env_class: int) -> None:
        self.path, self.source, self.rows, self.without_env_class = path, source, rows, without_env_class
        self.chunks = -(-rows // (CHUNK * TOGETHER))
        self._unit = unit

    @classmethod
    def open(cls, source: File | HubName, cache: Cache, *, prompt_key: str, env_class_key: str) -> Self:
        """Open the store of a source; write it if the cache has none."""
        name, identity = str(source), _identify(source, cache)
        config = {"prompt_key": prompt_key, "env_class_key": env_class_key, "version": [VERSION, UID_VERSION]}
        key = f"rows_{config_hash(config, {'content': identity})}"

        def build(path: Path) -> Sidecar:
            found = _write(path, source, prompt_key, env_class_key)
            if _identify(source, cache) != identity:
                raise ReadError(f"{name} changed while it was read", remedy="try again when it is complete")
            return Sidecar(config={**config, **found}, source=name, rows=found["rows"], fingerprint=identity)

        sidecar, _ = cache.get_or_build(key, build)
        known = sidecar.config
        return cls(cache.path(key), name, sidecar.rows, known["unit"], known["without_env_class"])

    def row(self, number: int) -> tuple[Any, Row, str]:
        """Return the prompt, the other columns, and the uid: the row's own, or else that of its task."""
        prompt, others, uid, _ = self._read(number)
        return unpack(prompt), unpack(others), uid.decode()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        """Return a row with its prompt in the column `prompt`."""
        prompt, others, _ = self.row(number)
        return others if prompt is None else {"prompt": prompt, **others}

    def place(self, number: int) -> str:
        return f"{self.source}, {self._unit} {int(self._read(number)[-1])}"

    def prompts(self, first: int = 0) -> Iterator[list[Any]]:
        """Yield the prompts of each chunk, starting at `first`."""
        for values in self._column("prompt", first):
            with pause_gc():
                yield list(map(unpack, values))

    def uids(self) -> Iterator[bytes]:
        for values in self._column("uid"):
            yield from values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def _column(self, name: str, chunk: int = 0) -> Iterator[list[bytes]]:
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            options = pa.ipc.IpcReadOptions(included_fields=[COLUMNS.index(name)])
            reader = pa.ipc.open_file(file, options=options)
            for first in range(chunk * CHUNK, reader.num_record_batches, CHUNK):
                batches = map(reader.get_batch, range(first, min(first + CHUNK, reader.num_record_batches)))
                yield [value for batch in batches for value in batch.column(0).to_pylist()]

    @cached_property
    def _file(self) -> Any:
        """The file; forked processes may share it, because every read names its position."""
        import pyarrow as pa

        return pa.ipc.open_file(pa.OSFile(str(self.path)))

    def _read(self, number: int) -> list[bytes]:
        """Read the values of a row."""
        with _name_damage(self.path):
            batch = self._file.get_batch(number // TOGETHER)
        return [column[number % TOGETHER].as_py() for column in batch.columns]


def _identify(source: File | HubName, cache: Cache) -> str:
    """Return a key for the content of a source."""
    if isinstance(source, HubName):
        opened = open_named(source)
        return f"{source} {opened.revision} {opened.fingerprint}"
    try:
        # The kind is part of the key: the same bytes may be rows as .json, and not as .jsonl.
        return f"{source.kind} {cache.hash_content(source.path)}"
    except OSError as error:
        raise ReadError(f"{source} cannot be read: {error.strerror}") from None


def _write(path: Path, source: File | HubName, prompt_key: str, env_class_key: str) -> dict[str, Any]:
    """Write the rows of a source; return what a store needs to know about it."""
    import pyarrow as pa

    found: dict[str, Any] = {"rows": 0, "unit": "row", "without_env_class": 0}

    def pack_rows() -> Iterator[tuple[bytes, ...]]:
        for batch in batches_of(source):
            found["unit"] = batch.unit
            found["rows"] += len(batch.rows)
            for position, (row, number) in enumerate(zip(batch.rows, batch.numbers, strict=True)):
                found["without_env_class"] += row.get(env_class_key) is None
                uid = row_uid(row, prompt_key, env_class_key).encode()
                try:
                    prompt = pack(row.pop(prompt_key, None))
                    yield prompt, pack(row), uid, b"%d" % number
                except TypeError as error:
                    raise TasksetError(f"{batch.place(position)}: {error}", remedy="leave that column out") from None

    packed, schema = pack_rows(), pa.schema([(name, pa.binary()) for name in COLUMNS])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        while some := _take(packed, CHUNK * TOGETHER):
            table = pa.record_batch(list(map(_make_array, zip(*some, strict=True))), schema=schema)
            for first in range(0, len(some), TOGETHER):
                writer.write_batch(table.slice(first, TOGETHER))
    return found


def row_uid(row: Row, prompt_key: str = "prompt", env_class_key: str = "env_class") -> str:
    """Return a row's identity: the uid that it has, or else that of its task."""
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    given = extra.get("uid")
    if isinstance(given, str | int) and not isinstance(given, bool) and given != "":
        return str(given)
    prompt, env_class, spec = row.get(prompt_key), row.get(env_class_key), row.get("reward_spec")
    plain = isinstance(env_class, str) and env_class != row_codec.SCORED and row_codec.KEY not in extra
    if plain and isinstance(prompt, list) and isinstance(spec, dict):
        # Without building the task.
        return uid_of(prompt, spec, env_class)
    named = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    named |= {name: value for name, value in (("prompt", prompt), ("env_class", env_class)) if value is not None}
    try:
        try:
            format = detect(named)
        except UsageError:
            format = FORMATS["skyrl"]
        return format.task_of_pruned(named).uid
    except (TreetuneError, TypeError):  # not a task: reading the prompt reports the problem
        return digest(repr(row))


def _take(packed: Iterator[Any], count: int) -> list[Any]:
    with pause_gc():
        return list(islice(packed, count))


def _make_array(values: Sequence[bytes]) -> pa.Array:
    """Build an array without `pa.array`, which imports pandas: 40 MB and half a second."""
    import pyarrow as pa

    ends = array("i", accumulate(map(len, values), initial=0))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


KEPT = 64 << 20
"""Bytes of row groups to keep in memory."""


class ParquetRows:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self.groups: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._next = 0
        self._ahead: dict[int, Row] = {}
        """Rows that were built together with an earlier row. Each is returned once, because callers may change its
        values."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetRows, (self.path,)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        with self._lock:
            if not 0 <= number < len(self):
                raise IndexError(number)
            if number not in self._ahead:
                count = TOGETHER if number == self._next and number else 1
                self._ahead = {number + place: row for place, row in enumerate(self._make(number, count))}
            self._next = number + 1
            return self._ahead.pop(number)

    @cached_property
    def _file(self) -> Any:
        """The file; forked processes may share it, because every read names its position."""
        import pyarrow.parquet as pq

        with _name_damage(self.path):
            return pq.ParquetFile(self.path, pre_buffer=False, buffer_size=BUFFER)

    @cached_property
    def _ends(self) -> list[int]:
        """The number of rows up to the end of each row group."""
        sizes = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        return list(accumulate(sizes)) or [0]

    def _make(self, number: int, count: int) -> list[Row]:
        group = bisect_right(self._ends, number)
        first = self._ends[group - 1] if group else 0
        with _name_damage(self.path):
            return arrow_rows(self._group(group).slice(number - first, count))

    def _group(self, number: int) -> pa.RecordBatch:
        if number not in self.groups:
            table = self._file.read_row_group(number, use_threads=False).combine_chunks()
            self.groups[number] = table.replace_schema_metadata(self._file.metadata.metadata).to_batches()[0]
        self.groups.move_to_end(number)
        while len(self.groups) > 1 and sum(group.nbytes for group in self.groups.values()) > KEPT:
            self.groups.popitem(last=False)
        return self.groups[number]


@contextmanager
def _name_damage(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, msgspec.DecodeError) as error:
        problem = f"{path} cannot be read as rows: {error}"
        raise StorageError(problem, remedy="write or build the file, or make the dataset again") from None


# Values to MessagePack and back, exactly. MessagePack has no integers over 64 bits and no decimals, so these become
# marked texts.

_INTEGER, _DECIMAL = 1, 2
_encoder = msgspec.msgpack.Encoder()


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
