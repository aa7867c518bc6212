"""Signs tasks on the wire with a keyed hash, so that a server recognises its own tasks when they return.

    data = pack_task(task, signer.sign(task))
    task = signer.read_task(data, taskset)      # raises TaskRefused if a task was changed or forged

A task is sent as a map of all its fields, including those of a subclass, with two extra keys: `$kind`, the name of its
class, and `$seal`. The hash covers the content with sorted keys, so a client in any language may decode it and encode
it again. The server checks the hash before it interprets the task. For a task from elsewhere, it loads no class and
opens no file.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from treetune.core.task import ForeignTask, Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.serve.errors import BadRequest, TaskRefused
from treetune.serve.messages import pack, pack_sorted, unpack, unpack_plain

KIND, SEAL = "$kind", "$seal"
_SEAL_BYTES = 16


def new_key() -> bytes:
    return secrets.token_bytes(32)


class TaskSigner:
    def __init__(self, key: bytes, scope: str = "") -> None:
        # The scope is the tasks' fingerprint: a seal is not valid for another taskset.
        self._key = hashlib.blake2b(scope.encode(), key=key[:64], digest_size=32).digest()

    def sign(self, task: Task) -> bytes:
        return self._hash(pack_sorted(_fields_of(task)))

    def read_task(self, data: bytes | msgspec.Raw, taskset: Taskset[Any, Any]) -> Task:
        """Checks the seal of a task in a request and returns the task as its concrete type."""
        fields = unpack_plain(data)
        if not isinstance(fields, dict):
            raise BadRequest("a task must be a map of its fields")
        seal = fields.pop(SEAL, b"")
        fields.pop(KIND, None)
        if not isinstance(seal, bytes) or not hmac.compare_digest(self._hash(pack_sorted(fields)), seal):
            raise TaskRefused(
                f"task {fields.get('idx')!r:.40} was not handed out by this server: changed, made up, or from before "
                "a restart that kept no key",
                remedy="sample again; to keep tasks valid over a restart, serve with --state DIR or --key-file FILE",
            )
        return concrete_task(data, taskset)

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=_SEAL_BYTES).digest()


def concrete_task(data: bytes | msgspec.Raw, taskset: Taskset[Any, Any]) -> Task:
    return unpack(data, taskset.type_of(unpack(data, Task)))


class WireTask(ForeignTask, frozen=True, kw_only=True):
    """A task on a client, with the seal of the server that sent it."""

    kind: str = "Task"
    seal: bytes = b""


class _Marks(msgspec.Struct):
    kind: str = msgspec.field(name=KIND, default="Task")
    seal: bytes = msgspec.field(name=SEAL, default=b"")


def pack_task(task: Task, seal: bytes = b"") -> bytes:
    if isinstance(task, WireTask):
        base = {name: getattr(task, name) for name in Task.__struct_fields__}
        return pack({**base, **task.own, KIND: task.kind, SEAL: seal or task.seal})
    return pack({**_fields_of(task), KIND: type(task).__name__, SEAL: seal})


def _fields_of(task: Task) -> dict[str, Any]:
    """All fields by their names on the wire, including those that have their default value."""
    fields, names = msgspec.structs.asdict(task), task.__struct_encode_fields__
    return fields if names == task.__struct_fields__ else dict(zip(names, fields.values(), strict=True))


def unpack_task(data: bytes | msgspec.Raw, types: Mapping[str, type[Task]]) -> tuple[Task, bytes]:
    """Unpacks a task as its concrete type if that is known, otherwise as a `WireTask`; and its seal."""
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
    """Unpacks a trace of the task that was sent."""
    trace = unpack(data, Trace)
    trace.task = task
    return trace
