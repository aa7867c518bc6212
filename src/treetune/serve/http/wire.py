"""Requests and answers of the HTTP episode server: one struct per body.

    POST /api/episode/step   {"episode_id": "e-1", "action": "42", "turn": 0}
    200                      {"observation": {...}, "reward": 1.0, "done": true, "info": {"success": true}}

`docs/task_server_api.md` documents the same fields, and so does `openapi.json`, which a test generates from here and
compares.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.images import url_of
from treetune.core.contract import Contract
from treetune.core.environment import Observation, Step
from treetune.errors import EnvironmentFault, TreetuneError
from treetune.play.episode import DeadlinePassed
from treetune.play.episode_table import EpisodeEnded, NameTaken, WrongTurn
from treetune.serve.messages import failure
from treetune.system.http_body import strip_strings
from treetune.system.http_error import HttpError, encode

log = logging.getLogger("treetune.serve")
MOST_IN_BATCH = 1024
MOST_VALUES = 200_000
"""The maximum number of lists, objects and items in one body: eight megabytes of empty lists would take half a
gigabyte."""
MOST_DEPTH = 128
"""The maximum depth of nested lists and objects."""
API_VERSION = 2
"""Version 2: an episode that ends has a reward; a failed episode has none, and its answer is an error."""
UNKNOWN_TASK = "unknown_task"
"""The kind of the error if no task has the requested uid."""
B = TypeVar("B")
_CALL = {"properties": {"id": {"type": "string"}, "type": {"const": "function"}, "function": {"type": "object"}}}
ToolCalls = Annotated[
    list[Any],
    # A malformed call is reported to the model; it does not fail the request.
    msgspec.Meta(extra_json_schema={"items": {"description": "A call in OpenAI's form.", **_CALL}}),
]


class ActionBody(msgspec.Struct):
    """An action with its type, or a message with calls of tools; text may also be sent as a plain string."""

    type: str | msgspec.UnsetType = msgspec.UNSET
    """text, json, messages or image; any other type reaches the environment as JSON. Not used for a message."""
    content: Any = msgspec.UNSET
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    """The role of a message, in OpenAI's form."""
    tool_calls: ToolCalls | msgspec.UnsetType = msgspec.UNSET
    """The tool calls of a message."""

    def __post_init__(self) -> None:
        if self.role is msgspec.UNSET and self.tool_calls is msgspec.UNSET:
            for name in ("type", "content"):
                if getattr(self, name) is msgspec.UNSET:
                    raise ValueError(f"Object missing required field `{name}`")

    @property
    def value(self) -> Any:
        """Returns the action in the form that an episode takes."""
        if self.role is msgspec.UNSET and self.tool_calls is msgspec.UNSET:
            return {"type": self.type, "content": self.content}
        return write_message("" if self.content is msgspec.UNSET else self.content, self.tool_calls or [])


class StartBody(msgspec.Struct):
    # The bounds are for the schema: a number outside them is refused where every index is.
    task_index: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "exclusiveMaximum": 2**62})] | None = None
    """The index of the task; absent: the next task by the server's cursor."""
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    """A name for this request. Repeating the name returns the same episode, so a lost answer can be requested again."""
    step: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    """The trainer's step, which is stored in the episode's trace."""
    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    """The uid of the task, as in its row. It is looked up at `task_index` first, then among all tasks."""


class MoveBody(msgspec.Struct, kw_only=True):
    """A step without the id of its episode."""

    action: str | ActionBody | msgspec.UnsetType = msgspec.UNSET
    """May be absent only if `tool_calls` is given."""
    tool_calls: ToolCalls | msgspec.UnsetType = msgspec.UNSET
    """Tool calls in OpenAI's form; a text in `action` becomes the text of the same message."""
    turn: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Counts from 0. A repeated turn gets its first answer again. Without it, a step cannot be repeated safely."""

    def __post_init__(self) -> None:
        if self.action is msgspec.UNSET and self.tool_calls is msgspec.UNSET:
            raise ValueError("Object missing required field `action`")

    @property
    def value(self) -> Any:
        """Returns the action in the form that an episode takes."""
        action = self.action.value if isinstance(self.action, ActionBody) else self.action
        if self.tool_calls is msgspec.UNSET:
            return action
        said = action.get("content") if isinstance(action, dict) else action
        return write_message("" if said is msgspec.UNSET else said, self.tool_calls)


class StepBody(MoveBody, kw_only=True):
    episode_id: str


def write_message(content: Any, calls: list[Any]) -> dict[str, Any]:
    """Builds a message as the action of an episode."""
    return {"type": "json", "content": {"role": "assistant", "content": content, "tool_calls": calls}}


class CancelBody(msgspec.Struct):
    episode_id: str


def _batch_of(part: str) -> msgspec.Meta:
    """A batch is not refused because of one of its parts, neither by this description nor by the server."""
    wrong = {"description": "Anything else is answered with an error in its place."}
    schema = {"items": {"anyOf": [{"$ref": f"#/components/schemas/{part}"}, wrong]}}
    return msgspec.Meta(min_length=1, max_length=MOST_IN_BATCH, extra_json_schema=schema)


class StartBatchBody(msgspec.Struct):
    """Its parts are read one by one (`read_part`), so that a wrong one fails alone."""

    episodes: Annotated[list[Any], _batch_of("StartBody")]


class StepBatchBody(msgspec.Struct):
    steps: Annotated[list[Any], _batch_of("StepBody")]


class StartAnswer(msgspec.Struct):
    episode_id: str
    observation: Observation
    info: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    """The available tools, in OpenAI's form."""
    contract: Contract = Contract()
    """The contract of the episode: its limits, and the meaning of its reward."""


class StepAnswer(msgspec.Struct):
    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = {}
    """`success` when done, `truncated` if a limit ended the episode, and the environment's own info."""
    calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """The tool calls of the action and their results; absent if it called none."""


class CancelAnswer(msgspec.Struct):
    episode_id: str
    cancelled: bool = True


class StartBatchAnswer(msgspec.Struct):
    episodes: list[msgspec.Raw]
    """In the order of the request: each is an answer of start, or an error with its `status`."""


class StepBatchAnswer(msgspec.Struct):
    steps: list[msgspec.Raw]
    """In the order of the request: each is an answer of step, or an error with its `status`."""


class InfoAnswer(msgspec.Struct, kw_only=True):
    name: str
    num_tasks: int | None
    """null if the tasks are endless."""
    cursor: int
    by_index: bool
    """Whether start may name a `task_index`."""
    fingerprint: str
    max_episodes: int
    idle_seconds: float
    deadline_seconds: float
    contract: Contract = Contract()
    """The contract of an episode of the first task; the answer to a start has the contract of that episode."""
    max_batch: int = MOST_IN_BATCH
    features: list[str] = msgspec.field(
        default_factory=lambda: ["turn", "request_id", "batch", "websocket", "sse", "tools", "uid"]
    )
    """The server's features beyond the five endpoints."""
    api_version: int = API_VERSION


def check_info(step: Step) -> Step:
    """Returns the step if it can be written as JSON."""
    for key in step.info:
        if not isinstance(key, str):
            raise EnvironmentFault(f"a key of `info` is {key!r:.60}", remedy="the keys of `info` must be text")
    return step


class HealthAnswer(msgspec.Struct, kw_only=True):
    status: str = "ok"
    """`ok`, or `stopping` (with 503)."""
    episodes: int = 0
    workers: int = 0
    """The number of worker processes; 0: everything runs in the server's process."""


_STATUS = {
    "busy": 429,
    "stopping": 503,
    "timeout": 504,
    "cancelled": 410,
    "usage": 422,
    "bad_request": 422,
    "worker_lost": 503,
}


def to_http_error(error: BaseException, path: str | None = None) -> HttpError:
    """Converts an error to an answer. `path` is the faulty part of the body of a malformed request."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, EpisodeEnded):
        if error.why is None:
            return HttpError(404, "unknown_episode", f"there is no episode {error.id!r:.80}", path="$.episode_id")
        return HttpError(410, error.why.kind, error.why.error, remedy="start another")
    if isinstance(error, WrongTurn):
        return HttpError(409, "usage", error.message, path="$.turn", remedy="send the next turn, or no turn")
    if isinstance(error, NameTaken):
        return HttpError(409, "usage", error.message, path="$.request_id", remedy=error.remedy)
    if not isinstance(error, TreetuneError | DeadlinePassed):
        log.error("a request failed", exc_info=error)
    found = failure(error)
    kind, remedy = found.kind or "failed", found.remedy
    if kind == "timeout":
        remedy = "serve with a larger --limits.timeout"
    path = path if kind == "usage" else None
    return HttpError(_STATUS.get(kind, 500), kind, found.error or "failed", path=path, remedy=remedy)


def read_content(part: dict[str, Any]) -> str | tuple[str, str]:
    """Reads a part of a message as text, or as the type and the Base64 data of an image."""
    if part["type"] == "text":
        return str(part["text"])
    url = url_of(part) or ""
    head, _, data = url.partition(";base64,")
    if head.startswith("data:image/") and data:
        return head.removeprefix("data:"), data
    return f"[image {url}]"


def read_body(kind: type[B], data: bytes) -> B:
    """Reads the body as the struct of an endpoint. Anything else is a 422 with the path of the fault."""
    check_shape(data)
    try:
        return decode(kind, data or b"{}")
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `")
        raise HttpError(422, "bad_request", problem, path=path.rstrip("`") or "$") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(422, "bad_request", f"the body is not JSON: {error}", path="$") from None


def read_part(kind: type[B], part: Any) -> B:
    """Reads a part of a batch, as it would be read alone."""
    try:
        return msgspec.convert(part, kind)
    except msgspec.ValidationError:
        return read_body(kind, encode(part))


_BRACKETS = re.compile(rb"[\[\]{}]")


def check_shape(data: bytes) -> None:
    """Refuses JSON that is small in bytes but large or deeply nested once decoded. Counting shows that most bodies are
    harmless. For the others, strings are removed first, because brackets and commas in strings have no meaning."""
    if len(data) <= MOST_DEPTH:  # true for most steps
        return
    opened = data.count(b"[") + data.count(b"{")
    if opened <= MOST_DEPTH and opened + data.count(b",") <= MOST_VALUES:
        return
    bare = strip_strings(data)
    if bare.count(b"[") + bare.count(b"{") + bare.count(b",") > MOST_VALUES:
        raise HttpError(413, "too_large", f"a body may have at most {MOST_VALUES} values", path="$")
    depth = deepest = 0
    for bracket in _BRACKETS.findall(bare):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise HttpError(422, "bad_request", f"lists and objects are nested deeper than {deepest} levels", path="$")


_decoder_of: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)


def decode(kind: type[B], data: bytes) -> B:
    """Decodes like msgspec, but also accepts 3.0 for an integer, as JSON allows, and half of a surrogate pair."""
    try:
        value: B = _decoder_of(kind).decode(data)
        return value
    except msgspec.MsgspecError:
        plain = json.loads(data, parse_float=_parse_number, parse_constant=_parse_number)
        return msgspec.convert(plain, kind)


def _parse_number(digits: str) -> float | int:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is not a number in JSON")
    return int(number) if number.is_integer() else number


@cache
def describe_api(needs_token: bool = False) -> bytes:
    """Describes the server as OpenAPI 3.1: a file that `tests/support/openapi.py` generates from the structs above."""
    whole = json.loads(resources.files("treetune.serve.http").joinpath("openapi.json").read_bytes())
    return encode({**whole, "security": [{"token": []}] if needs_token else []})
