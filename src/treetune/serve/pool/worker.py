"""A worker of a pool, which runs rollouts and environments for a broker, and the handle through which the broker calls
it.

It connects to the broker's address, reports that it is ready, sends a heartbeat each second, and exits when the broker
does. It sends `ready`, `beat`, `part ID TEXT`, `scored TRACES`, `counted COUNTS`, `done ID DATA` and `failed ID
RESPONSE`. The broker sends `do ID METHOD PAYLOAD`, `stop ID`, `alive` and `end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import zmq

from treetune.core.environment import Action, Sink, show_to
from treetune.core.taskset import Taskset
from treetune.errors import TreetuneError
from treetune.play.episode import DeadlinePassed, Episode
from treetune.play.episode_table import MANY_ENDED, EpisodeEnded, trim_memory
from treetune.play.protocol import Started
from treetune.play.streams import Streams
from treetune.serve.errors import Cancelled, WorkerLost
from treetune.serve.host import HostSpec, Scored, ServerHost
from treetune.serve.messages import WeightsRequest, failure, pack, pack_step, unpack
from treetune.serve.task_signer import concrete_task
from treetune.serve.zmq.sockets import Frames, LoopSocket, connect, new_socket
from treetune.system.threads import call_apart

BEAT_SECONDS = 1.0
ORPHANED_SECONDS = 60.0
"""A worker that receives nothing from its broker for this long exits."""

log = logging.getLogger("treetune.serve")


class MessageBatch:
    """Messages between a broker and a worker. The messages of one round of the event loop are sent as one ZMQ message,
    which is cheaper than one each."""

    def __init__(self, socket: LoopSocket, *to: bytes) -> None:
        self._socket, self._to = socket, to
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, ...]] = []

    def put(self, *message: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.send)
        self._waiting.append(message)

    def send(self) -> None:
        """Sends the waiting messages now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._socket.send([*self._to, msgspec.msgpack.encode(waiting)])


read_batch = msgspec.msgpack.Decoder(list[Annotated[list[bytes], msgspec.Meta(min_length=1)]]).decode
"""Raises `msgspec.MsgspecError` if the other side's protocol differs, as in another version of Treetune."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a worker needs to start, apart from the taskset. It is pickled, and only a broker sends it to
    workers."""

    identity: bytes = b""
    address: str = ""
    """The address of the broker."""
    server_key: bytes | None = None
    """The broker's public key, if the connection is encrypted."""
    host: HostSpec
    parent: int | None = None
    """The process id of the broker, if it is on the same machine."""


class Worker:
    def __init__(self, spec: WorkerSpec, taskset: Taskset[Any, Any]) -> None:
        """The tasks were already counted, so a worker need not load them for that."""
        self._spec, self._taskset = spec, taskset
        self._host = ServerHost(Streams(taskset), spec.host, self._report)
        self._episodes: dict[str, Episode] = {}
        """Live environments; the broker has their table."""
        self._ended_since_trim = 0
        self._methods: dict[bytes, Callable[[bytes], Awaitable[bytes]]] = {
            b"run_rollout": functools.partial(self._host.run_request, "run_rollout"),
            b"run_group": functools.partial(self._host.run_request, "run_group"),
            b"weights": self._change_weights,
            b"make": self._make,
            b"open": self._open,
            b"step": self._step,
            b"close": self._close,
        }
        self._tasks: dict[bytes, asyncio.Task[bytes]] = {}
        self._ended = asyncio.Event()
        self._heard = time.monotonic()

    async def run(self) -> None:
        socket = new_socket(zmq.DEALER, identity=self._spec.identity)
        connect(socket, self._spec.address, self._spec.server_key)
        self._socket = LoopSocket(socket, self.take_batch)
        self._messages = MessageBatch(self._socket)
        self._messages.put(b"ready")
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), BEAT_SECONDS)
            self._messages.put(b"beat")
            if self._ended_since_trim >= max(MANY_ENDED, len(self._episodes)):
                self._ended_since_trim = 0
                trim_memory()
            abandoned = self._spec.parent is not None and os.getppid() != self._spec.parent
            if abandoned or time.monotonic() - self._heard > ORPHANED_SECONDS:
                break
        self._ended.set()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(episode.close() for episode in self._episodes.values()))
        await self._host.close()
        self._messages.send()
        self._socket.close()

    # Messages from the broker

    def take_batch(self, batch: list[Frames]) -> None:
        self._heard = time.monotonic()
        for frames in batch:
            try:
                messages = read_batch(frames[-1])
            except msgspec.MsgspecError:
                log.error("a message of the broker cannot be read: is the broker of another version?")
                self._ended.set()
                return
            for message in messages:
                match message:
                    case [b"do", id, method, payload]:
                        self._begin(id, method, payload)
                    case [b"stop", id]:
                        if (running := self._tasks.get(id)) is not None:
                            running.cancel()
                    case [b"end"]:
                        self._ended.set()

    def _begin(self, id: bytes, method: bytes, payload: bytes) -> None:
        self._tasks[id] = task = asyncio.get_running_loop().create_task(self._do(id, method, payload))
        task.add_done_callback(functools.partial(self._finish, id, method))

    async def _do(self, id: bytes, method: bytes, payload: bytes) -> bytes:
        show_to(lambda text: self._messages.put(b"part", id, text.encode("utf-8", "replace")))
        return await self._methods[method](payload)

    def _finish(self, id: bytes, method: bytes, task: asyncio.Task[bytes]) -> None:
        self._tasks.pop(id, None)
        if task.cancelled() and self._ended.is_set():
            return  # the caller still waits: the broker gives the call to another worker
        error = Cancelled("cancelled") if task.cancelled() else task.exception()
        if error is None:
            self._messages.put(b"done", id, task.result())
            return
        if not isinstance(error, TreetuneError | DeadlinePassed):
            log.error("%s failed", method.decode(), exc_info=error)
        self._messages.put(b"failed", id, pack(failure(error)))

    def _report(self, traces: list[Scored]) -> None:
        self._messages.put(b"scored", msgspec.msgpack.encode(traces))
        if counts := self._host.counts:
            for name in ("pauses", "expired_pauses"):  # the broker counts these
                del counts[name]
            self._messages.put(b"counted", msgspec.msgpack.encode(counts))
            counts.clear()

    # Besides rollouts

    async def _change_weights(self, payload: bytes) -> bytes:
        return pack(await self._host.change_weights(*unpack(payload, tuple[str, WeightsRequest])))

    async def _make(self, payload: bytes) -> bytes:
        return pack(await call_apart(self._taskset.__getitem__, unpack(payload, int)))

    async def _open(self, payload: bytes) -> bytes:
        id, data = unpack(payload, tuple[str, msgspec.Raw])
        task = concrete_task(data, self._taskset)
        episode = self._episodes[id] = await Episode.start(self._taskset, task, self._spec.host.limits)
        return pack(Started(id, episode.observation, episode.tools, episode.contract.resolved))

    async def _step(self, payload: bytes) -> bytes:
        id, action = unpack(payload, tuple[str, Action])
        episode = self._episodes.get(id)
        if episode is None:
            raise EpisodeEnded(id, None)
        try:
            return pack_step(episode.with_ending(await episode.step(action)))
        finally:
            if episode.over:
                self._forget(id)

    async def _close(self, payload: bytes) -> bytes:
        if (episode := self._forget(payload.decode())) is not None:
            await episode.close()
        return b""

    def _forget(self, id: str) -> Episode | None:
        self._ended_since_trim += 1
        return self._episodes.pop(id, None)


class PendingCall(msgspec.Struct, eq=False):
    """A call that a worker is running."""

    future: asyncio.Future[bytes]
    show: Sink | None
    """Called with the parts that the environment shows during the call."""
    steps: str = ""
    """The task whose episode this call steps: the step may kill the worker."""


class WorkerEnded(WorkerLost):
    """The worker that ran the call has died."""

    def __init__(self, how: str = "", calls: int = 0) -> None:
        super().__init__("the worker of this episode died", remedy="start another")
        self.how, self.calls = how, calls


class SuspectEpisode(msgspec.Struct, frozen=True):
    """A live episode of a task that may have killed a worker."""

    task: str
    company: int
    """How many such episodes its worker may hold, including this one."""


class WorkerHandle(msgspec.Struct, eq=False):
    """A worker as the broker sees it."""

    identity: bytes
    messages: MessageBatch
    handle: Any = None
    """The engine's handle."""
    ready: bool = False
    leaving: bool = False
    heard: float = 0.0
    calls: dict[bytes, PendingCall] = {}
    episodes: set[str] = set()
    suspects: dict[str, SuspectEpisode] = {}
    """Episodes whose task may have killed a worker. They count as guests while they live, and share the worker with no
    other episodes."""
    gone: bool = False
    """It has ended."""
    load: int = 0
    """Running rollouts and live episodes."""
    guests: int = 0
    """Calls that any worker could run (all except steps of the episodes here), and suspects that live here."""
    number: int = 0
    """The number of its last call."""
    limits: list[int] = []
    """The maximum number of guests that each suspect among them allows."""

    def may_take(self, company: int | None) -> bool:
        """Whether it may take a call. Suspects share a worker with few others; other calls never join suspects."""
        return not self.limits if company is None else self.guests < min([company, *self.limits])

    async def ask(
        self,
        method: str,
        payload: bytes,
        size: int = 0,
        *,
        opens: str | None = None,
        show: Sink | None = None,
        steps: str = "",
    ) -> bytes:
        """Returns the worker's answer, or raises its error. If the caller is cancelled, the worker stops the call.
        `opens` is the episode that lives in this worker from then on; `steps` names the task whose episode is
        stepped."""
        if self.gone:
            raise WorkerEnded
        self.number += 1
        id = self.number.to_bytes(8, "big")
        call = self.calls[id] = PendingCall(asyncio.get_running_loop().create_future(), show, steps)
        self.load += size
        self.messages.put(b"do", id, method.encode(), payload)
        try:
            data = await call.future
        except asyncio.CancelledError:
            self.messages.put(b"stop", id)
            if opens is not None:  # the episode may have just started
                self.messages.put(b"do", b"", b"close", opens.encode())
            raise
        finally:
            del self.calls[id]
            self.load -= size
        if opens is not None:
            self.episodes.add(opens)
            self.load += 1
        return data
