"""The ZMQ door of a server: takes messages in batches, and gives every request one reply.

    EnvServer(taskset, doors=[ZmqDoor("tcp://127.0.0.1:5555")])

What a batch drew is on disk before any of its replies is sent. Replies are kept by request id, so that a client may
repeat a request whatever became of the first. What is asked for is the host's to do.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
import zmq

from treetune.episode_book import EpisodeEnded, Terms
from treetune.errors import TreetuneError, UsageError, user_code
from treetune.host import MOST_IN_GROUP, PROTOCOL
from treetune.serve import messages
from treetune.serve.access import check_address, load_curve_key
from treetune.serve.errors import BadRequest, Busy, Cancelled, Denied, Misused, Stopping, WorkerLost
from treetune.serve.messages import Request, failure, pack, unpack
from treetune.serve.server import Door, EnvServer
from treetune.serve.task_signer import pack_task
from treetune.serve.zmq.sockets import MOST_BYTES, Frames, LoopSocket, bind_address, encrypt_server, new_socket
from treetune.streams import Draw
from treetune.task import Task

log = logging.getLogger("treetune.serve")
_MOST_WAITING = 20_000
"""Samples that wait for a slow taskset, before the answer is `busy`."""
_LONGEST_ID = 64
_SHRINK_SECONDS = 5.0
_NEED_PROTOCOL = {"run_rollout", "run_group", "start", "step"}
"""Methods whose response an older client would misread."""


class Call(NamedTuple):
    """A request under way: who asks, under which id, for what."""

    identity: bytes
    id: bytes
    method: str
    payload: bytes


class Running(NamedTuple):
    """Work under way, and the identities that wait for its reply."""

    task: asyncio.Task[bytes]
    identities: list[bytes]


Handler = Callable[[Call, Any], bytes | None]
"""Takes the request; gives the response, or None where it will come later."""


class ZmqDoor(Door):
    name = "zmq"

    def __init__(self, address: str = "tcp://127.0.0.1:5555") -> None:
        """Port 0 takes a free one."""
        self.address = address
        self.replies = ReplyCache()
        self._terms = Terms(render=messages.pack_step)
        self._socket: LoopSocket | None = None
        self._running: dict[bytes, Running] = {}
        """By request id."""
        self._ready: list[tuple[bytes, bytes, bytes]] = []
        """The replies of the batch in hand."""
        self.methods: dict[bytes, tuple[type[Request] | None, Handler]] = {
            b"health": (None, self._health),  # answered whatever it says
            b"info": (Request, self._info),
            b"sample": (messages.SampleRequest, self._sample),
            b"run_rollout": (Request, self._run),
            b"run_group": (messages.RunGroupRequest, self._run),
            b"start": (messages.StartRequest, self._start),
            b"step": (messages.StepRequest, self._step),
            b"cancel": (messages.CancelRequest, self._cancel),
            b"observe": (messages.ObserveRequest, self._observe),
            b"state": (messages.StateRequest, self._state),
            b"restore": (messages.RestoreRequest, self._restore),
            b"stats": (Request, self._stats),
        }

    # Its life

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        check_address(self.address, server.config.access)
        self._token = server.config.access.token

    async def open(self) -> None:
        socket = new_socket(zmq.ROUTER, most_bytes=MOST_BYTES)
        if (file := self.server.config.access.curve_key) is not None:
            self.public_key = encrypt_server(socket, load_curve_key(file))
        self.address = bind_address(socket, self.address)
        self._socket = LoopSocket(socket, self.take_batch)
        self._shrinker = asyncio.create_task(self._shrink())

    def under_way(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        if self._socket is None:
            return
        for running in list(self._running.values()):
            running.task.cancel()
        while self._running:  # their replies are sent when they have ended
            await asyncio.wait([running.task for running in self._running.values()])
            await asyncio.sleep(0)
        self._shrinker.cancel()
        self._socket.close()

    def gauges(self) -> dict[str, float]:
        return {"kept_answers": len(self.replies)}

    async def _shrink(self) -> None:
        while True:
            await asyncio.sleep(_SHRINK_SECONDS)
            self.replies.shrink()

    # Messages

    def take_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            if len(frames) != 4 or not 1 <= len(frames[1]) <= _LONGEST_ID or frames[2] not in self.methods:
                self.refuse_malformed(frames)
                continue
            identity, id, method, payload = frames
            kind, handle = self.methods[method]
            call = Call(identity, id, method.decode(), payload)
            try:
                response = handle(call, self._read(call, kind) if kind is not None else None)
                if response is not None:
                    self._reply(call, response)
            except Exception as error:
                self._reply(call, *self._failure(call, error))
        self._commit()
        for reply in self._ready:
            self.send(reply)
        self._ready.clear()

    def refuse_malformed(self, frames: Frames) -> None:
        """Counts it; answers with an error where it has at least an id and a method."""
        self.server.metrics.malformed += 1
        if len(frames) == 4 and 1 <= len(frames[1]) <= _LONGEST_ID:
            known = ", ".join(name.decode() for name in self.methods)
            error = BadRequest(f"unknown method {frames[2][:40]!r}", remedy=f"the methods are {known}")
            self._ready.append((frames[0], frames[1], pack(failure(error))))

    def send(self, reply: tuple[bytes, bytes, bytes]) -> None:
        if self._socket is not None:
            self._socket.send(reply)

    def _read(self, call: Call, kind: type[Request]) -> Request:
        """The request, where it carries the token."""
        request = unpack(call.payload, kind)
        if self._token is not None and not hmac.compare_digest(self._token.encode(), (request.token or "").encode()):
            raise Denied("the token is missing or wrong", remedy="pass the server's --token to the client")
        if request.ack:
            self.replies.acknowledge([known for known in request.ack if len(known) <= _LONGEST_ID])
        if call.method in _NEED_PROTOCOL and request.protocol != PROTOCOL:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}, the client protocol {request.protocol}",
                remedy="install the same version of treetune on both sides; a client of your own sends "
                f"`protocol: {PROTOCOL}` once it takes a reward that is null",
            )
        return request

    def _reply(self, call: Call, data: bytes, kind: str | None = None) -> None:
        """Replies at once, in this batch; `kind` is that of an error."""
        self.server.metrics.count_request(call.method, 0.0, kind)
        self._ready.append((call.identity, call.id, data))

    def _failure(self, call: Call, error: BaseException) -> tuple[bytes, str | None]:
        if isinstance(error, EpisodeEnded) and error.why is not None and error.why.kind == "worker_lost":
            error = WorkerLost("the worker of this episode died", remedy="start another")
        response = failure(error)
        if response.kind == "failed" and not isinstance(error, TreetuneError):
            log.error("%s failed", call.method, exc_info=error)
        if isinstance(error, BadRequest):
            self.server.metrics.malformed += 1
        return pack(response), response.kind

    def _commit(self) -> None:
        """Keeps what the batch drew before any reply is sent. Where that fails, its requests do and no cursor moves."""
        unsaved = self.server.order.unsaved
        try:
            self.server.order.commit()
        except Exception as error:
            log.error("%s", error)
            data = pack(failure(error))
            self._ready = [(to, id, data if id in unsaved else reply) for to, id, reply in self._ready]
            for id in unsaved:
                self.replies.drop(id)
                if (running := self._running.pop(id, None)) is not None:  # no step of it was run yet
                    running.task.cancel()
                    self._ready += [(identity, id, data) for identity in running.identities]

    # Requests that are under way

    def _is_known(self, call: Call) -> bool:
        """Whether this request came before: one that was done is answered again, one under way will be. One whose
        reply was acknowledged is refused: it is late, or its id was taken twice."""
        if (kept := self.replies.kept(call.id)) is not None:
            self._ready.append((call.identity, call.id, kept))
            return True
        if self.replies.is_settled(call.id):
            raise Misused("this request was answered, and its answer acknowledged", remedy="give each request a new id")
        running = self._running.get(call.id)
        if running is not None and call.identity not in running.identities:
            running.identities.append(call.identity)
        return running is not None

    def _begin(self, call: Call, work: Callable[[], Coroutine[Any, Any, bytes]], size: int = 0) -> None:
        """Begins what counts as `size` rollouts, unless it came before."""
        if self._is_known(call):
            return
        self.server.refuse_stopping()
        self.server.reserve(size)
        self._spawn(call, work(), size)

    def _spawn(self, call: Call, work: Coroutine[Any, Any, bytes], size: int = 0) -> None:
        task = asyncio.get_running_loop().create_task(work, name=call.method)
        self._running[call.id] = Running(task, [call.identity])
        task.add_done_callback(functools.partial(self._finish, call, size, time.perf_counter()))

    def _finish(self, call: Call, size: int, began: float, task: asyncio.Task[bytes]) -> None:
        self.server.release(size)
        running = self._running.get(call.id)
        if running is None or running.task is not task:
            return  # its draw could not be kept, which its client knows
        del self._running[call.id]
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self.server.closing:
            # Nobody cancelled it: whoever waits asks again when the server is back.
            error = Stopping("the server has stopped", remedy="ask again when it is back")
        else:
            error = Cancelled("cancelled")
        data, kind = (task.result(), None) if error is None else self._failure(call, error)
        self.server.metrics.count_request(call.method, time.perf_counter() - began, kind)
        self.replies.keep(call.id, data)
        for identity in running.identities:
            self.send((identity, call.id, data))

    # What is asked about the order

    def _health(self, call: Call, request: None) -> bytes:
        return messages.pack_reply(ready=not self.server.stopping, in_flight=self.server.in_flight)

    def _info(self, call: Call, request: Request) -> bytes:
        return messages.pack_reply(**msgspec.structs.asdict(self.server.info()))

    def _sample(self, call: Call, request: messages.SampleRequest) -> None:
        if self._is_known(call):
            return
        server = self.server
        server.refuse_stopping()
        if request.index is None and len(self._running) > _MOST_WAITING:
            raise Busy("too many requests are waiting for a task", remedy="ask again soon")
        draw = server.order.draw(call.id, request.index, request.stream)
        if not server.streams.cheap:
            self._spawn(call, self._make(draw))  # which runs after the commit of this batch
            return
        try:
            data = self._hand_out(server.streams.task(draw), draw)
        except Exception as error:
            self.replies.keep(call.id, pack(failure(error)))  # asked again, it is not drawn again
            raise
        self._reply_and_keep(call, data)

    async def _make(self, draw: Draw) -> bytes:
        return self._hand_out(await self.server.host.fetch(draw), draw)

    def _hand_out(self, task: Task, draw: Draw) -> bytes:
        """The response with a task, sealed."""
        if type(task) is not Task:
            # As it will be once it has travelled: an integer in a field of floats comes out as a float.
            task = unpack(pack(task), type(task))
        sealed = pack_task(task, self.server.signer.sign(task))
        self.server.metrics.sources[task.data_source] += 1
        return pack(messages.SampleResponse(task=msgspec.Raw(sealed), index=draw.index))

    def _observe(self, call: Call, request: messages.ObserveRequest) -> None:
        server = self.server
        task = server.signer.read_task(request.task, server.taskset)
        if self._is_known(call):
            return
        server.order.change(call.id, request.stream)
        with user_code(f"{server.taskset.name}.curriculum().observe()"):
            server.streams.observe(task, request.reward, request.stream)
        self._reply_and_keep(call, messages.pack_reply())

    def _state(self, call: Call, request: messages.StateRequest) -> bytes:
        return messages.pack_reply(state=self.server.streams.state(request.stream))

    def _restore(self, call: Call, request: messages.RestoreRequest) -> None:
        if self._is_known(call):
            return
        for stream in request.state.streams:
            self.server.order.change(call.id, stream)
        self.server.streams.restore(request.state)
        self._reply_and_keep(call, messages.pack_reply())

    def _reply_and_keep(self, call: Call, data: bytes) -> None:
        self.replies.keep(call.id, data)
        self._reply(call, data)

    def _stats(self, call: Call, request: Request) -> bytes:
        server = self.server
        stats = {"name": server.taskset.name, **server.metrics.stats(), **server.host.stats()}
        return messages.pack_reply(stats=stats)

    # Rollouts and episodes

    def _run(self, call: Call, request: Request) -> None:
        size = request.n if isinstance(request, messages.RunGroupRequest) else 1
        if not 1 <= size <= MOST_IN_GROUP:
            raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, got {size}")
        self._begin(call, lambda: self.server.host.run_request(call.method, call.payload, size), size)

    def _start(self, call: Call, request: messages.StartRequest) -> None:
        self._begin(call, lambda: self._start_episode(call.id, request.task), 1)

    async def _start_episode(self, id: bytes, data: msgspec.Raw) -> bytes:
        task = self.server.signer.read_task(data, self.server.taskset)
        started = await self.server.host.start(task, terms=self._terms, name=id)
        return messages.pack_reply(episode=started.episode, observation=started.observation)

    def _step(self, call: Call, request: messages.StepRequest) -> None:
        step = self.server.host.step
        self._begin(call, lambda: step(request.episode, request.action, request.turn, terms=self._terms))

    def _cancel(self, call: Call, request: messages.CancelRequest) -> bytes | None:
        target = request.id.encode() if isinstance(request.id, str) else request.id
        if not isinstance(target, bytes):
            raise BadRequest("an id is bytes or text")
        book = self.server.host.episodes
        # A start that was answered before it was cancelled: nobody will step what it began.
        episode = (book.live.get(request.id) if isinstance(request.id, str) else None) or book.by_name(target)
        if episode is not None and episode.terms is self._terms:
            if not self._is_known(call):
                self._spawn(call, self._cancel_episode(episode.id))
            return None
        running = self._running.get(target)
        found = running is not None and running.task.get_name() != "sample" and running.task.cancel()
        return messages.pack_reply(found=found)

    async def _cancel_episode(self, episode: str) -> bytes:
        return messages.pack_reply(found=await self.server.host.cancel(episode))


class ReplyCache:
    """Replies by the id that the client gave its request: repeating the id repeats the reply, not the work. They are
    kept until acknowledged, or for a bounded time and size."""

    def __init__(self, most_bytes: int = 256 << 20, most: int = 100_000, seconds: float = 900.0) -> None:
        self._most_bytes, self._most, self._seconds = most_bytes, most, seconds
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._settled: OrderedDict[bytes, None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def kept(self, id: bytes) -> bytes | None:
        found = self._kept.get(id)
        return found[1] if found is not None else None

    def keep(self, id: bytes, data: bytes) -> None:
        self._kept[id] = (time.monotonic(), data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes or len(self._kept) > self._most:
            self.shrink()

    def acknowledge(self, ids: list[bytes]) -> None:
        """Forgets the replies, but not that they were given: a late repetition must not begin anew."""
        for id in ids:
            self.drop(id)
            self._settled[id] = None
        while len(self._settled) > self._most:
            self._settled.popitem(last=False)

    def is_settled(self, id: bytes) -> bool:
        return id in self._settled

    def drop(self, id: bytes) -> None:
        if (found := self._kept.pop(id, None)) is not None:
            self._bytes -= len(found[1])

    def shrink(self) -> None:
        """Forgets what is too old, or too much."""
        oldest = time.monotonic() - self._seconds
        while self._kept:
            id, (when, _) = next(iter(self._kept.items()))
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes and when >= oldest:
                return
            self.drop(id)
