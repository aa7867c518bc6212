"""A parquet file written table by table, whose schema may grow on the way.

A first table may hold only nulls in a column, or lack a key that a later one has. Then what was written is read back
and written anew under the wider schema; a key whose types cannot be united becomes JSON text, and the file says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from treetune.rows.round_trip import MARK
from treetune.rows.schema import (
    JSON_FIELDS,
    SPLIT,
    conform,
    json_array,
    json_fields_of,
    refuse_mixed_truths,
    unified,
)

if TYPE_CHECKING:
    import pyarrow as pa


ROW_GROUP = 2_000
"""Rows of one row group: whoever wants one row reads so many."""


class GrowingParquet:
    split: ClassVar[tuple[str, ...]] = SPLIT
    """Columns whose keys each have a type of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.schema: pa.Schema | None = None
        self.json_fields: set[str] = set()
        self._writer: Any = None

    def write(self, table: pa.Table) -> None:
        already = frozenset(json_fields_of(table))
        table = table.replace_schema_metadata(None)
        schema, json_fields = self.schema, frozenset(self.json_fields)
        self.json_fields |= already
        wider = table.schema if schema is None else self._widened(schema, table.schema)
        self.schema = with_mark(wider) if self.json_fields else wider
        if schema is not None and (self.schema != schema or self.json_fields != json_fields):
            self._rewrite(json_fields)
        self._put(table, already)
        self.rows += table.num_rows

    def holds_both(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        """The type for values of both types; None where only JSON will do."""
        return unified(one, other)

    def refuse(self, path: str) -> None:
        """Raises where a path must not become JSON."""
        refuse_mixed_truths(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _widened(self, known: pa.Schema, new: pa.Schema) -> pa.Schema:
        import pyarrow as pa

        fields = [
            pa.field(field.name, self._united(field.type, new.field(field.name).type, field.name))
            if field.name in new.names
            else field
            for field in known
        ]
        return pa.schema([*fields, *(field for field in new if field.name not in known.names)])

    def _united(self, one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
        import pyarrow as pa

        if path in self.json_fields:
            return pa.string()
        if path in self.split and pa.types.is_struct(one) and pa.types.is_struct(other):
            names = dict.fromkeys([*(field.name for field in one), *(field.name for field in other)])
            return pa.struct([(name, self._child(one, other, name, path)) for name in names])
        both = self.holds_both(one, other)
        if both is not None:
            return both
        self.refuse(path)
        self.json_fields.add(path)
        return pa.string()

    def _child(self, one: pa.DataType, other: pa.DataType, name: str, path: str) -> pa.DataType:
        first, second = (kind.field(name).type if kind.get_field_index(name) >= 0 else None for kind in (one, other))
        if first is None or second is None:
            return first if first is not None else second
        return self._united(first, second, f"{path}.{name}")

    def _rewrite(self, json_fields: frozenset[str]) -> None:
        """Write what there is again, under the schema as it is now."""
        import pyarrow.parquet as pq

        self._close()
        earlier = self.path.with_name(f"{self.path.name}.narrow")
        self.path.rename(earlier)
        with pq.ParquetFile(earlier) as file:
            for number in range(file.num_row_groups):
                self._put(file.read_row_group(number), json_fields)
        earlier.unlink()

    def _put(self, table: pa.Table, already_json: frozenset[str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        assert self.schema is not None
        table = _marked(_with_json(table, self.json_fields - already_json), self.json_fields)
        arrays = [
            conform(table[field.name], field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in self.schema
        ]
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.path, self.schema, compression="zstd", compression_level=1)
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self.schema), row_group_size=ROW_GROUP)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            if self.json_fields:
                writer.add_key_value_metadata({JSON_FIELDS: msgspec.json.encode(sorted(self.json_fields))})
            writer.close()


def _with_json(table: pa.Table, paths: set[str]) -> pa.Table:
    """`table` with the values at these paths as JSON text."""
    import pyarrow as pa

    for path in paths:
        name, _, key = path.partition(".")
        if name not in table.column_names:
            continue
        column = conform(table[name], table.schema.field(name).type)
        if key:
            if column.type.get_field_index(key) < 0:
                continue
            children = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
            children[key] = json_array(children[key].to_pylist())
            column = pa.StructArray.from_arrays(list(children.values()), list(children), mask=column.is_null())
        else:
            column = json_array(column.to_pylist())
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def with_mark(schema: pa.Schema) -> pa.Schema:
    """A schema whose rows say themselves which of their values are JSON text: trainers do not see the metadata."""
    import pyarrow as pa

    place = schema.get_field_index("extra_info")
    if place < 0 or not pa.types.is_struct(schema.field(place).type):
        return schema
    fields = {field.name: field.type for field in schema.field(place).type}
    return schema.set(place, pa.field("extra_info", pa.struct([*{**fields, MARK: pa.string()}.items()])))


def _marked(table: pa.Table, json_fields: set[str]) -> pa.Table:
    import pyarrow as pa

    if not json_fields or "extra_info" not in table.column_names:
        return table
    column = conform(table["extra_info"], table.schema.field("extra_info").type)
    if not pa.types.is_struct(column.type):
        return table
    children = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
    children[MARK] = pa.repeat(pa.scalar(msgspec.json.encode(sorted(json_fields)).decode(), pa.string()), len(column))
    marked = pa.StructArray.from_arrays(list(children.values()), list(children), mask=column.is_null())
    return table.set_column(table.column_names.index("extra_info"), "extra_info", marked)
