"""How values become bytes on the wire: msgpack, with integers of any size.

    unpack(pack({"n": 2**70})) == {"n": 2**70}

An integer beyond 64 bits travels as extension 1: its decimal digits. What is no plain value travels as its `repr`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from treetune.serve.errors import BadRequest

BIG_INTEGER = 1
"""The code of the msgpack extension for integers beyond 64 bits."""
_MOST_DIGITS = 4096

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_sorted_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="sorted")


def pack(value: Any) -> bytes:
    return _packed(_encoder, value)


def pack_sorted(value: Any) -> bytes:
    """The same bytes for the same content, whatever the order of its keys."""
    return _packed(_sorted_encoder, value)


def _packed(encoder: msgspec.msgpack.Encoder, value: Any) -> bytes:
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=repr)
        return encoder.encode(_portable(plain))


def unpack(data: bytes | msgspec.Raw, type: type[T]) -> T:
    """`data` as a `type`; anything else is a `BadRequest`."""
    try:
        try:
            decoded: T = _decoder(cast(Any, type)).decode(data)
            return decoded
        except msgspec.ValidationError:
            # A typed integer field refuses the extension, so a big one takes the long way.
            return msgspec.convert(unpack_plain(data), type)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadRequest(f"not a {type.__name__}: {error}") from None


def unpack_plain(data: bytes | msgspec.Raw) -> Any:
    """`data` as dicts, lists, texts and numbers."""
    try:
        return _plain_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadRequest(f"not msgpack: {error}") from None


@lru_cache(maxsize=256)
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type, ext_hook=_extension)


def _extension(code: int, data: memoryview) -> Any:
    if code != BIG_INTEGER or len(data) > _MOST_DIGITS:
        raise msgspec.ValidationError(f"unknown extension {code}")
    return int(bytes(data))


def _portable(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(BIG_INTEGER, str(value).encode())
    if isinstance(value, str):  # a model can sample half of a surrogate pair
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_portable(key): _portable(item) for key, item in value.items()}
    return [_portable(item) for item in value] if isinstance(value, list | tuple) else value


_plain_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
