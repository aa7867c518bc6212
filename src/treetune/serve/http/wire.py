"""What the HTTP episode server is asked and answers: one struct for each body.

    POST /api/episode/step   {"episode_id": "e-1", "action": "42", "turn": 0}
    200                      {"observation": {...}, "reward": 1.0, "done": true, "info": {"success": true}}

Field for field this is what `docs/task_server_api.md` and `/openapi.json` say.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from treetune.environment import Observation
from treetune.errors import TreetuneError, UsageError
from treetune.serve.errors import ServeError
from treetune.serve.zmq.wire import failure

MOST_IN_BATCH = 1024
API_VERSION = 2
"""2: an episode that ends has a reward; one that failed has none, and its answer is an error."""
B = TypeVar("B")


class ActionBody(msgspec.Struct):
    """An action with its type; text may also be sent as a plain string."""

    type: str
    """text, json, messages, image; any other type reaches the environment as JSON."""
    content: Any


class StartBody(msgspec.Struct):
    # The bounds are for the schema: a number outside them is refused where every index is.
    task_index: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "exclusiveMaximum": 2**62})] | None = None
    """Which task of the order; absent: the next by the server's cursor."""
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    """A name for this request: the same name again gets the same episode, so a lost answer can be asked for again."""


class StepBody(msgspec.Struct):
    episode_id: str
    action: str | ActionBody
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Counts from 0; one that was played gets its first answer again. Without it a step cannot safely be repeated."""


class CancelBody(msgspec.Struct):
    episode_id: str


class StartBatchBody(msgspec.Struct):
    episodes: Annotated[list[StartBody], msgspec.Meta(min_length=1, max_length=MOST_IN_BATCH)]


class StepBatchBody(msgspec.Struct):
    steps: Annotated[list[StepBody], msgspec.Meta(min_length=1, max_length=MOST_IN_BATCH)]


class StartAnswer(msgspec.Struct):
    episode_id: str
    observation: Observation
    info: dict[str, Any] = {}


class StepAnswer(msgspec.Struct):
    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = {}
    """`success` when done, `truncated` where a limit ended it, and what the environment tells."""


class CancelAnswer(msgspec.Struct):
    episode_id: str
    cancelled: bool = True


class StartBatchAnswer(msgspec.Struct):
    episodes: list[msgspec.Raw]
    """In the order asked: each an answer of start, or an error with its `status`."""


class StepBatchAnswer(msgspec.Struct):
    steps: list[msgspec.Raw]
    """In the order asked: each an answer of step, or an error with its `status`."""


class InfoAnswer(msgspec.Struct, kw_only=True):
    name: str
    num_tasks: int | None
    """null where there is no end."""
    cursor: int
    by_index: bool
    """Whether start may name a `task_index`."""
    fingerprint: str
    max_episodes: int
    idle_seconds: float
    deadline_seconds: float
    max_turns: int | None = None
    max_batch: int = MOST_IN_BATCH
    features: list[str] = msgspec.field(default_factory=lambda: ["turn", "request_id", "batch", "websocket", "sse"])
    """What the server can do beyond the five endpoints."""
    api_version: int = API_VERSION


class HealthAnswer(msgspec.Struct, kw_only=True):
    status: str = "ok"
    """`ok`, or `stopping` (with 503)."""
    episodes: int = 0
    workers: int = 0
    """Worker processes; 0: all in the server's own."""


class ErrorAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    error: str
    kind: str
    """What kind of error, for programs."""
    status: int
    path: str | None = None
    """Where in the body the fault is, such as `$.action`."""
    remedy: str | None = None


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        kind: str,
        error: str,
        *,
        path: str | None = None,
        remedy: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(error)
        self.status, self.kind, self.retry_after, self.allow = status, kind, retry_after, allow
        self.body = encode(ErrorAnswer(error=error, kind=kind, status=int(status), path=path, remedy=remedy))


_STATUS = {
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "stopping": HTTPStatus.SERVICE_UNAVAILABLE,
    "timeout": HTTPStatus.GATEWAY_TIMEOUT,
    "cancelled": HTTPStatus.GONE,
    "usage": HTTPStatus.UNPROCESSABLE_ENTITY,
    "bad_request": HTTPStatus.UNPROCESSABLE_ENTITY,
    "worker_lost": HTTPStatus.SERVICE_UNAVAILABLE,
}
RETRY_SECONDS = 1


def http_error(error: TreetuneError | Exception, path: str | None = None) -> HttpError:
    """An error of the host as an answer; `path` is the part of the body that a wrong request is wrong in."""
    if isinstance(error, HttpError):
        return error
    told = failure(error)
    kind = told.kind or "failed"
    status = _STATUS.get(kind, HTTPStatus.INTERNAL_SERVER_ERROR)
    again = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return HttpError(
        status,
        kind,
        told.error or "failed",
        path=path if isinstance(error, UsageError | ServeError) and kind == "usage" else None,
        remedy=told.remedy,
        retry_after=RETRY_SECONDS if again else None,
    )


_encoder = msgspec.json.Encoder(enc_hook=repr)


def encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        # An integer beyond 64 bits, or half of a surrogate pair, which a model can sample.
        plain = _finite(msgspec.to_builtins(value, enc_hook=repr))
        return json.dumps(plain, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    """JSON has no NaN: null, as msgspec writes it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_body(decoder: msgspec.json.Decoder[B], data: bytes) -> B:
    """The body as what the endpoint takes; anything else is a 422 with the path of the fault."""
    try:
        return _decoded(decoder, data or b"{}")
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `")
        raise HttpError(422, "bad_request", problem, path=path.rstrip("`") or "$") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HttpError(422, "bad_request", f"the body is no JSON: {error}", path="$") from None


def _decoded(decoder: msgspec.json.Decoder[B], data: bytes) -> B:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        # 3.0 is an integer in JSON, and what some programs write for 3.
        return msgspec.convert(json.loads(data, parse_float=_number, parse_constant=_no_constant), decoder.type)
    except msgspec.DecodeError:
        if b"\\ud" not in data.lower():
            raise
        # Half of a surrogate pair, which a model can sample: only Python's own reader takes it.
        return msgspec.convert(json.loads(data, parse_constant=_no_constant), decoder.type)


def _number(digits: str) -> float | int:
    number = float(digits)
    return int(number) if number.is_integer() else number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
