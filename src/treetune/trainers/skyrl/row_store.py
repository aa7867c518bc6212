"""The rows of one source, kept in a file of the cache from which any of them is read at once.

    store = RowStore.open(source, cache, prompt_key="prompt", env_class_key="env_class")
    prompt, others, uid = store.row(5)

Parquet is read in row groups of thousands and JSON from its beginning: neither gives one row out of a million. So each
row is kept as MessagePack, with its uid and its number in the source. The key of a store is the content of its source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from treetune.errors import StorageError
from treetune.rows.arrow_values import pause_gc
from treetune.rows.cache import Cache, Sidecar, config_hash
from treetune.rows.content import content_hash
from treetune.rows.layouts import row_uid
from treetune.rows.parquet_rows import pack_row, unpack
from treetune.rows.reading import read_batches
from treetune.rows.sources import Batch, File, HubName, ReadError, Row

VERSION = 2
"""Of the file's layout and of how uids are made."""

TOGETHER = 64
"""Rows that are read together: few, for a training loop wants one here and one there."""

CHUNK = 32
"""Times as many are in memory in a pass over all of them."""

COLUMNS = {"prompt": "binary", "others": "binary", "uid": "string", "number": "int64"}


class RowStore:
    def __init__(self, path: Path, source: str, rows: int, unit: str, without_env_class: int) -> None:
        self.path, self.source, self.rows, self.without_env_class = path, source, rows, without_env_class
        self.chunks = -(-rows // (CHUNK * TOGETHER))
        self._unit = unit
        self._opened: tuple[int, Any] | None = None

    @classmethod
    def open(cls, source: File | HubName, cache: Cache, *, prompt_key: str, env_class_key: str) -> Self:
        """The store of a source; written where the cache has none."""
        name, identity = _identify(source, cache)
        config = {"prompt_key": prompt_key, "env_class_key": env_class_key, "version": VERSION}
        key = f"rows_{config_hash(config, {'content': identity})}"

        def build(path: Path) -> Sidecar:
            found = _write(path, name, prompt_key, env_class_key)
            if _identify(source, cache)[1] != identity:
                raise ReadError(f"{name} changed while it was read", remedy="try again when it is whole")
            return Sidecar(config={**config, **found}, source=name, rows=found["rows"], fingerprint=identity)

        sidecar, _ = cache.get_or_build(key, build)
        known = sidecar.config
        return cls(cache.path(key), name, sidecar.rows, known["unit"], known["without_env_class"])

    def row(self, number: int) -> tuple[Any, Row, str]:
        """The prompt, the other columns, and the uid that the row says or, where it says none, that of its problem."""
        prompt, others, uid, _ = self._read(number)
        return unpack(prompt), unpack(others), uid

    def place(self, number: int) -> str:
        return f"{self.source}, {self._unit} {self._read(number)[-1]}"

    def prompts(self, first: int = 0, step: int = 1) -> Iterator[list[Any]]:
        """The prompts of every `step`th chunk, from the `first` on."""
        for values in self._column("prompt", range(first, self.chunks, step)):
            with pause_gc():
                yield list(map(unpack, values))

    def uids(self) -> Iterator[str]:
        for values in self._column("uid", range(self.chunks)):
            yield from values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _column(self, name: str, chunks: range) -> Iterator[list[Any]]:
        import pyarrow as pa

        with pa.OSFile(str(self.path)) as file:
            options = pa.ipc.IpcReadOptions(included_fields=[list(COLUMNS).index(name)])
            reader = pa.ipc.open_file(file, options=options)
            for first in (chunk * CHUNK for chunk in chunks):
                batches = map(reader.get_batch, range(first, min(first + CHUNK, reader.num_record_batches)))
                yield [value for batch in batches for value in batch.column(0).to_pylist()]

    def _read(self, number: int) -> list[Any]:
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


def _identify(source: File | HubName, cache: Cache) -> tuple[str, str]:
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


def _write(path: Path, name: str, prompt_key: str, env_class_key: str) -> dict[str, Any]:
    """Writes the rows of the source `name`; gives what a store knows of it."""
    import pyarrow as pa

    rows, without_env_class, unit = 0, 0, "row"
    waiting: list[tuple[bytes, bytes, str, int]] = []
    schema = pa.schema(COLUMNS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:

        def write(count: int) -> None:
            columns = zip(zip(*waiting[:count], strict=True), schema.types, strict=True)
            table = pa.record_batch([pa.array(values, kind) for values, kind in columns], schema=schema)
            for first in range(0, count, TOGETHER):
                writer.write_batch(table.slice(first, TOGETHER))
            del waiting[:count]

        for batch in read_batches(name):
            with pause_gc():
                without_env_class += sum(row.get(env_class_key) is None for row in batch.rows)
                waiting += _pack_rows(batch, prompt_key, env_class_key)
            rows, unit = rows + len(batch.rows), batch.unit
            if whole := len(waiting) // TOGETHER * TOGETHER:
                write(whole)
        if waiting:
            write(len(waiting))
    return {"rows": rows, "unit": unit, "without_env_class": without_env_class}


def _pack_rows(batch: Batch, prompt_key: str, env_class_key: str) -> Iterator[tuple[bytes, bytes, str, int]]:
    for position, (row, number) in enumerate(zip(batch.rows, batch.numbers, strict=True)):
        uid = row_uid(row, prompt_key, env_class_key)
        prompt = row.pop(prompt_key, None)
        yield pack_row(prompt, batch, position), pack_row(row, batch, position), uid, number
