"""The rows of one source, kept in a file of the cache from which any of them is read at once.

    store = RowStore.of(source, cache, prompt_key="prompt", env_class_key="env_class")
    store.row(5).prompt

Parquet is read in row groups of thousands and JSON from its beginning: neither gives one row out of a million. So a row
is kept as its packed values, with its uid and its number in the source. Where the source changes, its content is
another, and so is the key of its store.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from treetune.errors import StorageError, TasksetError
from treetune.rows.arrow_values import pause_gc
from treetune.rows.cache import Cache, Sidecar, config_hash
from treetune.rows.content import content_hash
from treetune.rows.layouts import row_uid
from treetune.rows.reading import read_batches
from treetune.rows.sources import Batch, File, HubName, ReadError, Row
from treetune.trainers.skyrl.packing import Packer, UnknownType, is_plain, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

Pack = Callable[[Any], bytes]

VERSION = 1
"""Of the file's layout and of how uids are made."""

TOGETHER = 64
"""Rows that are read together: few, for a training loop wants one here and one there."""

AT_ONCE = 2_000
"""Rows of a pass over all of them that are in memory at a time."""


class StoredRow(NamedTuple):
    prompt: Any
    others: Row
    """The other columns."""
    uid: str
    """As the row itself says or, where it says none, of its problem. Equal rows share it."""


class RowStore:
    def __init__(self, path: Path, source: str, unit: str, rows: int, unnamed: int) -> None:
        self.path, self.source, self.rows = path, source, rows
        self.unnamed = unnamed
        """Rows without an environment."""
        self._unit = unit
        self._opened: tuple[int, Any] | None = None

    @classmethod
    def of(cls, source: File | HubName, cache: Cache, *, prompt_key: str, env_class_key: str) -> Self:
        """The store of a source; read from it and kept where the cache has none."""
        name, identity = _identity(source, cache)
        config = {"prompt_key": prompt_key, "env_class_key": env_class_key, "version": VERSION}
        key = f"rows_{config_hash(config, {'content': identity})}"

        def build(path: Path) -> Sidecar:
            before = _state(source)
            found = _write(path, name, config, Packer(plain=is_plain(source)).pack)
            if _state(source) != before:
                raise ReadError(f"{name} changed while it was read", remedy="try again when it is whole")
            rows = found.pop("rows")
            return Sidecar(config={**config, **found}, source=name, rows=rows, fingerprint=identity)

        sidecar, _ = cache.get_or_build(key, build)
        return cls(cache.path(key), name, sidecar.config["unit"], sidecar.rows, sidecar.config["unnamed"])

    def row(self, number: int) -> StoredRow:
        batch = self._batch(number)
        prompt, others, uid = (batch.column(name)[number % TOGETHER].as_py() for name in ("prompt", "others", "uid"))
        return StoredRow(unpacked(prompt), unpacked(others), uid)

    def place(self, number: int) -> str:
        batch = self._batch(number)
        return f"{self.source}, {self._unit} {batch.column('number')[number % TOGETHER].as_py()}"

    def prompts(self) -> Iterator[list[Any]]:
        """All prompts, some at a time."""
        waiting: list[Any] = []
        for batch in self._columns("prompt"):
            with pause_gc():
                waiting += map(unpacked, batch.column(0).to_pylist())
            if len(waiting) >= AT_ONCE:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def uids(self) -> Iterator[str]:
        for batch in self._columns("uid"):
            yield from batch.column(0).to_pylist()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _columns(self, name: str) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        number = _schema().get_field_index(name)
        with pa.OSFile(str(self.path)) as file:
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[number]))
            for batch in range(reader.num_record_batches):
                yield reader.get_batch(batch)

    def _batch(self, number: int) -> pa.RecordBatch:
        """The batch with a row; the file is opened once in each process: a forked one must not share its position."""
        import pyarrow as pa

        try:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), pa.ipc.open_file(pa.OSFile(str(self.path)))
            return self._opened[1].get_batch(number // TOGETHER)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(
                f"{self.path} is gone or damaged: {error}", remedy="delete it and make the dataset again"
            ) from None


def _identity(source: File | HubName, cache: Cache) -> tuple[str, str]:
    """A source's name and what its content is."""
    if isinstance(source, File):
        try:
            # The kind counts: the same bytes may be rows as .json and none as .jsonl.
            return str(source.path), f"{source.kind} {content_hash(source.path, cache.folder / 'contents')}"
        except OSError as error:
            raise ReadError(f"{source.path} cannot be read: {error.strerror}") from None
    from treetune.rows.loading import open_source

    opened = open_source(source.loading_params())
    return str(source), f"{source} {opened.revision} {opened.fingerprint}"


def _state(source: File | HubName) -> Any:
    if isinstance(source, HubName):
        return None
    status = os.stat(source.path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([("prompt", pa.binary()), ("others", pa.binary()), ("uid", pa.string()), ("number", pa.int64())])


def _write(path: Path, name: str, config: dict[str, Any], pack: Pack) -> dict[str, Any]:
    import pyarrow as pa

    waiting: list[tuple[bytes, bytes, bytes, int]] = []
    rows, unnamed, unit = 0, 0, "row"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _schema()) as writer:

        def write(count: int) -> None:
            *texts, numbers = zip(*waiting[:count], strict=True)
            arrays = [_array(column, kind) for column, kind in zip(texts, _schema().types, strict=False)]
            numbered = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(array("q", numbers))])
            made = pa.record_batch([*arrays, numbered], schema=_schema())
            for first in range(0, count, TOGETHER):
                writer.write_batch(made.slice(first, TOGETHER))
            del waiting[:count]

        for batch in read_batches(name):
            with pause_gc():
                waiting += _packed(batch, config["prompt_key"], config["env_class_key"], pack)
                unnamed += sum(row.get(config["env_class_key"]) is None for row in batch.rows)
            rows, unit = rows + len(batch.rows), batch.unit
            if whole := len(waiting) // TOGETHER * TOGETHER:
                write(whole)
        if waiting:
            write(len(waiting))
    return {"rows": rows, "unit": unit, "unnamed": unnamed}


def _array(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """Not by `pa.array`, which imports pandas: 40 MB and half a second."""
    import pyarrow as pa

    ends = array("i", accumulate(map(len, values), initial=0))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


def _packed(batch: Batch, prompt_key: str, env_class_key: str, pack: Pack) -> Iterator[tuple[bytes, bytes, bytes, int]]:
    for position, (row, number) in enumerate(zip(batch.rows, batch.numbers, strict=True)):
        uid = row_uid(row, prompt_key, env_class_key).encode()
        try:
            yield pack(row.pop(prompt_key, None)), pack(row), uid, number
        except UnknownType as error:
            raise TasksetError(
                f"{batch.place(position)}: a value of type {error} cannot be kept", remedy="leave that column out"
            ) from None
