"""What the HTTP episode server is asked and answers: one struct for each body.

    POST /api/episode/step   {"episode_id": "e-1", "action": "42", "turn": 0}
    200                      {"observation": {...}, "reward": 1.0, "done": true, "info": {"success": true}}

Field for field this is what `docs/task_server_api.md` says; `/openapi.json` is made of it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec

from treetune.environment import Observation
from treetune.episode import DeadlinePassed
from treetune.episode_book import EpisodeEnded, WrongTurn
from treetune.errors import TreetuneError
from treetune.serve.messages import failure

log = logging.getLogger("treetune.serve")
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
        self, status: int, kind: str, error: str, *, path: str | None = None, remedy: str | None = None, allow: str = ""
    ) -> None:
        """`allow` names the methods that a path takes."""
        super().__init__(error)
        self.status, self.kind = int(status), kind
        self.body = encode(ErrorAnswer(error=error, kind=kind, status=self.status, path=path, remedy=remedy))
        self.headers = _HEADERS.get(self.status, [])
        if allow:
            self.headers = [(b"allow", allow.encode())]


_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    413: [(b"connection", b"close")],  # the rest of the body is not wanted
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}
_STATUS = {
    "busy": 429,
    "stopping": 503,
    "timeout": 504,
    "cancelled": 410,
    "usage": 422,
    "bad_request": 422,
    "worker_lost": 503,
}


def to_http_error(error: Exception, path: str | None = None) -> HttpError:
    """An error as an answer; `path` is the part of the body that a wrong request is wrong in."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, EpisodeEnded):
        if error.why is None:
            return HttpError(404, "unknown_episode", f"there is no episode {error.id!r:.80}", path="$.episode_id")
        return HttpError(410, error.why.kind, error.why.error, remedy="start another")
    if isinstance(error, WrongTurn):
        return HttpError(409, "usage", error.message, path="$.turn", remedy="send the next turn, or none")
    if not isinstance(error, TreetuneError | DeadlinePassed):
        log.error("a request failed", exc_info=error)
    found = failure(error)
    kind, remedy = found.kind or "failed", found.remedy
    if kind == "timeout":
        remedy = "serve with a larger --limits.timeout"
    path = path if kind == "usage" else None
    return HttpError(_STATUS.get(kind, 500), kind, found.error or "failed", path=path, remedy=remedy)


_encoder = msgspec.json.Encoder(enc_hook=repr)


def encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return encode_unusual(value, enc_hook=repr)


def encode_unusual(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """What msgspec does not write: an integer beyond 64 bits, and half of a surrogate pair (models sample it)."""
    plain = _replace_infinite(msgspec.to_builtins(value, enc_hook=enc_hook))
    return json.dumps(plain, separators=(",", ":")).encode()


def _replace_infinite(value: Any) -> Any:
    """JSON has no NaN: null, as msgspec writes it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_infinite(item) for key, item in value.items()}
    return [_replace_infinite(item) for item in value] if isinstance(value, list | tuple) else value


def read_body(kind: type[B], data: bytes) -> B:
    """The body as what the endpoint takes; anything else is a 422 with the path of the fault."""
    try:
        return decode(kind, data or b"{}")
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `")
        raise HttpError(422, "bad_request", problem, path=path.rstrip("`") or "$") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HttpError(422, "bad_request", f"the body is no JSON: {error}", path="$") from None


_decoder_of: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)


def decode(kind: type[B], data: bytes) -> B:
    """As msgspec does; it also takes 3.0 for an integer, as JSON has it, and half of a surrogate pair."""
    try:
        value: B = _decoder_of(kind).decode(data)
        return value
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        parse_float: Any = _parse_number
    except msgspec.DecodeError:
        if b"\\ud" not in data.lower():
            raise
        parse_float = None
    return msgspec.convert(json.loads(data, parse_float=parse_float, parse_constant=_refuse_constant), kind)


def _parse_number(digits: str) -> float | int:
    number = float(digits)
    return int(number) if number.is_integer() else number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# As OpenAPI

_CODES = {
    401: "No token, or a wrong one.",
    403: "Asked by a web page from elsewhere.",
    404: "No such episode.",
    409: "A turn that is not the next, and whose answer is not kept any more.",
    410: "The episode is over: finished, cancelled, expired, failed, or lost with its worker.",
    413: "The body is too large.",
    422: "The body is wrong; `path` says where.",
    429: "As many episodes as may live; `Retry-After` says when to ask again.",
    500: "The environment failed; the episode is over.",
    503: "The server is stopping, or its workers cannot be started; `Retry-After` says when to ask again.",
    504: "The environment took longer than its limit; the episode is over.",
}
_COMMON = [401, 403, 413, 422]
_POSTS: dict[str, tuple[str, type, type, list[int]]] = {
    "start": ("Begin an episode.", StartBody, StartAnswer, [410, 429, 500, 503, 504]),
    "step": ("Do an action.", StepBody, StepAnswer, [404, 409, 410, 500, 504]),
    "cancel": ("End an episode.", CancelBody, CancelAnswer, [404, 410]),
    "start_batch": ("Begin several.", StartBatchBody, StartBatchAnswer, []),
    "step_batch": ("Do an action in each of several.", StepBatchBody, StepBatchAnswer, []),
}
_GETS: dict[str, tuple[str, type, list[int]]] = {
    "/api/task/info": ("What is served.", InfoAnswer, [401, 403]),
    "/api/health": ("Whether it is ready.", HealthAnswer, [403, 503]),
}
_LINKS = {
    name: {
        "operationId": name,
        "description": f"What was begun: {what}.",
        "requestBody": {"episode_id": "$response.body#/episode_id", **more},
    }
    for name, what, more in [("step", "do an action in it", {"turn": 0}), ("cancel", "end it", {})]
}


@cache
def describe_api(needs_token: bool = False) -> bytes:
    """The server as OpenAPI 3.1, made from the structs above: it cannot differ from what the server takes."""
    bodies = [body for _, body, _, _ in _POSTS.values()]
    answers = [answer for _, _, answer, _ in _POSTS.values()] + [answer for _, answer, _ in _GETS.values()]
    kinds = [*bodies, *answers, ErrorAnswer]
    references, components = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {}, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(kinds, references, strict=True))

    def describe(name: str, summary: str, answer: type, codes: list[int], **body: Any) -> dict[str, Any]:
        responses = _describe_responses(schemas[answer], sorted(codes), schemas[ErrorAnswer])
        return {"operationId": name, "summary": summary, **body, "responses": responses}

    paths: dict[str, Any] = {}
    for name, (summary, body, answer, codes) in _POSTS.items():
        taken = {"required": body is not StartBody, "content": _json(schemas[body])}
        post = describe(name, summary, answer, _COMMON + codes, requestBody=taken)
        paths[f"/api/episode/{name}"] = {"post": post}
    for path, (summary, answer, codes) in _GETS.items():
        paths[path] = {"get": describe(path.rpartition("/")[2], summary, answer, codes)}
    paths["/api/health"]["get"]["security"] = []
    paths["/api/episode/start"]["post"]["responses"]["200"]["links"] = _LINKS
    # Where it is asked for with `Accept: text/event-stream`.
    step = paths["/api/episode/step"]["post"]["responses"]["200"]
    step["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "Treetune task server", "version": "1", "summary": "Episodes of a taskset, over HTTP."},
        "security": [{"token": []}] if needs_token else [],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole)


def _describe_responses(good: Any, codes: list[int], error: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "As asked.", "content": _json(good)}}
    for code in codes:
        found[str(code)] = {"description": _CODES[code], "content": _json(error)}
        if code in (429, 503):
            found[str(code)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return found


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
