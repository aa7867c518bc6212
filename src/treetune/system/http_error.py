"""An `HttpError` is sent as the answer to a request; `encode` writes any answer as JSON.

raise HttpError(404, "unknown_path", "there is nothing at /x", remedy="the paths are ...")
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import msgspec

from treetune.errors import TreetuneError, UsageError, format_error

log = logging.getLogger("treetune.serve")


class ErrorAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    error: str
    kind: str
    """The kind of error, for programs."""
    status: int
    path: str | None = None
    """The path of the fault in the body, such as `$.action`."""
    remedy: str | None = None


class HttpError(Exception):
    """An error that is sent as the answer."""

    def __init__(
        self,
        status: int,
        kind: str,
        error: str,
        *,
        path: str | None = None,
        remedy: str | None = None,
        allow: str = "",
        location: str = "",
    ) -> None:
        """`allow` lists the methods that a path accepts; `location` is where the request should go."""
        super().__init__(error)
        self.status, self.kind = status, kind
        self.body = encode(ErrorAnswer(error=error, kind=kind, status=status, path=path, remedy=remedy))
        self.headers = [(b"allow", allow.encode())] if allow else _HEADERS.get(status, [])
        if location:
            self.headers = [(b"location", location.encode())]


_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}


def as_http_error(error: Exception) -> HttpError:
    """Converts any error to an answer. Only errors that are not Treetune's own are logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, UsageError):
        return HttpError(422, "usage", error.message, remedy=error.remedy)
    if isinstance(error, TreetuneError):
        return HttpError(500, "failed", error.message, remedy=error.remedy)
    log.error("a request failed", exc_info=error)
    return HttpError(500, "failed", format_error(error))


_encoder = msgspec.json.Encoder(enc_hook=repr)
_strict_encoder = msgspec.json.Encoder()


def encode(value: Any, strict: bool = False) -> bytes:
    """Encodes `value` as JSON. Other objects are written as their `repr`, or raise TypeError if `strict`."""
    try:
        return (_strict_encoder if strict else _encoder).encode(value)
    except (OverflowError, UnicodeEncodeError):
        # msgspec does not write integers beyond 64 bits or half of a surrogate pair, both of which models sample.
        plain = msgspec.to_builtins(value, enc_hook=None if strict else repr)
        return json.dumps(_replace_infinite(plain), separators=(",", ":")).encode()


def _replace_infinite(value: Any) -> Any:
    """Replaces NaN and infinities with null, because JSON cannot represent them; msgspec does the same."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_infinite(item) for key, item in value.items()}
    return [_replace_infinite(item) for item in value] if isinstance(value, list | tuple) else value
