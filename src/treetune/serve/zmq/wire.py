"""What clients and servers say to each other: one struct for each request and response.

A client sends the frames `[request_id, method, payload]` and gets `[request_id, data]`; payload and data are msgpack
maps with the fields below. Every response has `success` and `error`. A task travels as a map of all its fields, those
of a subclass included, with two marks: `$kind`, the name of its class, and `$seal`, which lets it come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from treetune.environment import Observation, Step
from treetune.episode import DeadlinePassed, Limits
from treetune.errors import TasksetError, TreetuneError, UsageError
from treetune.host import Health, Info
from treetune.policy import Sampling
from treetune.serve.errors import KINDS, BadRequest, ServeError
from treetune.serve.zmq.codec import pack, unpack, unpack_plain
from treetune.streams import State
from treetune.task import ForeignTask, Task
from treetune.trace import Trace

KIND, SEAL = "$kind", "$seal"


class Request(msgspec.Struct, kw_only=True):
    """What every request may carry."""

    token: str | None = None
    protocol: int = 1
    """The version that the client speaks (`info` tells the server's): one that speaks another is told so."""
    ack: list[bytes] = []
    """Request ids whose answers have arrived: the server need not keep those any longer."""


class SampleRequest(Request, kw_only=True):
    index: int | None = None
    """Absent: the next of the stream. Given: the task at that index, and no cursor moves."""
    stream: str = ""


class RunRolloutRequest(Request, kw_only=True):
    task: msgspec.Raw
    model: str | None = None
    """One of those that the server lists; absent: its own."""
    endpoint: str | None = None
    """An address on the server's list."""
    sampling: Sampling = Sampling()
    limits: Limits | None = None
    occurrence: int = 0
    rollout: int = 0


class RunGroupRequest(Request, kw_only=True):
    task: msgspec.Raw
    n: int
    model: str | None = None
    endpoint: str | None = None
    sampling: Sampling = Sampling()
    limits: Limits | None = None
    occurrence: int = 0
    rollouts: list[int] | None = None
    """The numbers of its rollouts; absent: 0 to n - 1."""


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


class HealthResponse(Health, kw_only=True):
    success: bool = True
    error: str | None = None
    kind: str | None = None
    remedy: str | None = None


class InfoResponse(Info, kw_only=True):
    success: bool = True
    error: str | None = None
    kind: str | None = None
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


class StartResponse(Response, kw_only=True):
    episode: str = ""
    observation: Observation = Observation()


class StepResponse(Response, kw_only=True):
    observation: Observation = Observation()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class CancelResponse(Response, kw_only=True):
    found: bool = False


class StateResponse(Response, kw_only=True):
    state: State | None = None


class StatsResponse(Response, kw_only=True):
    """A running server in figures, for `treetune top`."""

    stats: dict[str, Any] = {}


def pack_step(step: Step) -> bytes:
    response = StepResponse(
        observation=step.observation, reward=step.reward, done=step.done, truncated=step.truncated, info=step.info
    )
    return pack(response)


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


def error_of(response: Response | HealthResponse | InfoResponse) -> ServeError:
    """What a response that is no success says."""
    return KINDS.get(response.kind or "", ServeError)(response.error or "failed", remedy=response.remedy)


# Tasks and traces, which keep what a subclass adds


class WireTask(ForeignTask, frozen=True, kw_only=True):
    """A task as a client has it, with the seal of the server that gave it."""

    kind: str = "Task"
    seal: bytes = b""


class WireTrace(Trace, kw_only=True):
    """A trace as it travels: its task is a map with all its own fields."""

    task: msgspec.Raw  # type: ignore[assignment]


class _Marks(msgspec.Struct):
    kind: str = msgspec.field(name=KIND, default="Task")
    seal: bytes = msgspec.field(name=SEAL, default=b"")


def pack_task(task: Task, seal: bytes = b"") -> bytes:
    if isinstance(task, WireTask):
        base = {name: getattr(task, name) for name in Task.__struct_fields__}
        return pack({**base, **task.own, KIND: task.kind, SEAL: seal or task.seal})
    return _extend(pack(task), _marks_of(type(task).__name__) + pack(seal), 2)


def unpack_task(data: bytes | msgspec.Raw, types: Mapping[str, type[Task]]) -> tuple[Task, bytes]:
    """A task as its concrete type where that is known, else a `WireTask`; and its seal."""
    marks = unpack(data, _Marks)
    kind = {"Task": Task, "ForeignTask": ForeignTask}.get(marks.kind) or types.get(marks.kind)
    if kind is not None:
        return unpack(data, kind), marks.seal
    fields = unpack_plain(data)
    own = {name: value for name, value in fields.items() if name not in Task.__struct_fields__ and name[:1] != "$"}
    base = unpack(data, Task)
    known = {name: getattr(base, name) for name in Task.__struct_fields__}
    return WireTask(**known, kind=marks.kind, seal=marks.seal, own=own), marks.seal


def unpack_trace(data: bytes | msgspec.Raw, task: Task) -> Trace:
    """A trace, with its task of the same type as the one that was sent."""
    wire = unpack(data, WireTrace)
    fields = {name: getattr(wire, name) for name in Trace.__struct_fields__}
    fields["task"] = unpack(wire.task, type(task)) if not isinstance(task, WireTask) else task
    return Trace(**fields)


def _extend(map_bytes: bytes, pairs: bytes, count: int) -> bytes:
    """A msgpack map with `count` more pairs at its end."""
    first = map_bytes[0] if map_bytes else 0
    if first & 0xF0 == 0x80:
        size, start = first & 0x0F, 1
    elif first == 0xDE:
        size, start = int.from_bytes(map_bytes[1:3], "big"), 3
    else:
        raise TasksetError("a task must encode as a map of its fields", remedy="do not make it array_like")
    size += count
    header = bytes([0x80 | size]) if size < 16 else b"\xde" + size.to_bytes(2, "big")
    return header + map_bytes[start:] + pairs


@lru_cache(maxsize=256)
def _marks_of(kind: str) -> bytes:
    return pack(KIND) + pack(kind) + pack(SEAL)


def fields_and_seal(data: bytes | msgspec.Raw) -> tuple[dict[str, Any], bytes]:
    """A task as it came: its plain fields without the marks, and its seal."""
    fields = unpack_plain(data)
    if not isinstance(fields, dict):
        raise BadRequest("a task is a map of its fields")
    seal = fields.pop(SEAL, b"")
    fields.pop(KIND, None)
    return fields, seal if isinstance(seal, bytes) else b""
