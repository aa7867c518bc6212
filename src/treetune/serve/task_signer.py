"""TaskSigner: seals tasks with a keyed hash, by which a server knows its own when they come back.

    seal = signer.sign(task)
    task = signer.read_task(data, taskset)      # raises Refused where a task was changed, or made up

The hash is over the task's content with sorted keys, so a client in any language may decode and encode it again. It is
checked before anything of a task is interpreted: no class is looked up, no file opened, for a task that is not ours.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec

from treetune.serve.errors import Refused
from treetune.serve.zmq.codec import pack_sorted, unpack
from treetune.serve.zmq.wire import fields_and_seal
from treetune.task import Task
from treetune.taskset import Taskset

SEAL_BYTES = 16


def new_key() -> bytes:
    return secrets.token_bytes(32)


class TaskSigner:
    def __init__(self, key: bytes, scope: str = "") -> None:
        # The scope is the tasks' fingerprint: a seal is worth nothing on another taskset.
        self._key = hashlib.blake2b(scope.encode(), key=key[:64], digest_size=32).digest()

    def sign(self, task: Task) -> bytes:
        return self._hash(pack_sorted(task))

    def check(self, data: bytes | msgspec.Raw) -> None:
        fields, seal = fields_and_seal(data)
        if not hmac.compare_digest(self._hash(pack_sorted(fields)), seal):
            raise Refused(
                f"task {fields.get('idx')!r:.40} is not one that this server gave out: changed, made up, or from "
                "before a restart that kept no key",
                remedy="sample again; to keep tasks valid over a restart, serve with --state DIR or --key-file FILE",
            )

    def read_task(self, data: bytes | msgspec.Raw, taskset: Taskset[Any, Any]) -> Task:
        """The task in a request, as its concrete type."""
        self.check(data)
        return concrete_task(data, taskset)

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=SEAL_BYTES).digest()


def concrete_task(data: bytes | msgspec.Raw, taskset: Taskset[Any, Any]) -> Task:
    return unpack(data, taskset.type_of(unpack(data, Task)))
