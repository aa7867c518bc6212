"""Converts Arrow values to Python values exactly as they were written, and back.

Parquet fills missing keys of a mapping with nulls, JSON omits them. Here a key whose value is null is absent. Nulls
inside lists stay. Integers of any size and floats keep their exact value. A date or a time becomes its ISO text.

Values of mixed types are stored as JSON text, and the schema's metadata lists them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import TasksetError

if TYPE_CHECKING:
    import pyarrow as pa

_encode = msgspec.json.Encoder().encode
decode_json = msgspec.json.Decoder().decode

_SCALARS = frozenset((str, int, float, bool))


def drop_nulls(value: Any) -> Any:
    """Return `value` without the keys that are None."""
    if type(value) in _SCALARS:  # most values are scalars, and an isinstance check against Mapping is slow
        return value
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON, without the keys that are None."""
    try:
        encoded = _encode(value)
        # None and floats that JSON cannot represent are both encoded as null. Only then is the slow walk needed.
        if b"null" in encoded:
            json.dumps(value, allow_nan=False, default=str)
            encoded = _encode(drop_nulls(value))
    except UnicodeEncodeError as error:
        raise TasksetError(
            f"text that is not valid Unicode: {error.object!r:.80}", remedy="remove lone surrogates"
        ) from None
    except ValueError:
        problem = f"JSON has neither NaN nor Infinity: {value!r:.80}"
        raise TasksetError(problem, remedy="leave the key out; parquet can hold it in a column of numbers") from None
    except TypeError as error:
        raise TasksetError(f"a value that JSON cannot represent: {error}") from None
    return encoded


def to_json_text(value: Any) -> str:
    return encode_json(value).decode()


def to_python(array: pa.Array) -> list[Any]:
    """Convert an Arrow array to Python values, without the keys that are null. It converts whole columns at a time,
    which is several times faster than `to_pylist` and a walk over its result."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_struct(kind):
        made = to_rows([field.name for field in kind], array.flatten(), len(array))
        if array.null_count:
            made = [row if valid else None for row, valid in zip(made, array.is_valid().to_pylist(), strict=True)]
        return made
    if is_list(kind):
        items = to_python(array.flatten())
        lengths = pc.list_value_length(array)
        # No comparison with 1: that would import pandas.
        if not array.null_count and len(items) == len(array) and pc.max(lengths).as_py() == 1:
            return [[item] for item in items]
        lists: list[Any] = []
        start = 0
        for length in lengths.to_pylist():
            lists.append(None if length is None else items[start : (start := start + length)])
        return lists
    if pa.types.is_dictionary(kind):
        return to_python(array.dictionary_decode())
    if pa.types.is_temporal(kind):
        return to_iso_texts(array)
    if isinstance(kind, pa.BaseExtensionType):
        stored = to_python(array.storage)
        # How the `datasets` library marks columns of mixed types.
        return [_parse_stored(text) for text in stored] if kind.extension_name == "arrow.json" else stored
    if pa.types.is_nested(kind):
        return [drop_nulls(value) for value in array.to_pylist(maps_as_pydicts="strict")]
    values: list[Any] = array.to_pylist()
    return values


def values_of(batch: pa.Table | list[dict[str, Any]], name: str) -> list[Any]:
    """Return a column of a table or of rows. Every row must have it."""
    if isinstance(batch, list):
        return list(map(itemgetter(name), batch))
    values: list[Any] = batch[name].to_pylist()
    return values


def to_iso_texts(times: pa.Array) -> list[str | None]:
    """Convert dates, times and durations to the text that JSON uses."""
    import pyarrow as pa

    if pa.types.is_timestamp(times.type) and times.type.unit == "ns":  # Python stops at microseconds
        times = times.cast(pa.timestamp("us", times.type.tz), safe=False)
    texts: list[str | None] = msgspec.to_builtins(times.to_pylist())
    return texts


def to_rows(names: list[str], arrays: list[Any], count: int) -> list[Any]:
    """Build rows from columns, each without the keys that are null in that row."""
    if not names:
        return [{} for _ in range(count)]
    nulls = sum(array.null_count for array in arrays)
    if nulls > count * len(names) // 2:
        return _to_sparse_rows(names, arrays, count)
    columns = [to_python(array) for array in arrays]
    if not nulls:
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in zip(*columns, strict=True)
    ]


def _to_sparse_rows(names: list[str], arrays: list[Any], count: int) -> list[Any]:
    """Like `to_rows`, for columns that are mostly null. There may be thousands of them."""
    import pyarrow.compute as pc

    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, array in zip(names, arrays, strict=True):
        if array.null_count < count:
            places = pc.indices_nonzero(array.is_valid())
            for place, value in zip(places.to_pylist(), to_python(array.take(places)), strict=True):
                rows[place][name] = value
    return rows


def read_extra(path: Path | str, key: str) -> pa.ChunkedArray | None:
    """Return the values of a key of `extra_info` in a parquet file, or None if no row has it."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        table = file.read(columns=[f"extra_info.{key}"])
    return pc.struct_field(table["extra_info"], key) if table.column_names else None


def _parse_stored(text: str | None) -> Any:
    try:
        return None if text is None else drop_nulls(decode_json(text))
    except msgspec.DecodeError:
        return text  # the library stores some text without quotes


@contextmanager
def pause_gc() -> Iterator[None]:
    """Turn off the cycle collector, which would scan each batch of rows repeatedly and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


JSON_FIELDS = b"treetune.json_fields"
"""Schema metadata: the dotted paths whose values are JSON text, because their types were mixed."""

MARK = "treetune_json"
"""The key of `extra_info` that lists the dotted paths whose values are JSON text. Trainers cannot see the file's
metadata."""


def json_fields_of(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """Return the JSON fields that the metadata of a schema or a file lists."""
    fields: list[str] = decode_json((metadata or {}).get(JSON_FIELDS, b"[]"))
    return fields


def parse_json_fields(row: dict[str, Any], json_fields: Sequence[str]) -> dict[str, Any]:
    """Return `row` with the JSON text at these dotted paths parsed."""
    for path in json_fields:
        name, _, key = path.partition(".")
        place, last = (row.get(name), key) if key else (row, name)
        if isinstance(place, dict) and isinstance(place.get(last), str):
            place[last] = drop_nulls(decode_json(place[last]))
    extra = row.get("extra_info")
    if isinstance(extra, dict):
        extra.pop(MARK, None)
    return row


def arrow_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows without nulls, with the JSON fields that the schema's metadata lists parsed."""
    with pause_gc():
        rows = to_rows(batch.schema.names, batch.columns, batch.num_rows)
    json_fields = json_fields_of(batch.schema.metadata)
    return [parse_json_fields(row, json_fields) for row in rows] if json_fields else rows


def with_json_fields(table: pa.Table, json_fields: list[str]) -> pa.Table:
    return table.replace_schema_metadata({JSON_FIELDS: _encode(json_fields)} if json_fields else None)


def children_of(array: pa.Array) -> dict[str, pa.Array]:
    """Return the columns of a struct array, null where the struct is null."""
    return dict(zip([field.name for field in array.type], array.flatten(), strict=True))


def struct_of(children: Mapping[str, pa.Array], like: pa.Array) -> pa.Array:
    """Build a struct array that is null where `like` is null."""
    import pyarrow as pa

    return pa.StructArray.from_arrays(list(children.values()), list(children), mask=like.is_null())


def set_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def schema_tree(schema: pa.Schema) -> dict[str, Any]:
    """Return a schema as plain values for the sidecar, so that schemas can be compared without pyarrow."""
    return {field.name: _type_tree(field.type) for field in schema}


def find_clashes(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the dotted paths at which two files cannot be joined."""
    found: list[str] = []
    for key in one.keys() & other.keys():
        first, second, here = one[key], other[key], f"{path}{key}"
        # A null joins with everything but a mapping: mappings are joined key by key, and null has no keys.
        if first == second or ("null" in (first, second) and not isinstance(first, dict) | isinstance(second, dict)):
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            found += find_clashes(first, second, f"{here}.")
        elif not (isinstance(first, list) and isinstance(second, list) and "null" in (first[0], second[0])):
            found.append(f"{here} ({_describe_type(first)} and {_describe_type(second)})")
    return sorted(found)


def _type_tree(type_: pa.DataType) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return {field.name: _type_tree(field.type) for field in type_}
    if pa.types.is_list(type_):
        return [_type_tree(type_.value_type)]
    return str(type_)


def _describe_type(branch: Any) -> str:
    if isinstance(branch, dict):
        return "keys " + ", ".join(branch)
    return f"list of {_describe_type(branch[0])}" if isinstance(branch, list) else str(branch)


def is_list(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))
