"""What clients and servers say to each other: one struct for each request and response, and how they become bytes.

A client sends the frames `[request_id, method, payload]` and gets `[request_id, data]`; payload and data are msgpack
maps with the fields below. Every response has `success` and `error`. An integer beyond 64 bits travels as extension 1:
its decimal digits. What is no plain value travels as its `repr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from treetune.environment import Observation, Step
from treetune.episode import DeadlinePassed, Limits
from treetune.errors import TreetuneError, UsageError
from treetune.policy import Sampling
from treetune.serve.errors import KINDS, BadRequest, ServeError
from treetune.streams import State

T = TypeVar("T")


class Request(msgspec.Struct, kw_only=True):
    """What every request may carry."""

    token: str | None = None
    protocol: int = 1
    """The version that the client speaks; another than the server's (`info` has it) is refused."""
    ack: list[bytes] = []
    """Request ids whose answers have arrived: the server need not keep those any longer."""


class SampleRequest(Request, kw_only=True):
    index: int | None = None
    """Absent: the next of the stream. Given: the task at that index, and no cursor moves."""
    stream: str = ""


class RunRequest(Request, kw_only=True):
    """What a rollout and a group have in common."""

    task: msgspec.Raw
    model: str | None = None
    """One of those that the server lists; absent: its own."""
    endpoint: str | None = None
    """An address on the server's list."""
    sampling: Sampling = Sampling()
    limits: Limits | None = None
    occurrence: int = 0


class RunRolloutRequest(RunRequest, kw_only=True):
    rollout: int = 0


class RunGroupRequest(RunRequest, kw_only=True):
    n: int
    rollouts: list[int] | None = None
    """The numbers of its rollouts; absent: 0 to n - 1."""


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value; the fields of the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None}


class StartRequest(Request, kw_only=True):
    task: msgspec.Raw


class StepRequest(Request, kw_only=True):
    episode: str
    action: Any = ""
    turn: int | None = None


class CancelRequest(Request, kw_only=True):
    id: Any
    """Of a request that is under way (bytes, or text in UTF-8), or of an episode (text)."""


class ObserveRequest(Request, kw_only=True):
    task: msgspec.Raw
    reward: float
    stream: str = ""


class StateRequest(Request, kw_only=True):
    stream: str | None = None


class RestoreRequest(Request, kw_only=True):
    state: State


class Response(msgspec.Struct, kw_only=True):
    success: bool = True
    error: str | None = None
    kind: str | None = None
    """What kind of error, for programs."""
    remedy: str | None = None


class SampleResponse(Response, kw_only=True):
    task: msgspec.Raw = msgspec.Raw()
    index: int = 0
    """Which draw of the stream it is."""


class RunRolloutResponse(Response, kw_only=True):
    trace: msgspec.Raw = msgspec.Raw()


class RunGroupResponse(Response, kw_only=True):
    traces: list[msgspec.Raw] = []
    warnings: list[str] = []


class StepResponse(Response, kw_only=True):
    observation: Observation = Observation()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class StateResponse(Response, kw_only=True):
    state: State


def pack_reply(**fields: Any) -> bytes:
    """A response with these fields; a client reads them as what they are, such as an `Info`."""
    return pack({"success": True, "error": None, "kind": None, "remedy": None, **fields})


def pack_step(step: Step) -> bytes:
    return pack(
        StepResponse(
            observation=step.observation, reward=step.reward, done=step.done, truncated=step.truncated, info=step.info
        )
    )


def to_step(response: StepResponse) -> Step:
    return Step(response.observation, response.reward, response.done, response.info, response.truncated)


def failure(error: BaseException) -> Response:
    """The response that says what went wrong."""
    kind = "usage" if isinstance(error, UsageError) else "failed"
    if isinstance(error, ServeError):
        kind = error.kind
    if isinstance(error, DeadlinePassed):
        return Response(success=False, error=str(error), kind="timeout")
    if isinstance(error, TreetuneError):
        return Response(success=False, error=error.message, kind=kind, remedy=error.remedy)
    return Response(success=False, error=f"{type(error).__name__}: {error}", kind=kind)


def error_of(response: Response) -> ServeError:
    """What a response that is no success says."""
    return KINDS.get(response.kind or "", ServeError)(response.error or "failed", remedy=response.remedy)


# Bytes

BIG_INTEGER = 1
"""The code of the msgpack extension for integers beyond 64 bits."""
_MOST_DIGITS = 4096

_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_sorted_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="sorted")


def pack(value: Any) -> bytes:
    return _encode(_encoder, value)


def pack_sorted(value: Any) -> bytes:
    """The same bytes for the same content, whatever the order of its keys."""
    return _encode(_sorted_encoder, value)


def _encode(encoder: msgspec.msgpack.Encoder, value: Any) -> bytes:
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=repr)
        return encoder.encode(_make_portable(plain))


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
        return _decoder(Any).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadRequest(f"not msgpack: {error}") from None


@lru_cache(maxsize=256)
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type, ext_hook=_read_extension)


def _read_extension(code: int, data: memoryview) -> Any:
    if code != BIG_INTEGER or len(data) > _MOST_DIGITS:
        raise msgspec.ValidationError(f"unknown extension {code}")
    return int(bytes(data))


def _make_portable(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(BIG_INTEGER, str(value).encode())
    if isinstance(value, str):  # a model can sample half of a surrogate pair
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_make_portable(key): _make_portable(item) for key, item in value.items()}
    return [_make_portable(item) for item in value] if isinstance(value, list | tuple) else value
