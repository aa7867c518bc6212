"""Seals: a keyed hash by which a server knows its own tasks when they come back.

    seals = Seals(key, scope=fingerprint)
    seals.check(data)          # raises Refused where a task was changed, or made up

The hash is over the task's content with sorted keys, so a client in any language may decode and encode it again. It is
checked before anything of a task is interpreted: no class is looked up, no file opened, for a task that is not ours.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from treetune.serve.errors import Refused
from treetune.serve.zmq.codec import pack_sorted
from treetune.serve.zmq.wire import fields_and_seal
from treetune.task import Task

SEAL_BYTES = 16


def new_key() -> bytes:
    return secrets.token_bytes(32)


class Seals:
    def __init__(self, key: bytes, scope: str = "") -> None:
        # The scope is the tasks' fingerprint: a seal is worth nothing on another taskset.
        self._key = hashlib.blake2b(scope.encode(), key=key[:64], digest_size=32).digest()

    def of(self, task: Task) -> bytes:
        return self._hash(pack_sorted(task))

    def check(self, data: bytes | msgspec.Raw) -> None:
        fields, seal = fields_and_seal(data)
        if not hmac.compare_digest(self._hash(pack_sorted(fields)), seal):
            raise Refused(
                f"task {fields.get('idx')!r:.40} is not one that this server gave out: changed, made up, or from "
                "before a restart that kept no key",
                remedy="sample again; to keep tasks valid over a restart, serve with --state DIR or --key-file FILE",
            )

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=SEAL_BYTES).digest()
