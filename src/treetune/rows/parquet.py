"""Rows as exact Arrow columns: a value comes back as it was, or its column says that it is JSON text.

Arrow would make 1.0 of the 1 beside 1.5, and has no integers over 64 bits, no mapping without keys and no columns of
mixed types. Such columns, or such keys of `extra_info` and of reward columns, become JSON text, listed in the file's
metadata. A ground truth never does: trainers compare with it (see `MixedTruths`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from treetune.rows.arrow_values import json_text, pruned, python_values
from treetune.rows.parquet_writer import GrowingParquet
from treetune.rows.schema import with_json_fields

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT = ("extra_info", "reward_model", "reward_spec")
"""Columns whose keys each have a type of their own."""

TRUTHS = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth")

_sorted = msgspec.json.Encoder(order="sorted").encode


class MixedTruths(Exception):
    """Ground truths that are no one Arrow type. All that are no text must become text, with their original noted."""


class ExactParquet(GrowingParquet):
    """Grows by the same rule: where no type holds what two tables have, JSON does."""

    split = SPLIT

    def holds_both(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        return united(one, other)

    def refuse(self, path: str) -> None:
        if path in TRUTHS:
            raise MixedTruths


def table_of(rows: list[dict[str, Any]], *, strict_truths: bool = False) -> pa.Table:
    """Rows as a table, whose metadata lists what is JSON text. `strict_truths`: raises `MixedTruths`."""
    import pyarrow as pa

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
        name: {**spec, "ground_truth": json_text(truth)}
        for name in _REWARDS
        if (spec := row.get(name)) and (truth := spec.get("ground_truth")) is not None
    }
    return {**row, **changed}


def json_truths(table: pa.Table) -> pa.Table:
    """The ground truths of such rows as Arrow's type for JSON, which `datasets` gives trainers as the values they are:
    a text for one environment, a mapping for another."""
    import pyarrow as pa

    for name in _REWARDS:
        if name not in table.column_names:
            continue
        spec = table[name].combine_chunks()
        if not pa.types.is_struct(spec.type):
            continue
        children = dict(zip([field.name for field in spec.type], spec.flatten(), strict=True))
        truths = children.get("ground_truth")
        if truths is None or not pa.types.is_string(truths.type):
            continue
        children["ground_truth"] = pa.ExtensionArray.from_storage(pa.json_(pa.string()), truths)
        column = pa.StructArray.from_arrays(list(children.values()), list(children), mask=spec.is_null())
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def united(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both exactly; None where there is none."""
    import pyarrow as pa

    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_list(one) and types.is_list(other):
        inner = united(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if types.is_struct(one) and types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            both = united(fields.get(field.name, pa.null()), field.type)
            if both is None:
                return None
            fields[field.name] = both
        return pa.struct(list(fields.items()))
    return None


def _column(values: list[Any], path: str, json_fields: list[str], refused: tuple[str, ...]) -> pa.Array:
    import pyarrow as pa

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
    import pyarrow as pa

    try:
        array = pa.array(values)
        if _has_times(array.type):
            array = pa.array(python_values(array))
        if _storable(array.type) and (_certain(array.type) or _same(values, array)):
            return array
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        pass
    if path in refused:
        raise MixedTruths
    json_fields.append(path)
    return pa.array([None if value is None else json_text(value) for value in values], pa.string())


def _storable(kind: pa.DataType) -> bool:
    """Whether parquet can hold it: no mapping without keys."""
    return all(map(_storable, _children(kind))) and str(kind) != "struct<>"


def _has_times(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_temporal(kind) or any(map(_has_times, _children(kind)))


def _certain(kind: pa.DataType) -> bool:
    """Whether a type tells that no value was changed to fit it."""
    import pyarrow as pa

    types = pa.types
    leaf = types.is_string(kind) or types.is_int64(kind) or types.is_boolean(kind) or types.is_null(kind)
    return bool(leaf) or (types.is_nested(kind) and all(map(_certain, _children(kind))))


def _children(kind: pa.DataType) -> list[pa.DataType]:
    import pyarrow as pa

    return [kind.field(number).type for number in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _same(values: list[Any], array: pa.Array) -> bool:
    return bool(_sorted(pruned(values)) == _sorted(python_values(array)))
