"""Builds tables from rows so that values come back exactly as they were.

    table_of([{"prompt": "?", "ground_truth": "1"}])

Types are canonical, so that trainers can join built files: text is `string`, whole numbers are int64, fractions
float64. Values that Arrow cannot hold exactly (mixed types, integers over 64 bits, mappings without keys) become JSON
text, listed in the file's metadata. So do mappings whose keys are data, such as ids, because each key would be a
column. A ground truth never becomes JSON text: trainers compare with it (see `MixedTruths`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from treetune.chat.images import has_images
from treetune.data.arrow_values import (
    children_of,
    drop_nulls,
    is_list,
    to_iso_texts,
    to_json_text,
    to_python,
    with_json_fields,
)
from treetune.data.rows.image_columns import IMAGES, image_column, with_part
from treetune.data.rows.row_codec import MAPPINGS, TRUTHS, with_parts
from treetune.errors import TasksetError

_READ_BY_TRAINERS = frozenset((*TRUTHS, *MAPPINGS, "prompt", IMAGES))

MOST_KEYS = 64
"""How many distinct keys a mapping may have across all rows. A mapping with more is open, and becomes JSON text."""

MixedAs = Literal["refused", "text", "json"]
"""How to store ground truths of several types: an error, JSON text as elsewhere, or Arrow's JSON type, from which
`datasets` gives trainers the original values."""

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class MixedTruths(TasksetError):
    """Raised for ground truths that do not fit one Arrow type."""

    path = ""


def refuse_truths(path: str, rows: Mapping[int, Any] | None = None) -> MixedTruths:
    """Build the error. `rows` holds the clashing values by row number."""
    shown = ", ".join(f"{value!r:.80} in row {number}" for number, value in (rows or {}).items())
    error = MixedTruths(
        f"{path} has values of several types, or a number that does not fit in 64 bits"
        f"{f' ({shown})' if shown else ''}: no parquet column can hold them",
        remedy="make all of them text, or all of them lists or mappings of one shape",
    )
    error.path = path
    return error


def find_clash(values: list[Any]) -> dict[int, Any]:
    """Find the first value that no type can hold together with the values before it, and the first of those, by
    position."""

    def is_mixed(count: int) -> bool:
        return _hold_exactly(values[:count], "", exact=False) is None

    end = bisect_left(range(1, len(values)), True, key=is_mixed)
    first = next((place for place, value in enumerate(values[:end]) if value is not None), end)
    return {place: values[place] for place in dict.fromkeys((first, end))}


# Tables from rows


def table_of(rows: list[dict[str, Any]], *, exact: bool = True, truths: MixedAs = "refused") -> pa.Table:
    """Convert rows to a table whose metadata lists what is JSON text. It works column by column and, in mappings, key
    by key, so that one mixed key does not turn everything into JSON. `exact`: keep every value exactly."""
    columns: dict[str, pa.Array] = {}
    json_fields: list[str] = []
    if exact and _mixes_contents(rows):
        rows = list(map(with_parts, rows))
    for name in keys_of(rows):
        values: list[Any] = [row.get(name) for row in rows]
        if name == IMAGES and (images := image_column(values)) is not None:
            columns[name] = images
            continue
        if name == "prompt" and not exact:
            columns[name] = messages_column(values)
            continue
        infer = infer_mapping if name in MAPPINGS else infer_column
        try:
            columns[name] = infer(values, name, json_fields, exact=exact, truths=truths)
        except (UnicodeEncodeError, TypeError) as error:
            if not exact:
                raise  # the builder names the row
            if isinstance(error, TypeError):
                raise TasksetError(f"{name} has a key that is not text", remedy="use text as its keys") from None
            problem = f"{name} has text that is not valid Unicode: {error.object!r:.80}"
            raise TasksetError(problem, remedy="remove lone surrogates") from None
    return with_json_fields(pa.table(columns), json_fields)


def _mixes_contents(rows: list[dict[str, Any]]) -> bool:
    """Whether images make some contents lists of parts while others are text."""
    prompts = [prompt for row in rows if isinstance(prompt := row.get("prompt"), list)]
    messages = [message for prompt in prompts for message in prompt if isinstance(message, dict)]
    kinds = {type(message.get("content")) for message in messages}
    images = any(IMAGES in row for row in rows) or (list in kinds and has_images(messages))
    return {str, list} <= kinds and images and all(row.get("prompt") and "extra_info" in row for row in rows)


def infer_column(
    values: list[Any], path: str, json_fields: list[str], *, exact: bool = False, truths: MixedAs = "refused"
) -> pa.Array:
    """Convert values to a column of a canonical type. If none holds them, they become JSON text and `json_fields` gets
    the path. Unless `exact` is set, whole numbers among fractions become fractions of the same value."""
    if path in TRUTHS and truths == "json":
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), json_array(values))
    if (column := _hold_exactly(values, path, exact=exact)) is not None:
        return column
    if path in TRUTHS and truths == "refused":
        raise refuse_truths(path)
    json_fields.append(path)
    return json_array(values)


def _hold_exactly(values: list[Any], path: str, *, exact: bool) -> pa.Array | None:
    """Convert values to a column of a canonical type, or return None if JSON text holds them better."""
    if path not in _READ_BY_TRAINERS and _has_open_mapping(values):
        return None  # Arrow takes minutes for thousands of keys
    try:
        array = pa.array(values)
        if pa.struct([]) in _types_in(array.type) or is_open(
            array.type, path
        ):  # parquet cannot store a struct without keys
            return None
        column = conform(array, canonical_type(array.type))
        holds = _is_exact(column, values) if exact else not _turns_booleans(column, values)
        return column if holds else None
    except (pa.ArrowException, OverflowError):
        return None


def is_open(type_: pa.DataType, path: str) -> bool:
    """Whether the values at a path are, or contain, mappings with too many keys for columns."""
    wide = any(types.is_struct(inner) and inner.num_fields > MOST_KEYS for inner in _types_in(type_))
    return wide and path not in _READ_BY_TRAINERS


def _has_open_mapping(values: list[Any]) -> bool:
    if not isinstance(next((value for value in values if value is not None), None), dict):
        return False
    keys: set[Any] = set()
    for value in values:
        if isinstance(value, dict):
            keys.update(value)
            if len(keys) > MOST_KEYS:
                return True
    return False


def infer_mapping(values: list[Any], path: str, json_fields: list[str], **options: Any) -> pa.Array:
    """Convert mappings to a column, key by key, so that one mixed key does not turn everything into JSON."""
    keys = keys_of(values) if all(value is None or isinstance(value, dict) for value in values) else []
    if not keys or "" in keys:  # no path can name the empty key
        return infer_column(values, path, json_fields, **options)
    arrays = [
        infer_column([value.get(key) if value else None for value in values], f"{path}.{key}", json_fields, **options)
        for key in keys
    ]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def keys_of(rows: list[Any]) -> list[str]:
    """Return the keys of all rows, in order of first appearance."""
    return list(dict.fromkeys(chain.from_iterable(row for row in rows if row)))


def _is_exact(array: pa.Array, values: list[Any]) -> bool:
    """Whether all values kept their exact value in this type."""
    certain = (types.is_string, types.is_int64, types.is_boolean, types.is_null, types.is_nested)
    if all(any(is_kind(type_) for is_kind in certain) for type_ in _types_in(array.type)):
        return True
    return bool(_encode_sorted(drop_nulls(values)) == _encode_sorted(to_python(array)))


def _turns_booleans(array: pa.Array, values: list[Any]) -> bool:
    """Whether booleans among fractions became numbers."""
    if not any(types.is_floating(type_) for type_ in _types_in(array.type)):
        return False
    return _count_booleans(values) != _count_booleans(array.to_pylist())


def _count_booleans(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_count_booleans, value))
    return sum(map(_count_booleans, value.values())) if isinstance(value, dict) else isinstance(value, bool)


def _types_in(type_: pa.DataType) -> Iterator[pa.DataType]:
    yield type_
    for number in range(type_.num_fields if types.is_nested(type_) else 0):
        yield from _types_in(type_.field(number).type)


def messages_column(values: list[list[dict[str, Any]]]) -> pa.Array:
    """Convert prompts to a column. If some contents are text and others lists of parts, the text becomes a part: the
    message means the same, and a column has one type."""
    try:
        try:
            array = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            array = pa.array([list(map(with_part, prompt)) for prompt in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        problem = f"prompts that no parquet column can hold: {error}"
        raise TasksetError(problem, remedy="give a key of messages one type in all rows") from None
    return conform(array, canonical_type(array.type))


def prompt_column(contents: pa.Array, system_prompt: str | None) -> pa.Array:
    import numpy as np

    count, roles = len(contents), ["user"]
    if system_prompt is not None:
        roles, order = ["system", "user"], np.zeros(2 * count, dtype=np.int64)
        order[1::2] = np.arange(1, count + 1)
        contents = pa.concat_arrays([pa.array([system_prompt], pa.string()), contents]).take(pa.array(order))
    messages = pa.StructArray.from_arrays([pa.array(roles * count, pa.string()), contents], ["role", "content"])
    offsets = np.arange(0, len(messages) + 1, len(roles), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), messages)


def constant_column(value: str | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.string()) if value is None else pa.repeat(pa.scalar(value, pa.string()), count)


# Types


_CANONICAL = {
    # Dates and times become ISO text, which every trainer and every protocol can carry.
    pa.string(): (types.is_temporal, types.is_decimal, types.is_large_string, types.is_string_view),
    pa.binary(): (types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
    pa.int64(): (types.is_integer,),
    pa.float64(): (types.is_floating,),
}


def canonical_type(type_: pa.DataType) -> pa.DataType:
    if types.is_dictionary(type_):
        return canonical_type(type_.value_type)
    if is_list(type_):
        return pa.list_(canonical_type(type_.value_type))
    if types.is_struct(type_):
        # A struct without keys cannot be stored, so it becomes JSON.
        fields = [(field.name, canonical_type(field.type)) for field in type_]
        return pa.struct(fields) if fields else pa.string()
    kinds = _CANONICAL.items()
    return next((canonical for canonical, tests in kinds if any(test(type_) for test in tests)), type_)


def unify_types(first: pa.DataType, second: pa.DataType, *, exact: bool) -> pa.DataType | None:
    """Return the type that holds both, or None if only JSON can. `exact`: without changing a value, such as 1 to
    1.0."""
    schemas = [pa.schema([("x", first)]), pa.schema([("x", second)])]
    try:
        return pa.unify_schemas(schemas, promote_options="default" if exact else "permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def conform(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert `array` to `type_`: missing keys become nulls, and values that cannot be cast to text become JSON."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if array.type == type_:
        return array
    if types.is_dictionary(array.type):
        return conform(array.dictionary_decode(), type_)
    if types.is_null(array.type):
        return pa.nulls(len(array), type_)
    if types.is_struct(array.type) and types.is_struct(type_):
        children = children_of(array)
        arrays = [
            conform(children[field.name], field.type) if field.name in children else pa.nulls(len(array), field.type)
            for field in type_
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=pc.is_null(array))
    if is_list(array.type) and is_list(type_):
        array = array if types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))
        values = conform(array.flatten(), type_.value_type)  # the values below nulls are gone, so the offsets change
        ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0)).cast(pa.int32())
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
        return pa.ListArray.from_arrays(offsets, values, type=type_, mask=pc.is_null(array))
    if types.is_string(type_) and types.is_temporal(array.type):
        return pa.array(to_iso_texts(array), pa.string())
    is_text = types.is_string(canonical_type(array.type)) and not types.is_nested(array.type)
    if types.is_string(type_) and not is_text:
        return json_array(array.to_pylist())
    return array.cast(type_)


def json_array(values: Iterable[Any]) -> pa.Array:
    """Encode each value as JSON text."""
    return pa.array([None if value is None else to_json_text(value) for value in values], pa.string())
