"""Arrow arrays as numpy arrays, without a copy where that is possible, and without pandas, which `to_numpy` imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, Any]


def mask_of(array: pa.Array) -> Mask:
    """Booleans; null is false."""
    array = array.fill_null(False) if array.null_count else array
    bits = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
    return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)].astype(np.bool_)


def codes_of(array: pa.Array) -> tuple[Numbers, list[Any]]:
    """Each value as its place in a list of the different ones; null is -1."""
    encoded = array.dictionary_encode()
    indices = encoded.indices
    numbers = np.frombuffer(indices.buffers()[1], np.int32)[indices.offset : indices.offset + len(indices)]
    if indices.null_count:
        numbers = np.where(mask_of(indices.is_valid()), numbers, -1)
    return numbers, encoded.dictionary.to_pylist()


def taken(array: Any, places: Numbers) -> Any:
    """The values, or rows, at some places."""
    import pyarrow as pa

    places = np.ascontiguousarray(places, np.int64)
    return array.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)]))


def offsets_of(array: pa.Array) -> Numbers:
    """Where each text or list begins, and where the last ends."""
    import pyarrow as pa

    wide = pa.types.is_large_string(array.type) or pa.types.is_large_list(array.type)
    if not len(array):
        return np.zeros(1, np.int64)
    found = np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)
    return found[array.offset : array.offset + len(array) + 1]


def bytes_of(text: pa.Array) -> memoryview:
    """The text of all values, one after another."""
    buffer = text.buffers()[2] if len(text) else None
    return memoryview(buffer) if buffer is not None else memoryview(b"")


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """A column by its name, its values plain."""
    import pyarrow as pa

    number = batch.schema.get_field_index(name)
    if number < 0:
        return None
    column = batch.column(number)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def field_of(array: pa.Array, name: str) -> pa.Array | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not is_struct(array.type) or array.type.get_field_index(name) < 0:
        return None
    field = pc.struct_field(array, name) if array.null_count else array.field(name)
    return field.dictionary_decode() if pa.types.is_dictionary(field.type) else field


def is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))


def is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
