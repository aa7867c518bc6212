"""Values exactly as they were written, whatever file they come from.

Parquet fills the missing keys of a mapping with nulls, JSON leaves them out: here a key whose value is null is absent.
Nulls inside lists stay. Integers of any size and floats keep their exact value. A date or a time is its ISO text.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import TasksetError

if TYPE_CHECKING:
    import pyarrow as pa

_encode = msgspec.json.Encoder().encode
json_value = msgspec.json.Decoder().decode


def pruned(value: Any) -> Any:
    """`value` without the keys that are None."""
    if isinstance(value, Mapping):
        return {key: pruned(item) for key, item in value.items() if item is not None}
    return [pruned(item) for item in value] if isinstance(value, list | tuple) else value


def json_line(value: Any) -> bytes:
    """A value as JSON, without the keys that are None."""
    try:
        encoded = _encode(value)
        # A None, and a float that JSON cannot spell, both come out as null: only then is the slow walk needed.
        if b"null" in encoded:
            _refuse_unspeakable(value)
            encoded = _encode(pruned(value))
    except UnicodeEncodeError as error:
        raise TasksetError(f"text that is no Unicode: {error.object!r:.80}", remedy="remove lone surrogates") from None
    except TypeError as error:
        raise TasksetError(f"a value that JSON has no form for: {error}") from None
    return encoded


def json_text(value: Any) -> str:
    return json_line(value).decode()


def python_values(array: pa.Array) -> list[Any]:
    """An Arrow array as Python values, without the keys that are null; whole columns at a time, which is several
    times faster than `to_pylist` and a walk over its result."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_struct(kind):
        made = rows_of([field.name for field in kind], array.flatten(), len(array))
        if array.null_count:
            made = [row if valid else None for row, valid in zip(made, array.is_valid().to_pylist(), strict=True)]
        return made
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        items = python_values(array.flatten())
        lengths = pc.list_value_length(array)
        # Not compared with 1: that would import pandas.
        if not array.null_count and len(items) == len(array) and pc.max(lengths).as_py() == 1:
            return [[item] for item in items]
        lists: list[Any] = []
        start = 0
        for length in lengths.to_pylist():
            lists.append(None if length is None else items[start : (start := start + length)])
        return lists
    if pa.types.is_dictionary(kind):
        return python_values(array.dictionary_decode())
    if pa.types.is_temporal(kind):
        return iso_texts(array)
    if isinstance(kind, pa.BaseExtensionType):
        stored = python_values(array.storage)
        # How the `datasets` library writes columns of mixed types.
        return [_parsed(text) for text in stored] if kind.extension_name == "arrow.json" else stored
    if pa.types.is_nested(kind):
        return [pruned(value) for value in array.to_pylist(maps_as_pydicts="strict")]
    values: list[Any] = array.to_pylist()
    return values


def iso_texts(times: pa.Array) -> list[str | None]:
    """Dates, times and durations as JSON has them."""
    import pyarrow as pa

    if pa.types.is_timestamp(times.type) and times.type.unit == "ns":  # Python has microseconds
        times = times.cast(pa.timestamp("us", times.type.tz), safe=False)
    texts: list[str | None] = msgspec.to_builtins(times.to_pylist())
    return texts


def rows_of(names: list[str], arrays: list[Any], count: int) -> list[Any]:
    """Rows of columns, each without the keys that are null there."""
    if not names:
        return [{} for _ in range(count)]
    columns = [python_values(array) for array in arrays]
    if not any(array.null_count for array in arrays):
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in zip(*columns, strict=True)
    ]


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else pruned(json_value(text))
    except msgspec.DecodeError:
        return text  # the library stores some text without its quotes


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cycle collector, which would look through a batch of rows again and again and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_unspeakable(value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_unspeakable(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise TasksetError(f"JSON has no {value}", remedy="leave the key out, or write .parquet")
