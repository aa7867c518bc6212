"""One canonical Arrow schema, so that any two built files can be joined, and what happens where they cannot.

Text is `string`, whole numbers int64, fractions float64. Trainers join files by the library's rules: missing keys of a
struct become nulls, but other types must be equal, and inside a list everything must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from treetune.errors import TasksetError
from treetune.rows.arrow_values import iso_texts

if TYPE_CHECKING:
    import pyarrow as pa

JSON_FIELDS = b"treetune.json_fields"
"""Schema metadata: the dotted paths whose values are JSON text, because their types were mixed."""

SPLIT = ("extra_info", "reward_model", "reward_spec")
"""Columns whose keys each have a type of their own."""


def json_fields_of(table: pa.Table) -> list[str]:
    """What a table says of itself."""
    import msgspec

    fields: list[str] = msgspec.json.decode((table.schema.metadata or {}).get(JSON_FIELDS, b"[]"))
    return fields


def with_json_fields(table: pa.Table, json_fields: list[str]) -> pa.Table:
    import msgspec

    return table.replace_schema_metadata({JSON_FIELDS: msgspec.json.encode(json_fields)} if json_fields else None)


def canonical_type(type_: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type_):
        return canonical_type(type_.value_type)
    if types.is_large_string(type_) or types.is_string_view(type_) or types.is_decimal(type_):
        return pa.string()
    if types.is_temporal(type_):  # as ISO text, which is what every trainer and every wire can hold
        return pa.string()
    if types.is_integer(type_):
        return pa.int64()
    if types.is_floating(type_):
        return pa.float64()
    if types.is_large_binary(type_) or types.is_binary_view(type_) or types.is_fixed_size_binary(type_):
        return pa.binary()
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return pa.list_(canonical_type(type_.value_type))
    if types.is_struct(type_):
        # A struct without keys cannot be stored; it becomes JSON.
        fields = [(field.name, canonical_type(field.type)) for field in type_]
        return pa.struct(fields) if fields else pa.string()
    return type_


def unified(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, or None where only JSON can."""
    import pyarrow as pa

    try:
        schemas = [pa.schema([("x", first)]), pa.schema([("x", second)])]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def conform(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """`array` as `type_`: keys that are missing become nulls, and what cannot be cast to text becomes JSON."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if array.type == type_:
        return array
    if pa.types.is_dictionary(array.type):
        return conform(array.dictionary_decode(), type_)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), type_)
    if pa.types.is_struct(array.type) and pa.types.is_struct(type_):
        children = dict(zip([field.name for field in array.type], array.flatten(), strict=True))
        arrays = [
            conform(children[field.name], field.type) if field.name in children else pa.nulls(len(array), field.type)
            for field in type_
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=pc.is_null(array))
    if _is_list(array.type) and _is_list(type_):
        array = array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))
        values = conform(array.flatten(), type_.value_type)
        offsets = pc.subtract(array.offsets, array.offsets[0]) if not array.null_count else _offsets(array)
        return pa.ListArray.from_arrays(offsets, values, type=type_, mask=pc.is_null(array))
    if pa.types.is_string(type_) and pa.types.is_temporal(array.type):
        return pa.array(iso_texts(array), pa.string())
    if pa.types.is_string(type_) and not _is_text(array.type) and not pa.types.is_decimal(array.type):
        return json_array(array.to_pylist())
    return array.cast(type_)


def json_array(values: Iterable[Any]) -> pa.Array:
    """Each value as JSON text."""
    import msgspec
    import pyarrow as pa

    encode = msgspec.json.Encoder(enc_hook=str, order="sorted").encode
    return pa.array([None if value is None else encode(value).decode() for value in values], pa.string())


def refuse_mixed_truths(path: str) -> None:
    """Text beside lists cannot be one column, and quoting the text as JSON would fail every comparison with it."""
    if path == "prompt":
        raise TasksetError(
            "prompts whose contents are text in some rows and lists in others, many rows apart",
            remedy='write text contents as [{"type": "text", "text": ...}] throughout',
        )
    if path == "reward_model.ground_truth":
        raise TasksetError(
            "reward_model.ground_truth has values of several types, which no parquet column can hold",
            remedy="make all of them text, or all of them lists or mappings of one shape",
        )


def tree(schema: pa.Schema) -> dict[str, Any]:
    """A schema as plain values, for the sidecar: comparing two must not need pyarrow."""
    return {field.name: _branch(field.type) for field in schema}


def clashes(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted paths at which two files cannot be joined."""
    found: list[str] = []
    for key in one.keys() & other.keys():
        first, second, here = one[key], other[key], f"{path}{key}"
        # A null joins with everything but keys: these are joined one by one, and null has none.
        if first == second or ("null" in (first, second) and not isinstance(first, dict) | isinstance(second, dict)):
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            found += clashes(first, second, f"{here}.")
        elif not (isinstance(first, list) and isinstance(second, list) and _empty_list(first, second)):
            found.append(f"{here} ({_shown(first)} and {_shown(second)})")
    return sorted(found)


def _branch(type_: pa.DataType) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return {field.name: _branch(field.type) for field in type_}
    if pa.types.is_list(type_):
        return [_branch(type_.value_type)]
    return str(type_)


def _shown(branch: Any) -> str:
    if isinstance(branch, dict):
        return "keys " + ", ".join(branch)
    return f"list of {_shown(branch[0])}" if isinstance(branch, list) else str(branch)


def _empty_list(first: list[Any], second: list[Any]) -> bool:
    return "null" in (first[0], second[0])


def _offsets(array: pa.Array) -> pa.Array:
    """Offsets of a list array with nulls, into its flattened values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])


def _is_list(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def _is_text(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))
