"""Rows as parquet whose values come back exactly, written table by table.

    with GrowingParquet(path, exact=True) as writer:
        writer.write(table_of(rows))

Arrow would make 1.0 of the 1 beside 1.5, and has no integers over 64 bits, no mapping without keys and no columns of
mixed types. Such columns, or such keys of `extra_info` and of reward columns, become JSON text, listed in the file's
metadata. A ground truth never does: trainers compare with it (see `MixedTruths`).

A first table may hold only nulls in a column, or lack a key that a later one has. Then what was written is read back
and written anew under the wider schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from treetune.rows.arrow_values import (
    JSON_FIELDS,
    children_of,
    conform,
    drop_nulls,
    json_array,
    json_fields_of,
    refuse_mixed_truths,
    set_column,
    struct_of,
    to_json_text,
    to_python,
    unify_types,
    with_json_fields,
)
from treetune.rows.formats import FORMATS, MAPPINGS
from treetune.rows.round_trip import MARK

TRUTHS = tuple(".".join(format.truth) for format in FORMATS.values())

ROW_GROUP = 2_000
"""Rows of one row group: reading one row reads all of its group."""

_REWARDS = ("reward_spec", "reward_model")
"""Where SkyRL's environments look for a ground truth."""

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class MixedTruths(Exception):
    """Ground truths that are no one Arrow type. All that are no text must become text, with their original noted."""


# Rows as a table


def table_of(rows: list[dict[str, Any]], *, strict_truths: bool = False) -> pa.Table:
    """Rows as a table, whose metadata lists what is JSON text. `strict_truths`: raises `MixedTruths`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    json_fields: list[str] = []
    refused = TRUTHS if strict_truths else ()
    columns = {name: _column([row.get(name) for row in rows], name, json_fields, refused) for name in names}
    return with_json_fields(pa.table(columns), json_fields)


def _column(values: list[Any], path: str, json_fields: list[str], refused: tuple[str, ...]) -> pa.Array:
    keys: list[Any] = []
    if path in MAPPINGS and all(value is None or isinstance(value, dict) for value in values):
        keys = list(dict.fromkeys(key for value in values if value for key in value))
    if not keys or not all(isinstance(key, str) and key for key in keys):
        return _exact_array(values, path, json_fields, refused)
    arrays = [
        _exact_array([value.get(key) if value else None for value in values], f"{path}.{key}", json_fields, refused)
        for key in keys
    ]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def _exact_array(values: list[Any], path: str, json_fields: list[str], refused: tuple[str, ...]) -> pa.Array:
    try:
        array = pa.array(values)
        if any(map(pa.types.is_temporal, _types_in(array.type))):
            array = pa.array(to_python(array))
        if _is_exact(array, values):
            return array
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        pass
    if path in refused:
        raise MixedTruths
    json_fields.append(path)
    return pa.array([None if value is None else to_json_text(value) for value in values], pa.string())


def _is_exact(array: pa.Array, values: list[Any]) -> bool:
    """Whether parquet can hold an array, and no value was changed to fit its type."""
    types, found = pa.types, list(_types_in(array.type))
    if any(str(kind) == "struct<>" for kind in found):
        return False
    certain = (types.is_string, types.is_int64, types.is_boolean, types.is_null, types.is_nested)
    if all(any(is_kind(kind) for is_kind in certain) for kind in found):
        return True
    return bool(_encode_sorted(drop_nulls(values)) == _encode_sorted(to_python(array)))


def _types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for number in range(kind.num_fields if pa.types.is_nested(kind) else 0):
        yield from _types_in(kind.field(number).type)


def with_json_truth(row: dict[str, Any]) -> dict[str, Any]:
    """A row of SkyRL's with its ground truth as JSON text; see `mark_json_truths`."""
    changed = {
        name: {**spec, "ground_truth": to_json_text(truth)}
        for name in _REWARDS
        if (spec := row.get(name)) and (truth := spec.get("ground_truth")) is not None
    }
    return {**row, **changed}


def mark_json_truths(table: pa.Table) -> pa.Table:
    """The ground truths of such rows as Arrow's type for JSON, which `datasets` gives trainers as the values they are:
    a text for one environment, a mapping for another."""
    for name in _REWARDS:
        spec = table[name].combine_chunks() if name in table.column_names else pa.nulls(0)
        children = children_of(spec) if pa.types.is_struct(spec.type) else {}
        truths = children.get("ground_truth")
        if truths is not None and pa.types.is_string(truths.type):
            children["ground_truth"] = pa.ExtensionArray.from_storage(pa.json_(pa.string()), truths)
            table = set_column(table, name, struct_of(children, spec))
    return table


# Tables as a file


class GrowingParquet:
    """A file whose schema may grow with every table. `exact`: where no type holds what two tables have as it is, JSON
    does; else a wider type may, such as that of fractions for whole numbers."""

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

    def write(self, table: pa.Table) -> None:
        already = frozenset(json_fields_of(table.schema.metadata))
        table = table.replace_schema_metadata(None)
        schema, json_fields = self.schema, frozenset(self.json_fields)
        self.json_fields |= already
        wider = table.schema if schema is None else self.widen(schema, table.schema)
        self.schema = with_mark(wider) if self.json_fields else wider
        if schema is not None and (self.schema != schema or self.json_fields != json_fields):
            self._rewrite(json_fields)
        self._put(table, already)
        self.rows += table.num_rows

    def widen(self, known: pa.Schema, new: pa.Schema) -> pa.Schema:
        """The schema that holds rows of both; notes which fields become JSON text."""
        return pa.schema(self._unify(known, new))

    def _unify(self, known: Iterable[pa.Field], new: Iterable[pa.Field], under: str = "") -> list[Any]:
        fields = {field.name: field.type for field in known}
        for field in new:
            path, one, other = f"{under}{field.name}", fields.get(field.name), field.type
            if one is None:
                fields[field.name] = other
            elif path in self.json_fields:
                fields[field.name] = pa.string()
            elif path in MAPPINGS and pa.types.is_struct(one) and pa.types.is_struct(other):
                fields[field.name] = pa.struct(self._unify(one, other, f"{path}."))
            else:
                fields[field.name] = self._type_of_both(one, other, path)
        return list(fields.items())

    def _type_of_both(self, one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
        both = unify_exactly(one, other) if self._exact else unify_types(one, other)
        if both is not None:
            return both
        if self._exact and path in TRUTHS:
            raise MixedTruths
        if not self._exact:
            refuse_mixed_truths(path)
        self.json_fields.add(path)
        return pa.string()

    def _rewrite(self, json_fields: frozenset[str]) -> None:
        """Write what there is again, under the schema as it is now."""
        self._close()
        earlier = self.path.with_name(f"{self.path.name}.narrow")
        self.path.rename(earlier)
        with pq.ParquetFile(earlier) as file:
            for number in range(file.num_row_groups):
                self._put(file.read_row_group(number), json_fields)
        earlier.unlink()

    def _put(self, table: pa.Table, already_json: frozenset[str]) -> None:
        assert self.schema is not None
        table = _add_mark(_encode_fields(table, self.json_fields - already_json), self.json_fields)
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


def unify_exactly(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both exactly; None where there is none."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_list(one) and types.is_list(other):
        inner = unify_exactly(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if types.is_struct(one) and types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            both = unify_exactly(fields.get(field.name, pa.null()), field.type)
            if both is None:
                return None
            fields[field.name] = both
        return pa.struct(list(fields.items()))
    return None


def _encode_fields(table: pa.Table, paths: set[str]) -> pa.Table:
    """`table` with the values at these paths as JSON text."""
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
    """A schema whose rows say themselves which of their values are JSON text: trainers do not see the metadata."""
    place = schema.get_field_index("extra_info")
    if place < 0 or not pa.types.is_struct(schema.field(place).type):
        return schema
    fields = {field.name: field.type for field in schema.field(place).type}
    return schema.set(place, pa.field("extra_info", pa.struct([*{**fields, MARK: pa.string()}.items()])))


def _add_mark(table: pa.Table, json_fields: set[str]) -> pa.Table:
    if not json_fields or "extra_info" not in table.column_names:
        return table
    column = conform(table["extra_info"], table.schema.field("extra_info").type)
    if not pa.types.is_struct(column.type):
        return table
    mark = pa.repeat(pa.scalar(msgspec.json.encode(sorted(json_fields)).decode(), pa.string()), len(column))
    return set_column(table, "extra_info", struct_of({**children_of(column), MARK: mark}, column))
