"""Writes tables to one parquet file whose schema grows with them.

with GrowingParquet(path, exact=True) as writer:
    writer.write(table_of(rows))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from treetune.data.arrow_values import (
    JSON_FIELDS,
    MARK,
    children_of,
    drop_nulls,
    json_fields_of,
    set_column,
    struct_of,
)
from treetune.data.rows.image_columns import HUGGINGFACE, IMAGES, image_type
from treetune.data.rows.parquet import MixedTruths, conform, is_open, json_array, refuse_truths, unify_types
from treetune.data.rows.row_codec import MAPPINGS, TRUTHS
from treetune.errors import TasksetError

ROW_GROUP = 2_000
"""Rows per row group. Reading one row reads its whole group."""


TOGETHER = 20_000
"""Rows that are taken from files at a time."""


class GrowingParquet:
    """A parquet file whose schema may grow with every table; the rows written before are then rewritten with the wider
    schema. `exact`: values that no type holds exactly become JSON. Otherwise a wider type may hold them, such as floats
    for whole numbers."""

    def __init__(self, path: Path, *, exact: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.schema: pa.Schema | None = None
        self.json_fields: set[str] = set()
        self._exact = exact
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def expect(self, schema: pa.Schema, json_fields: set[str]) -> None:
        """Start with a schema that is wider than the first table's."""
        self.json_fields = json_fields
        self.schema = with_mark(schema) if json_fields else schema

    def write(self, table: pa.Table) -> None:
        already = frozenset(json_fields_of(table.schema.metadata))
        table = table.replace_schema_metadata(None)
        schema, json_fields = self.schema, {*self.json_fields, *already}
        try:
            wider = table.schema if schema is None else widen(schema, table.schema, json_fields, exact=self._exact)
        except MixedTruths as error:
            raise refuse_truths(error.path, _first_value(table, error.path, self.rows)) from None
        before, self.json_fields = frozenset(self.json_fields), json_fields
        self.schema = with_mark(wider) if json_fields else wider
        if schema is not None and (self.schema != schema or json_fields != before):
            self._rewrite(before)
        self._put(table, already)
        self.rows += table.num_rows

    def _rewrite(self, json_fields: frozenset[str]) -> None:
        """Write the existing rows again, with the current schema."""
        self._close()
        earlier = self.path.with_name(f"{self.path.name}.narrow")
        self.path.rename(earlier)
        for table in read_groups(earlier):
            self._put(table, json_fields)
        earlier.unlink()

    def _put(self, table: pa.Table, already_json: frozenset[str]) -> None:
        assert self.schema is not None
        table = _add_mark(_encode_fields(table, self.json_fields - already_json), self.json_fields)
        try:
            rows = conform(table.to_struct_array(), pa.struct(list(self.schema)))
        except pa.ArrowInvalid as error:
            problem = f"whole numbers and fractions that no column can hold exactly together: {error}"
            raise TasksetError(problem, remedy="write these numbers as text, or leave out their column") from None
        if self._writer is None:
            holds_images = (IMAGES, image_type()) in zip(self.schema.names, self.schema.types, strict=True)
            schema = self.schema.with_metadata(HUGGINGFACE) if holds_images else self.schema
            self._writer = pq.ParquetWriter(self.path, schema, compression="zstd", compression_level=1)
        self._writer.write_table(pa.Table.from_struct_array(rows), row_group_size=ROW_GROUP)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            if self.json_fields:
                writer.add_key_value_metadata({JSON_FIELDS: msgspec.json.encode(sorted(self.json_fields))})
            writer.close()


def read_groups(path: Path) -> Iterator[pa.Table]:
    """Yield the row groups of a file, with the metadata that lists which values are JSON text."""
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number).replace_schema_metadata(file.metadata.metadata)


def write_changed(
    source: Path,
    target: Path,
    change: Callable[[pa.Table], pa.Table],
    schema: pa.Schema | None = None,
    json_fields: Iterable[str] = (),
) -> pa.Schema:
    """Write a file's rows, changed by `change`, to `target`, with a wider `schema` if given. Returns their schema."""
    with GrowingParquet(target) as writer:
        if schema is not None:
            writer.expect(schema, {*json_fields, *json_fields_of(pq.read_metadata(source).metadata)})
        for table in read_groups(source):
            writer.write(change(table))
    return writer.schema


def write_taken(files: Sequence[Path], rows: Sequence[int], target: Path) -> pa.Schema:
    """Write rows in this order, numbered across all files. Returns their schema."""
    together = target.with_name(f"{target.name}.all")
    try:
        if len(files) > 1:
            with GrowingParquet(together) as stack:  # with a common schema
                for table in chain.from_iterable(map(read_groups, files)):
                    stack.write(table)
        with pq.ParquetFile(together if len(files) > 1 else files[0]) as file, GrowingParquet(target) as writer:
            table = file.read().replace_schema_metadata(file.metadata.metadata)
            for first in range(0, len(rows), TOGETHER):
                writer.write(table.take(pa.array(rows[first : first + TOGETHER], pa.int64())))
        return writer.schema
    finally:
        together.unlink(missing_ok=True)


def _first_value(table: pa.Table, path: str, position: int) -> dict[int, Any]:
    """Return the first value at a path, under its row's index in the source, or else its position in the file."""
    row = drop_nulls(table.slice(0, 1).to_pylist())[0]
    value = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    index = (row.get("extra_info") or {}).get("index")
    return {index if isinstance(index, int) else position: value}


def widen(
    known: Iterable[pa.Field], new: Iterable[pa.Field], json_fields: set[str], *, exact: bool = False, under: str = ""
) -> pa.Schema:
    """Return a schema that can hold the rows of both. Paths that become JSON text are added to `json_fields`."""
    fields = {field.name: field.type for field in known}
    for field in new:
        path, one, other = f"{under}{field.name}", fields.get(field.name), field.type
        if one is None:
            both = other
        elif path in json_fields:
            both = pa.string()
        elif path in MAPPINGS and types.is_struct(one) and types.is_struct(other):
            both = pa.struct(list(widen(one, other, json_fields, exact=exact, under=f"{path}.")))
        elif (both := unify_types(one, other, exact=exact)) is None or is_open(both, path):
            if path in TRUTHS:
                raise refuse_truths(path)
            if path == IMAGES and image_type() in (one, other):
                raise TasksetError(
                    "some rows have images and others only their addresses: no parquet column holds both",
                    remedy="fetch those images yourself, or write .jsonl",
                )
            if path == "prompt" and not exact:
                raise TasksetError(
                    "prompts whose contents are text in some rows and lists in others, many rows apart",
                    remedy='write text contents as [{"type": "text", "text": ...}] throughout',
                )
            json_fields.add(path)
            both = pa.string()
        fields[field.name] = both
    return pa.schema(fields.items())


def _encode_fields(table: pa.Table, paths: set[str]) -> pa.Table:
    """Return `table` with the values at these paths as JSON text."""
    for path in paths:
        name, _, key = path.partition(".")
        if name not in table.column_names:
            continue
        column = conform(table[name], table.schema.field(name).type)
        if key:
            children = children_of(column)
            if key not in children:
                continue
            column = struct_of({**children, key: json_array(children[key].to_pylist())}, column)
        else:
            column = json_array(column.to_pylist())
        table = set_column(table, name, column)
    return table


def with_mark(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose rows themselves list which of their values are JSON text: trainers cannot see the
    metadata."""
    place = schema.get_field_index("extra_info")
    if place < 0 or not types.is_struct(kind := schema.field(place).type):
        return schema
    return schema.set(place, pa.field("extra_info", unify_types(kind, pa.struct([(MARK, pa.string())]), exact=True)))


def _add_mark(table: pa.Table, json_fields: set[str]) -> pa.Table:
    if not json_fields or "extra_info" not in table.column_names:
        return table
    column = conform(table["extra_info"], table.schema.field("extra_info").type)
    if not types.is_struct(column.type):
        return table
    mark = pa.repeat(pa.scalar(msgspec.json.encode(sorted(json_fields)).decode(), pa.string()), len(column))
    return set_column(table, "extra_info", struct_of({**children_of(column), MARK: mark}, column))
