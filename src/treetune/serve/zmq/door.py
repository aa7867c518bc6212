"""The ZMQ door of a server: takes messages in batches, and gives every request one reply.

What a batch drew is on disk before any of its replies is sent. Replies are kept by request id, so that a client may
repeat a request whatever became of the first. What is asked for is the host's to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from treetune.episode_book import EpisodeEnded, Terms
from treetune.errors import TreetuneError, UsageError, user_code
from treetune.host import MOST_IN_GROUP, PROTOCOL
from treetune.serve.errors import BadRequest, Busy, Cancelled, Denied, Misused, Stopping, WorkerLost
from treetune.serve.task_signer import pack_task
from treetune.serve.zmq import wire
from treetune.serve.zmq.reply_cache import ReplyCache
from treetune.serve.zmq.sockets import Frames, LoopSocket
from treetune.serve.zmq.wire import Request, failure, pack, unpack
from treetune.streams import Draw
from treetune.task import Task

if TYPE_CHECKING:
    from treetune.serve.server import EnvServer

log = logging.getLogger("treetune.serve")
_MOST_WAITING = 20_000
"""Samples that wait for a slow taskset, before the answer is `busy`."""
_LONGEST_ID = 64
_SHRINK_SECONDS = 5.0


class Sender(NamedTuple):
    """Who asks, under which id, for what."""

    identity: bytes
    id: bytes
    method: str
    payload: bytes


Handler = Callable[[Sender, Any], Any]
"""Takes the request; gives the response, or None where it will come later."""


class ZmqDoor:
    def __init__(self, server: EnvServer) -> None:
        self._server = server
        self._token = server.config.access.token
        self.replies = ReplyCache()
        self._terms = Terms(render=wire.pack_step)
        self._socket: LoopSocket | None = None
        self._running: dict[bytes, asyncio.Task[bytes]] = {}
        """By request id."""
        self._quiet = asyncio.Event()
        """While stopping: no request is under way any more."""
        # What the batch in hand has come to so far.
        self._ready: list[tuple[bytes, bytes, bytes]] = []
        self._to_make: list[tuple[Sender, Draw]] = []
        """Tasks to be made once their draws are kept."""
        self.methods: dict[bytes, tuple[str, type[Request], Handler]] = {
            name.encode(): (name, kind, handler)
            for name, kind, handler in (
                ("health", Request, self._health),
                ("info", Request, self._info),
                ("sample", wire.SampleRequest, self._sample),
                ("run_rollout", Request, self._run),
                ("run_group", wire.RunGroupRequest, self._run),
                ("start", wire.StartRequest, self._start),
                ("step", wire.StepRequest, self._step),
                ("cancel", wire.CancelRequest, self._cancel),
                ("observe", wire.ObserveRequest, self._observe),
                ("state", wire.StateRequest, self._state),
                ("restore", wire.RestoreRequest, self._restore),
                ("stats", Request, self._stats),
            )
        }

    # Its life

    def open(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = LoopSocket(socket, self.take_batch)
        self._shrinker = asyncio.create_task(self._shrink())

    async def drain(self, seconds: float) -> None:
        if self.replies.under_way:
            log.info("waiting for %d requests to end", self.replies.under_way)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), seconds)

    async def stop_work(self) -> None:
        for running in list(self._running.values()):
            running.cancel()
        while self._running:  # their replies are sent when they have ended
            await asyncio.wait(self._running.values())
            await asyncio.sleep(0)

    def close(self) -> None:
        if self._socket is not None:
            self._shrinker.cancel()
            self._socket.close()

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
            name, kind, handle = self.methods[method]
            sender = Sender(identity, id, name, payload)
            try:
                if name != "health":
                    request = self._read(payload, kind)
                    response = handle(sender, request)
                else:
                    response = handle(sender, None)
                if response is not None:
                    self._reply(sender, pack(response))
            except Exception as error:
                self._reply(sender, *self._failure(sender, error))
        self._commit()
        for reply in self._ready:
            self.send(reply)
        self._ready.clear()

    def refuse_malformed(self, frames: Frames) -> None:
        """Counts it; answers with an error where it has at least an id and a method."""
        self._server.metrics.malformed += 1
        if len(frames) == 4 and 1 <= len(frames[1]) <= _LONGEST_ID:
            known = ", ".join(name.decode() for name in self.methods)
            error = BadRequest(f"unknown method {frames[2][:40]!r}", remedy=f"the methods are {known}")
            self._ready.append((frames[0], frames[1], pack(failure(error))))

    def send(self, reply: tuple[bytes, bytes, bytes]) -> None:
        if self._socket is not None:
            self._socket.send(reply)

    def _read(self, payload: bytes, kind: type[Request]) -> Request:
        """The request, where it carries the token."""
        request = unpack(payload, kind)
        token = self._token
        if token is not None and not hmac.compare_digest(token.encode(), (request.token or "").encode()):
            raise Denied("the token is missing or wrong", remedy="pass the server's --token to the client")
        if request.ack:
            self.replies.acknowledge([known for known in request.ack if len(known) <= _LONGEST_ID])
        return request

    def _reply(self, sender: Sender, data: bytes, kind: str | None = None) -> None:
        """Replies at once, in this batch; `kind` is that of an error."""
        self._server.metrics.count_request(sender.method, 0.0, kind)
        self._ready.append((sender.identity, sender.id, data))

    def _failure(self, sender: Sender, error: BaseException) -> tuple[bytes, str | None]:
        if isinstance(error, EpisodeEnded) and error.why is not None and error.why.kind == "worker_lost":
            error = WorkerLost("the worker of this episode died", remedy="start another")
        response = failure(error)
        if response.kind == "failed" and not isinstance(error, TreetuneError):
            log.error("%s failed", sender.method, exc_info=error)
        if isinstance(error, BadRequest):
            self._server.metrics.malformed += 1
        return pack(response), response.kind

    def _commit(self) -> None:
        """Keeps what the batch drew before any reply is sent. Where that fails, its requests do and no cursor moves."""
        order, to_make = self._server.order, self._to_make
        self._to_make, unsaved = [], order.unsaved
        try:
            order.commit()
        except TreetuneError as error:
            log.error("%s", error)
            data = pack(failure(error))
            for id in unsaved:
                self.replies.drop(id)
            self._ready = [(to, id, data if id in unsaved else reply) for to, id, reply in self._ready]
            for id in unsaved:
                self._ready += [(identity, id, data) for identity in self.replies.finish(id, data, keep=False)]
            to_make = [(sender, draw) for sender, draw in to_make if sender.id not in unsaved]
        for sender, draw in to_make:
            self._spawn(sender, self._make(draw))

    # Requests that are under way

    def _is_known(self, sender: Sender) -> bool:
        """Whether this request came before: one that was done is answered again, one under way will be. One whose
        reply was acknowledged is refused: it is late, or its id was taken twice."""
        if (kept := self.replies.kept(sender.id)) is not None:
            self._ready.append((sender.identity, sender.id, kept))
            return True
        if self.replies.is_settled(sender.id):
            raise Misused("this request was answered, and its answer acknowledged", remedy="give each request a new id")
        return self.replies.join(sender.id, sender.identity)

    def _begin(self, sender: Sender, work: Callable[[], Coroutine[Any, Any, bytes]], size: int = 0) -> None:
        """Begins what counts as `size` rollouts, unless it came before."""
        if self._is_known(sender):
            return
        self._server.refuse_stopping()
        self._server.reserve(size)
        self.replies.begin(sender.id, sender.identity)
        self._spawn(sender, work(), size)

    def _spawn(self, sender: Sender, work: Coroutine[Any, Any, bytes], size: int = 0) -> None:
        self._running[sender.id] = task = asyncio.get_running_loop().create_task(work, name=sender.method)
        task.add_done_callback(functools.partial(self._finish, sender, size, time.perf_counter()))

    def _finish(self, sender: Sender, size: int, began: float, task: asyncio.Task[bytes]) -> None:
        del self._running[sender.id]
        self._server.release(size)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self._server.closing:
            # Nobody cancelled it: whoever waits asks again when the server is back.
            error = Stopping("the server has stopped", remedy="ask again when it is back")
        else:
            error = Cancelled("cancelled")
        data, kind = (task.result(), None) if error is None else self._failure(sender, error)
        self._server.metrics.count_request(sender.method, time.perf_counter() - began, kind)
        for identity in self.replies.finish(sender.id, data):
            self.send((identity, sender.id, data))
        if self._server.stopping and not self.replies.under_way:
            self._quiet.set()

    # What is asked about the order

    def _health(self, sender: Sender, request: None) -> Any:
        return wire.HealthResponse(ready=not self._server.stopping, in_flight=self._server.in_flight)

    def _info(self, sender: Sender, request: Request) -> Any:
        return wire.InfoResponse(**msgspec.structs.asdict(self._server.info()))

    def _sample(self, sender: Sender, request: wire.SampleRequest) -> None:
        if self._is_known(sender):
            return
        server = self._server
        server.refuse_stopping()
        if request.index is None and self.replies.under_way > _MOST_WAITING:
            raise Busy("too many requests are waiting for a task", remedy="ask again soon")
        draw = server.order.draw(sender.id, request.index, request.stream)
        if not server.streams.cheap:
            self.replies.begin(sender.id, sender.identity)
            self._to_make.append((sender, draw))
            return
        try:
            data = self._hand_out(server.streams.task(draw), draw)
        except Exception as error:
            self.replies.keep(sender.id, pack(failure(error)))  # asked again, it is not drawn again
            raise
        self.replies.keep(sender.id, data)
        self._reply(sender, data)

    async def _make(self, draw: Draw) -> bytes:
        return self._hand_out(await self._server.host.fetch(draw), draw)

    def _hand_out(self, task: Task, draw: Draw) -> bytes:
        """The response with a task, sealed."""
        if type(task) is not Task:
            # As it will be once it has travelled: an integer in a field of floats comes out as a float.
            task = unpack(pack(task), type(task))
        sealed = pack_task(task, self._server.signer.sign(task))
        self._server.metrics.sources[task.data_source] += 1
        return pack(wire.SampleResponse(task=msgspec.Raw(sealed), index=draw.index))

    def _observe(self, sender: Sender, request: wire.ObserveRequest) -> None:
        server = self._server
        task = server.signer.read_task(request.task, server.taskset)
        if self._is_known(sender):
            return
        server.order.change(sender.id, request.stream)
        with user_code(f"{server.taskset.name}.curriculum().observe()"):
            server.streams.observe(task, request.reward, request.stream)
        self._acknowledge(sender)

    def _state(self, sender: Sender, request: wire.StateRequest) -> Any:
        return wire.StateResponse(state=self._server.streams.state(request.stream))

    def _restore(self, sender: Sender, request: wire.RestoreRequest) -> None:
        if self._is_known(sender):
            return
        for stream in request.state.streams:
            self._server.order.change(sender.id, stream)
        self._server.streams.restore(request.state)
        self._acknowledge(sender)

    def _acknowledge(self, sender: Sender) -> None:
        data = pack(wire.Response())
        self.replies.keep(sender.id, data)
        self._reply(sender, data)

    def _stats(self, sender: Sender, request: Request) -> Any:
        server = self._server
        stats = {"name": server.taskset.name, **server.metrics.stats(), **server.executor.stats()}
        return wire.StatsResponse(stats=stats)

    # Rollouts and episodes

    def _run(self, sender: Sender, request: Request) -> None:
        _check_protocol(request)
        size = request.n if isinstance(request, wire.RunGroupRequest) else 1
        if not 1 <= size <= MOST_IN_GROUP:
            raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, got {size}")
        run = self._server.executor.run
        self._begin(sender, lambda: run(sender.method, sender.payload, size), size)

    def _start(self, sender: Sender, request: wire.StartRequest) -> None:
        _check_protocol(request)
        self._begin(sender, lambda: self._start_episode(sender.id, request.task), 1)

    async def _start_episode(self, id: bytes, data: msgspec.Raw) -> bytes:
        task = self._server.signer.read_task(data, self._server.taskset)
        started = await self._server.host.start(task, terms=self._terms, name=id)
        return pack(wire.StartResponse(episode=started.episode, observation=started.observation))

    def _step(self, sender: Sender, request: wire.StepRequest) -> None:
        _check_protocol(request)
        step = self._server.host.step
        self._begin(sender, lambda: step(request.episode, request.action, request.turn, terms=self._terms))

    def _cancel(self, sender: Sender, request: wire.CancelRequest) -> Any:
        target = request.id.encode() if isinstance(request.id, str) else request.id
        if not isinstance(target, bytes):
            raise BadRequest("an id is bytes or text")
        book = self._server.host.episodes
        # A start that was answered before it was cancelled: nobody will step what it began.
        episode = (book.live.get(request.id) if isinstance(request.id, str) else None) or book.by_name(target)
        if episode is not None and episode.terms is self._terms:
            if not self._is_known(sender):
                self.replies.begin(sender.id, sender.identity)
                self._spawn(sender, self._cancel_episode(episode.id))
            return None
        running = self._running.get(target)
        found = running is not None and running.get_name() != "sample" and running.cancel()
        return wire.CancelResponse(found=found)

    async def _cancel_episode(self, episode: str) -> bytes:
        return pack(wire.CancelResponse(found=await self._server.host.cancel(episode)))


def _check_protocol(request: Request) -> None:
    if request.protocol != PROTOCOL:
        raise Misused(
            f"this server speaks protocol {PROTOCOL}, the client protocol {request.protocol}",
            remedy="install the same version of treetune on both sides; a client of your own sends "
            f"`protocol: {PROTOCOL}` once it takes a reward that is null",
        )
