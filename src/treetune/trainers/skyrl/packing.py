"""Values as bytes and back, exactly: integers of any size, NaN, bytes, dates, decimals.

    pack = Packer(plain=True).pack
    unpacked(pack({"index": 2**70}))

MessagePack for what JSON files and most columns of parquet hold. It would make text of a date, and has no integers over
64 bits: such values are pickled. Only a few types can come out of a pickle here: whoever can write to a cache must not
be able to run code with it.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.rows.sources import File, HubName, Kind

if TYPE_CHECKING:
    import pyarrow as pa

_TYPES = {
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("uuid", "UUID"),
    ("zoneinfo", "ZoneInfo"),
    # What Arrow makes of times to the nanosecond.
    ("pandas", "Timedelta"),
    ("pandas", "Timestamp"),
}
"""What a pickle may hold beside Python's own types."""

_PICKLE = b"\x80\x05"
"""How a pickle begins; MessagePack begins otherwise, but for a mapping without keys, and that is one byte."""

_decode = msgspec.msgpack.Decoder().decode


class UnknownType(Exception):
    """A value that cannot be packed; says its type."""


class Packer:
    """`plain`: the values are known to hold nothing but texts, numbers, truth values, bytes, lists and mappings."""

    def __init__(self, *, plain: bool) -> None:
        self._encode = msgspec.msgpack.Encoder().encode if plain else None
        self._file = io.BytesIO()
        self._pickler = _Pickler(self._file, protocol=5)

    def pack(self, value: Any) -> bytes:
        if self._encode is not None:
            try:
                return self._encode(value)
            except OverflowError:
                pass
        self._file.seek(0)
        self._file.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(value)
        return self._file.getvalue()


def unpacked(content: bytes) -> Any:
    return _Unpickler(io.BytesIO(content)).load() if content.startswith(_PICKLE) else _decode(content)


def is_plain(source: File | HubName) -> bool:
    """Whether a source is known to hold only plain values: a file of JSON, or of parquet with such columns."""
    if isinstance(source, HubName) or source.kind is not Kind.PARQUET:
        return isinstance(source, File)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return all(_is_plain(field.type) for field in pq.read_schema(source.path))
    except (pa.ArrowException, OSError):
        return False  # whoever reads it tells what is wrong


def _is_plain(kind: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_struct(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    leaves = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(is_leaf(kind) for is_leaf in leaves) or types.is_null(kind)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Asked about everything that is of no built-in type."""
        kind = value if isinstance(value, type) else type(value)
        if _name(kind.__module__, kind.__qualname__) not in _TYPES:
            raise UnknownType(f"{kind.__module__}.{kind.__qualname__}")
        if value is not kind and kind.__qualname__ == "ZoneInfo":
            return kind, (value.key,)
        if value is not kind and kind.__qualname__ in ("Timedelta", "Timestamp"):
            return kind, (value.isoformat(),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _name(module, name) not in _TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that was packed")
        return super().find_class(module, name)


def _name(module: str, name: str) -> tuple[str, str]:
    return "pandas" if module.startswith("pandas._libs.") else module, name
