"""The messages between clients and servers: one struct for each request and response, and their encoding as bytes.

A client sends the frames `[request_id, method, head, payload]` and gets `[request_id, data]`. The head identifies the
client and is read before anything is decoded. Payload and data are msgpack maps with the fields below. Every response
has `success` and `error`. An integer beyond 64 bits is sent as extension 1: its decimal digits. Other objects are sent
as their `repr`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.message import without_surrogates
from treetune.core.contract import Limits
from treetune.core.environment import Observation, Step
from treetune.core.policy import Sampling
from treetune.errors import TreetuneError, UsageError
from treetune.play.episode import DeadlinePassed
from treetune.play.protocol import PROTOCOL, NoVariance
from treetune.play.streams import State
from treetune.play.weights import HIGHEST_VERSION, LONGEST_PAUSE, PAUSE_SECONDS, Calls, Stale
from treetune.serve.errors import KINDS, BadRequest, ServeError

T = TypeVar("T")
Version = Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_VERSION)]


class ServerRequest(msgspec.Struct, kw_only=True):
    """The fields of every request."""

    ack: list[bytes] = []
    """Ids of this client's requests whose answers have arrived. The server need not keep those answers."""


class SampleRequest(ServerRequest, kw_only=True):
    index: int | None = None
    """Absent: the next task of the stream. Given: the task at that index; no cursor moves."""
    stream: str = ""
    lease: float | None = None
    """Seconds of the lease. 0: no lease; absent: the server's default. Ignored if an index is given."""


class LeaseRequest(ServerRequest, kw_only=True):
    """Renews or finishes this client's lease on a task."""

    idx: int
    """The `idx` of the task."""
    lease: float | None = None
    """The new duration in seconds."""


class RunRequest(ServerRequest, kw_only=True):
    """A task, with the options that `play/protocol.py` documents. The server decides which models and endpoints it
    offers."""

    task: msgspec.Raw
    model: str | None = None
    endpoint: str | None = None
    sampling: Sampling = Sampling()
    limits: Limits | None = None
    occurrence: int = 0
    step: int | None = None
    attempt: int = 0
    version: Version | None = None
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stale: Stale = "cut"
    finish: bool = True


class RunRolloutRequest(RunRequest, kw_only=True):
    rollout: int = 0


class RunGroupRequest(RunRequest, kw_only=True):
    n: int
    rollouts: list[int] | None = None
    """The indices of its rollouts; absent: 0 to n - 1."""
    of: int | None = None
    no_variance: NoVariance = "keep"
    refills: int = 1


_NO_OPTIONS = {"ack", "task", "rollout", "rollouts", "n", "finish"}


def options_of(request: RunRequest) -> dict[str, Any]:
    """The options of a request that are meant for the host. The door finishes the lease."""
    return {name: getattr(request, name) for name in request.__struct_fields__ if name not in _NO_OPTIONS}


class WeightsRequest(ServerRequest, kw_only=True):
    """Announces the version of a model's weights, a pause, or the end of a pause."""

    model: str | None = None
    endpoint: str | None = None
    version: Version | None = None
    calls: Calls = "finish"
    """How a pause handles running calls."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PAUSE)] = PAUSE_SECONDS
    """The maximum length of the pause."""


class StartRequest(ServerRequest, kw_only=True):
    task: msgspec.Raw
    step: int | None = None


class StepRequest(ServerRequest, kw_only=True):
    episode: str
    action: Any = ""
    turn: int | None = None


class CancelRequest(ServerRequest, kw_only=True):
    id: Any
    """The id of a running request (bytes, or text in UTF-8), or of an episode (text)."""


class ObserveRequest(ServerRequest, kw_only=True):
    task: msgspec.Raw
    reward: float
    stream: str = ""


class StateRequest(ServerRequest, kw_only=True):
    stream: str | None = None


class RestoreRequest(ServerRequest, kw_only=True):
    state: State


class _Numbered(msgspec.Struct, frozen=True):
    idx: int = -1


def read_idx(task: msgspec.Raw) -> int:
    """Reads the `idx` of a task without decoding the rest."""
    return unpack(task, _Numbered).idx


class ServerResponse(msgspec.Struct, kw_only=True):
    success: bool = True
    error: str | None = None
    kind: str | None = None
    """The kind of error, for programs."""
    remedy: str | None = None


class SampleResponse(ServerResponse, kw_only=True):
    task: msgspec.Raw = msgspec.Raw()
    index: int = 0
    """The index of the draw in the stream."""
    attempt: int = 0
    """How often the task was handed out before to clients whose lease expired."""
    lease: float | None = None
    """The length of its lease in seconds."""


class RunResponse(ServerResponse, kw_only=True):
    cut_off: bool = False
    """The rollout has no reward because it became stale. A leased task is handed out again."""


class RunRolloutResponse(RunResponse, kw_only=True):
    trace: msgspec.Raw = msgspec.Raw()


class RunGroupResponse(RunResponse, kw_only=True):
    traces: list[msgspec.Raw] = []
    warnings: list[str] = []


class PauseResponse(ServerResponse, kw_only=True):
    quiet: bool = True
    """No model call is running."""


class StepResponse(ServerResponse, kw_only=True):
    observation: Observation = Observation()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}
    calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """The tool calls that the action made, with their results; absent if it made none."""


class StateResponse(ServerResponse, kw_only=True):
    state: State


def pack_reply(**fields: Any) -> bytes:
    """Packs a response with these fields, which a client decodes as the matching struct, such as `Info`."""
    return pack({"success": True, "error": None, "kind": None, "remedy": None, **fields})


def pack_step(step: Step) -> bytes:
    return pack(
        StepResponse(
            observation=step.observation,
            reward=step.reward,
            done=step.done,
            truncated=step.truncated,
            info=step.info,
            calls=step.calls or msgspec.UNSET,
        )
    )


def to_step(response: StepResponse) -> Step:
    calls = response.calls or []
    return Step(response.observation, response.reward, response.done, response.info, response.truncated, calls)


def failure(error: BaseException) -> ServerResponse:
    """Converts an error to a response."""
    kind = "usage" if isinstance(error, UsageError) else "failed"
    if isinstance(error, ServeError):
        kind = error.kind
    if isinstance(error, DeadlinePassed):
        return ServerResponse(success=False, error=str(error), kind="timeout")
    if isinstance(error, TreetuneError):
        return ServerResponse(success=False, error=error.message, kind=kind, remedy=error.remedy)
    return ServerResponse(success=False, error=f"{type(error).__name__}: {error}", kind=kind)


def error_of(response: ServerResponse) -> ServeError:
    """Converts a response without success to an error."""
    return KINDS.get(response.kind or "", ServeError)(response.error or "failed", remedy=response.remedy)


# The head

CLIENT_BYTES = 16
MOST_HEAD_BYTES = 1 << 12


def pack_head(client: bytes, token: str | None = None, protocol: int = PROTOCOL) -> bytes:
    """The head: one byte for the client's protocol version, its 16 random bytes, and the token."""
    return bytes([protocol]) + client + (token or "").encode()


def read_head(head: bytes) -> tuple[int, bytes, bytes]:
    """Returns the version, the client and the token."""
    if not 1 + CLIENT_BYTES <= len(head) <= MOST_HEAD_BYTES:
        raise BadRequest(f"a head needs a byte for the version, {CLIENT_BYTES} bytes for the client, and the token")
    return head[0], head[1 : 1 + CLIENT_BYTES], head[1 + CLIENT_BYTES :]


# Bytes

MOST_VALUES = 250_000
"""The maximum number of numbers, texts, lists and maps in one request: a byte of msgpack can become 64 bytes of
memory."""
BIG_INTEGER = 1
"""The code of the msgpack extension for integers beyond 64 bits."""
_MOST_DIGITS = 4096

_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_sorted_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="sorted")


def pack(value: Any) -> bytes:
    return _encode(_encoder, value)


def pack_sorted(value: Any) -> bytes:
    """Packs to the same bytes for the same content, regardless of key order."""
    return _encode(_sorted_encoder, value)


def _encode(encoder: msgspec.msgpack.Encoder, value: Any) -> bytes:
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=repr)
        return encoder.encode(_make_portable(plain))


def check_values(data: bytes) -> None:
    """Raises BadRequest if decoding would take too much memory. Small messages pass: each value takes at least a
    byte."""
    if len(data) <= MOST_VALUES:
        return
    at, values = 0, 1  # a lower bound: a list states how many follow
    left = 1
    while left:
        if at >= len(data):
            raise BadRequest("not msgpack: it ends in the middle")
        head, body, items = _SHAPES[data[at]]
        if head:
            length = int.from_bytes(data[at + 1 : at + 1 + head], "big")
            body, items = (body + length, 0) if body >= 0 else (0, length * -body)
        at += 1 + head + body
        left += items - 1
        values += items
        if values > MOST_VALUES:
            raise BadRequest(f"more than {MOST_VALUES:,} values in one request", remedy="send less at once")


def _find_shapes() -> list[tuple[int, int, int]]:
    """By the first byte of a value: the number of bytes that give its length, the number of bytes of its content, and
    the number of values in it. If there is a length, it is added to the content. A negative content is the number of
    values, counted twice for a map."""
    shapes = [(0, 0, 0)] * 256
    for mark in range(16):
        shapes[0x80 + mark], shapes[0x90 + mark] = (0, 0, 2 * mark), (0, 0, mark)
    for mark in range(32):
        shapes[0xA0 + mark] = (0, mark, 0)
    for first, extra in ((0xC4, 0), (0xC7, 1), (0xD9, 0)):  # bytes, extensions, texts
        for power in range(3):
            shapes[first + power] = (1 << power, extra, 0)
    for mark, size in ((0xCA, 4), (0xCB, 8)):
        shapes[mark] = (0, size, 0)
    for power in range(4):
        shapes[0xCC + power] = shapes[0xD0 + power] = (0, 1 << power, 0)
    for power in range(5):
        shapes[0xD4 + power] = (0, 1 + (1 << power), 0)
    shapes[0xDC], shapes[0xDD], shapes[0xDE], shapes[0xDF] = (2, -1, 0), (4, -1, 0), (2, -2, 0), (4, -2, 0)
    return shapes


_SHAPES = _find_shapes()


def unpack(data: bytes | msgspec.Raw, type: type[T]) -> T:
    """Decodes `data` as a `type`. Raises BadRequest if it is anything else."""
    try:
        try:
            decoded: T = _decoder(cast(Any, type)).decode(data)
            return decoded
        except msgspec.ValidationError:
            # A typed integer field refuses the extension, so a big integer is decoded in two steps.
            return msgspec.convert(unpack_plain(data), type)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadRequest(f"not a {type.__name__}: {error}") from None


def unpack_plain(data: bytes | msgspec.Raw) -> Any:
    """Decodes `data` to dicts, lists, texts and numbers."""
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
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {_make_portable(key): _make_portable(item) for key, item in value.items()}
    return [_make_portable(item) for item in value] if isinstance(value, list | tuple) else value
