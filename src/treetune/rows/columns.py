"""Columns from values: Arrow arrays of the canonical types, JSON where values are of mixed types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treetune.errors import TasksetError
from treetune.rows.schema import canonical_type, conform, json_array, refuse_mixed_truths

if TYPE_CHECKING:
    import pyarrow as pa


def keys_of(rows: list[Any]) -> list[str]:
    """The keys of all rows, in the order of their first appearance; mostly all have those of the first."""
    first = rows[0] or {}
    keys = first.keys()
    same = all([row is not None and row.keys() == keys for row in rows])  # a list: faster than a generator
    return list(first) if same else list(dict.fromkeys(key for row in rows if row for key in row))


def struct(values: list[Any], name: str, mixed: list[str]) -> pa.Array:
    """Key by key, so that one mixed key does not make JSON of all."""
    import pyarrow as pa

    keys = keys_of(values)
    if not keys:
        return pa.nulls(len(values))
    arrays = [inferred([(value or {}).get(key) for value in values], f"{name}.{key}", mixed) for key in keys]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def inferred(values: list[Any], path: str, mixed: list[str]) -> pa.Array:
    import pyarrow as pa

    try:
        array = pa.array(values)
        if array.type != pa.struct([]):
            return conform(array, canonical_type(array.type))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        if path == "reward_model.ground_truth" and (isinstance(error, OverflowError) or "not in range" in str(error)):
            problem = "a ground truth holds a whole number that does not fit in 64 bits"
            raise TasksetError(problem, remedy="make it text") from None
        refuse_mixed_truths(path)
    mixed.append(path)
    return json_array(values)


def messages_column(values: list[list[dict[str, Any]]]) -> pa.Array:
    """Prompts as a column. Where some contents are text and others lists of parts, the text becomes a part: the same
    message, and a column has one type."""
    import pyarrow as pa

    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        values = [[in_parts(message) for message in prompt] for prompt in values]
        try:
            array = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise TasksetError(
                f"prompts that no parquet column can hold: {error}",
                remedy="give a key of messages one type in all rows",
            ) from None
    return conform(array, canonical_type(array.type))


def are_misshapen(prompts: pa.Array) -> bool:
    """Whether some entry of some prompt is no message: it has no role, or says what is no text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    messages = prompts.flatten()
    if not pa.types.is_struct(messages.type) or messages.type.get_field_index("role") < 0:
        return True
    roles = pc.struct_field(messages, "role")
    content = messages.type.field("content").type if messages.type.get_field_index("content") >= 0 else pa.null()
    said = pa.types.is_string(content) or pa.types.is_nested(content) or pa.types.is_null(content)
    return bool(roles.null_count) or not pa.types.is_string(roles.type) or not said


def in_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prompts(contents: pa.Array, system_prompt: str | None) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    count = len(contents)
    if system_prompt is None:
        roles, offsets = constant("user", count), np.arange(count + 1, dtype=np.int32)
    else:
        order = np.zeros(2 * count, dtype=np.int64)
        order[1::2] = np.arange(1, count + 1)
        contents = pa.concat_arrays([pa.array([system_prompt], pa.string()), contents]).take(pa.array(order))
        roles = pa.array(["system", "user"] * count, pa.string())
        offsets = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    messages = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(offsets), messages)


def constant(value: str | None, count: int) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(count, pa.string()) if value is None else pa.repeat(pa.scalar(value, pa.string()), count)
