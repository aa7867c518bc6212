"""A worker of a pool: a process, or a Ray actor, that does jobs for a broker.

It connects to the broker's address, says that it is ready, beats once a second, and ends with its broker. What it says
(see `mail.py`): `ready`, `beat`, `part ID TEXT`, `done ID DONE`; what it is told: `do ID METHOD PAYLOAD`, `stop ID`,
`alive`, `end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import time
from typing import Any

import msgspec
import uvloop
import zmq

from treetune.environment import shown_to
from treetune.episode import Limits
from treetune.host import LocalHost
from treetune.serve.access import connect
from treetune.serve.models import Models, ModelsConfig
from treetune.serve.pool.message_batch import Mail, opened
from treetune.serve.task_signer import Seals
from treetune.serve.work import Work
from treetune.serve.zmq.sockets import Frames, LoopSocket, new_socket
from treetune.streams import Streams
from treetune.taskset import Taskset

BEAT_SECONDS = 1.0
ORPHANED_SECONDS = 60.0
"""A worker that has not heard of its broker for so long ends."""

log = logging.getLogger("treetune.serve")


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to begin. It is pickled, and only ever passed from a broker to what it starts."""

    identity: bytes
    address: str
    server_key: bytes | None
    """The broker's public key, where the way to it is encrypted."""
    taskset: Taskset[Any, Any]
    count: int | None
    """How many tasks there are; None where there is no end."""
    counts: list[int | None]
    """The same for each part of a mixture that could not tell without loading its tasks."""
    models: ModelsConfig
    limits: Limits
    capacity: int
    key: bytes
    scope: str
    parent: int | None = None
    """The broker's process, where it is on the same machine."""


def counts_of(taskset: Taskset[Any, Any]) -> list[int | None]:
    """How many tasks each part has, so that no worker need load them to know."""
    return [None if _knows_count(part) else part.count() for part in _parts(taskset)]


def _tell_counts(taskset: Taskset[Any, Any], counts: list[int | None]) -> None:
    for part, count in zip(_parts(taskset), counts, strict=True):
        if count is not None:
            part.count = functools.partial(int, count)  # type: ignore[method-assign]


def _knows_count(taskset: Taskset[Any, Any]) -> bool:
    return taskset.INFINITE or taskset.overrides("count")


def _parts(taskset: Taskset[Any, Any]) -> list[Taskset[Any, Any]]:
    return [taskset, *(inner for part in getattr(taskset, "sources", []) for inner in _parts(part))]


def run_worker(spec: WorkerSpec) -> None:
    """The whole life of a worker process."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may reach the whole group, and are the broker's to answer
    uvloop.run(_lived(spec))
    # Threads of user code that hang must not keep the process.
    os._exit(0)


async def _lived(spec: WorkerSpec) -> None:
    await Worker(spec).run()


class Worker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        _tell_counts(spec.taskset, spec.counts)
        streams = Streams(spec.taskset)
        streams.count = spec.count
        streams.cheap = False  # tasks are made here only where that takes long
        self._models = Models(spec.models, spec.taskset)
        self._host = LocalHost(streams, self._models.policy_of, spec.limits)
        self._work = Work(self._host, Seals(spec.key, spec.scope), spec.capacity)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._heard = time.monotonic()

    async def run(self) -> None:
        socket = new_socket(zmq.DEALER, identity=self._spec.identity)
        connect(socket, self._spec.address, self._spec.server_key)
        self._socket = LoopSocket(socket, self._on_batch)
        self._mail = Mail(self._socket)
        self._mail.put(b"ready")
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), BEAT_SECONDS)
            self._mail.put(b"beat")
            if self._is_orphan():
                break
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._host.close()
        await self._models.close()
        self._mail.send()
        self._socket.close()

    def _is_orphan(self) -> bool:
        if self._spec.parent is not None and os.getppid() != self._spec.parent:
            return True
        return time.monotonic() - self._heard > ORPHANED_SECONDS

    def _on_batch(self, batch: list[Frames]) -> None:
        self._heard = time.monotonic()
        for frames in batch:
            try:
                heard = opened(frames[-1])
            except msgspec.MsgspecError:
                log.error("what the broker says cannot be read: is it of another version?")
                self._ended.set()
                return
            for said in heard:
                if said[0] == b"do":
                    task = asyncio.get_running_loop().create_task(self._do(said[1], said[2].decode(), said[3]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif said[0] == b"stop":
                    self._work.stop(said[1])
                elif said[0] == b"end":
                    self._ended.set()

    async def _do(self, id: bytes, method: str, payload: bytes) -> None:
        with shown_to(lambda text: self._mail.put(b"part", id, text.encode("utf-8", "replace"))):
            done = await self._work.do(method, id, payload)
        self._mail.put(b"done", id, msgspec.msgpack.encode(done))
