"""Rows as parquet whose values come back exactly, written table by table.

    with ExactParquet(path) as writer:
        writer.write(table_of(rows))

Arrow would make 1.0 of the 1 beside 1.5, and has no integers over 64 bits, no mapping without keys and no columns of
mixed types. Such columns, or such keys of `extra_info` and of reward columns, become JSON text, listed in the file's
metadata. A ground truth never does: trainers compare with it (see `MixedTruths`).

A first table may hold only nulls in a column, or lack a key that a later one has. Then what was written is read back
and written anew under the wider schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from treetune.rows.arrow_values import (
    JSON_FIELDS,
    SPLIT,
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
from treetune.rows.round_trip import MARK

TRUTHS = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth")

_sorted = msgspec.json.Encoder(order="sorted").encode


class MixedTruths(Exception):
    """Ground truths that are no one Arrow type. All that are no text must become text, with their original noted."""


def table_of(rows: list[dict[str, Any]], *, strict_truths: bool = False) -> pa.Table:
    """Rows as a table, whose metadata lists what is JSON text. `strict_truths`: raises `MixedTruths`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    json_fields: list[str] = []
    refused = TRUTHS if strict_truths else ()
    columns = {name: _column([row.get(name) for row in rows], name, json_fields, refused) for name in names}
    table = pa.table(columns)
    return with_json_fields(table, json_fields)


_REWARDS = ("reward_spec", "reward_model")
"""Where SkyRL's environments look for a ground truth."""


def with_json_truth(row: dict[str, Any]) -> dict[str, Any]:
    """A row of SkyRL's with its ground truth as JSON text; see `json_truths`."""
    changed = {
        name: {**spec, "ground_truth": to_json_text(truth)}
        for name in _REWARDS
        if (spec := row.get(name)) and (truth := spec.get("ground_truth")) is not None
    }
    return {**row, **changed}


def json_truths(table: pa.Table) -> pa.Table:
    """The ground truths of such rows as Arrow's type for JSON, which `datasets` gives trainers as the values they are:
    a text for one environment, a mapping for another."""
    for name in _REWARDS:
        if name not in table.column_names:
            continue
        spec = table[name].combine_chunks()
        if not pa.types.is_struct(spec.type):
            continue
        children = children_of(spec)
        truths = children.get("ground_truth")
        if truths is None or not pa.types.is_string(truths.type):
            continue
        children["ground_truth"] = pa.ExtensionArray.from_storage(pa.json_(pa.string()), truths)
        table = set_column(table, name, struct_of(children, spec))
    return table


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


def _column(values: list[Any], path: str, json_fields: list[str], refused: tuple[str, ...]) -> pa.Array:
    if path not in SPLIT or not all(value is None or isinstance(value, dict) for value in values):
        return _exact(values, path, json_fields, refused)
    keys = list(dict.fromkeys(key for value in values if value for key in value))
    if not keys or "" in keys or not all(isinstance(key, str) for key in keys):
        return _exact(values, path, json_fields, refused)
    arrays = [
        _exact([value.get(key) if value else None for value in values], f"{path}.{key}", json_fields, refused)
        for key in keys
    ]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def _exact(values: list[Any], path: str, json_fields: list[str], refused: tuple[str, ...]) -> pa.Array:
    try:
        array = pa.array(values)
        if _has_times(array.type):
            array = pa.array(to_python(array))
        if _storable(array.type) and (_certain(array.type) or _same(values, array)):
            return array
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        pass
    if path in refused:
        raise MixedTruths
    json_fields.append(path)
    return pa.array([None if value is None else to_json_text(value) for value in values], pa.string())


def _storable(kind: pa.DataType) -> bool:
    """Whether parquet can hold it: no mapping without keys."""
    return all(map(_storable, _children(kind))) and str(kind) != "struct<>"


def _has_times(kind: pa.DataType) -> bool:
    return pa.types.is_temporal(kind) or any(map(_has_times, _children(kind)))


def _certain(kind: pa.DataType) -> bool:
    """Whether a type tells that no value was changed to fit it."""
    types = pa.types
    leaf = types.is_string(kind) or types.is_int64(kind) or types.is_boolean(kind) or types.is_null(kind)
    return bool(leaf) or (types.is_nested(kind) and all(map(_certain, _children(kind))))


def _children(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(number).type for number in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _same(values: list[Any], array: pa.Array) -> bool:
    return bool(_sorted(drop_nulls(values)) == _sorted(to_python(array)))


ROW_GROUP = 2_000
"""Rows of one row group: whoever wants one row reads so many."""


class GrowingParquet:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.schema: pa.Schema | None = None
        self.json_fields: set[str] = set()
        self._writer: Any = None

    def write(self, table: pa.Table) -> None:
        already = frozenset(json_fields_of(table.schema.metadata))
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
        return unify_types(one, other)

    def refuse(self, path: str) -> None:
        """Raises where a path must not become JSON."""
        refuse_mixed_truths(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _widened(self, known: pa.Schema, new: pa.Schema) -> pa.Schema:
        fields = [
            pa.field(field.name, self._united(field.type, new.field(field.name).type, field.name))
            if field.name in new.names
            else field
            for field in known
        ]
        return pa.schema([*fields, *(field for field in new if field.name not in known.names)])

    def _united(self, one: pa.DataType, other: pa.DataType, path: str) -> pa.DataType:
        if path in self.json_fields:
            return pa.string()
        if path in SPLIT and pa.types.is_struct(one) and pa.types.is_struct(other):
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
        self._close()
        earlier = self.path.with_name(f"{self.path.name}.narrow")
        self.path.rename(earlier)
        with pq.ParquetFile(earlier) as file:
            for number in range(file.num_row_groups):
                self._put(file.read_row_group(number), json_fields)
        earlier.unlink()

    def _put(self, table: pa.Table, already_json: frozenset[str]) -> None:
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


class ExactParquet(GrowingParquet):
    """Grows by the same rule: where no type holds what two tables have, JSON does."""

    def holds_both(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        return unify_exactly(one, other)

    def refuse(self, path: str) -> None:
        if path in TRUTHS:
            raise MixedTruths


def _with_json(table: pa.Table, paths: set[str]) -> pa.Table:
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


def _marked(table: pa.Table, json_fields: set[str]) -> pa.Table:
    if not json_fields or "extra_info" not in table.column_names:
        return table
    column = conform(table["extra_info"], table.schema.field("extra_info").type)
    if not pa.types.is_struct(column.type):
        return table
    mark = pa.repeat(pa.scalar(msgspec.json.encode(sorted(json_fields)).decode(), pa.string()), len(column))
    return set_column(table, "extra_info", struct_of({**children_of(column), MARK: mark}, column))
