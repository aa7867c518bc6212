"""The ZMQ door of a server: takes messages in batches, and gives every request one reply.

    EnvServer(taskset, doors=[ZmqDoor("tcp://127.0.0.1:5555")])

Who asks is known before anything is decoded. What a batch drew is on disk before any of its replies is sent. Replies
are kept by client and request id, so that a client may repeat a request whatever became of the first. What is asked for
is the host's to do.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, NamedTuple

import msgspec
import zmq

from treetune.errors import TreetuneError, UsageError
from treetune.play.episode_table import EpisodeEnded, SessionLimits
from treetune.play.group import MOST_IN_GROUP
from treetune.serve import messages
from treetune.serve.access import check_address, load_curve_key
from treetune.serve.errors import BadRequest, Cancelled, Stopping, WorkerLost
from treetune.serve.messages import Request, check_values, failure, pack, unpack
from treetune.serve.server import Door, EnvServer
from treetune.serve.zmq.auth import LONGEST_ID, Call, Gate
from treetune.serve.zmq.listener import ZmtpListener, bind_listening
from treetune.serve.zmq.order_requests import OrderRequests
from treetune.serve.zmq.replies import ReplyCache, check_same
from treetune.serve.zmq.sockets import MOST_BYTES, Frames, LoopSocket, bind_address, encrypt_server, new_socket

log = logging.getLogger("treetune.serve")
_SHRINK_SECONDS = 5.0


class Running(NamedTuple):
    """Work under way, and the identities that wait for its reply."""

    task: asyncio.Task[bytes]
    identities: list[bytes]
    digest: bytes


Handler = Callable[[Call, Any], bytes | None]
"""Takes the request; gives the response, or None where it will come later."""


class ZmqDoor(Door):
    name = "zmq"

    def __init__(self, address: str = "tcp://127.0.0.1:5555") -> None:
        """`:5555` is a port of this machine only; port 0 takes a free one."""
        self.address = f"tcp://127.0.0.1{address}" if address.startswith(":") else address
        self.replies = ReplyCache()
        self.terms = SessionLimits(render=messages.pack_step)
        self._socket: LoopSocket | ZmtpListener | None = None
        self._running: dict[bytes, Running] = {}
        """By the key of the request."""
        self._ready: list[tuple[bytes, bytes, bytes]] = []
        """The replies of the batch in hand."""
        self._changing: list[Call] = []
        """The requests of the batch that were done at once."""
        self.order_requests = OrderRequests(self)
        self.methods: dict[bytes, tuple[type[Request] | None, Handler]] = {
            b"health": (None, self._health),  # answered whoever asks
            b"info": (Request, self._info),
            b"sample": (messages.SampleRequest, self.order_requests.sample),
            b"run_rollout": (messages.RunRolloutRequest, self._run),
            b"run_group": (messages.RunGroupRequest, self._run),
            b"set_version": (messages.WeightsRequest, self._change_weights),
            b"pause": (messages.WeightsRequest, self._change_weights),
            b"resume": (messages.WeightsRequest, self._change_weights),
            b"start": (messages.StartRequest, self._start),
            b"step": (messages.StepRequest, self._step),
            b"cancel": (messages.CancelRequest, self._cancel),
            b"observe": (messages.ObserveRequest, self.order_requests.observe),
            b"state": (messages.StateRequest, self.order_requests.state),
            b"restore": (messages.RestoreRequest, self.order_requests.restore),
            b"stats": (Request, self._stats),
            b"renew": (messages.LeaseRequest, self.order_requests.renew),
            b"finish": (messages.LeaseRequest, self.order_requests.finish_lease),
            b"give_back": (messages.LeaseRequest, self.order_requests.finish_lease),
            b"ack": (Request, lambda call, request: None),
        }

    # Its life

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        check_address(self.address, server.config.access)
        self._gate = Gate(server.config.access.token)

    async def open(self) -> None:
        if (file := self.server.config.access.curve_key) is not None:
            socket = new_socket(zmq.ROUTER, most_bytes=MOST_BYTES)
            self.public_key = encrypt_server(socket, load_curve_key(file))
            self.address = bind_address(socket, self.address)
            self._socket = LoopSocket(socket, self.take_batch, self._gate.admits)
        else:
            listening, self.address = bind_listening(self.address)
            self._socket = ZmtpListener(listening, self.take_batch, self._gate.admits)
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
        if isinstance(self._socket, ZmtpListener):
            await self._socket.close()
        else:
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
            if len(frames) < 3 or not 1 <= len(frames[1]) <= LONGEST_ID or frames[2] not in self.methods:
                self.refuse_malformed(frames)
                continue
            kind, handle = self.methods[frames[2]]
            call = None
            try:
                if kind is None:
                    call, request = Call(frames[0], frames[1], frames[2].decode()), None
                else:
                    call = self._gate.identify(frames)
                    request = self._read(call, kind)
                response = handle(call, request)
                if response is not None:
                    self._reply(call, response)
            except Exception as error:
                call = call or Call(frames[0], frames[1], frames[2].decode())
                self._reply(call, *self._failure(call, error))
        self._commit()
        for reply in self._ready:
            self.send(reply)
        self._ready.clear()

    def refuse_malformed(self, frames: Frames) -> None:
        """Counts it; answers with an error where it has at least an id and a method."""
        self.server.metrics.malformed += 1
        if len(frames) >= 3 and 1 <= len(frames[1]) <= LONGEST_ID:
            known = ", ".join(name.decode() for name in self.methods)
            error = BadRequest(f"unknown method {frames[2][:40]!r}", remedy=f"the methods are {known}")
            self._ready.append((frames[0], frames[1], pack(failure(error))))

    def send(self, reply: tuple[bytes, bytes, bytes]) -> None:
        if self._socket is not None:
            self._socket.send(reply)

    def _read(self, call: Call, kind: type[Request]) -> Request:
        check_values(call.payload)
        request = unpack(call.payload, kind)
        if request.ack:
            keys = [call.client + known for known in request.ack if len(known) <= LONGEST_ID]
            self.replies.acknowledge(keys)
            if (pending := self.server.streams.pending).work:
                for key in keys:
                    pending.end_work(key)  # what it was for has arrived
        return request

    def _reply(self, call: Call, data: bytes, kind: str | None = None) -> None:
        """Replies at once, in this batch; `kind` is that of an error."""
        self.server.metrics.count_request(call.method, 0.0, kind)
        self._ready.append((call.identity, call.id, data))

    def _failure(self, call: Call, error: BaseException) -> tuple[bytes, str | None]:
        if isinstance(error, EpisodeEnded) and error.why is not None and error.why.kind == "worker_lost":
            error = WorkerLost(error.why.error, remedy="start another")
        response = failure(error)
        if response.kind == "failed" and not isinstance(error, TreetuneError):
            log.error("%s failed", call.method, exc_info=error)
        if isinstance(error, BadRequest):
            self.server.metrics.malformed += 1
        return pack(response), response.kind

    def _commit(self) -> None:
        """Keeps what the batch drew before any reply is sent. Where that fails, its requests do, and what they drew is
        given out again."""
        unsaved = self.server.order.unsaved
        try:
            self.server.order.commit()
        except Exception as error:
            log.error("%s", error)
            data = pack(failure(error))
            lost = {call.key: call for call in self._changing if call.key in unsaved}
            for key in lost:
                self.replies.drop(key)
            replies = {(call.identity, call.id) for call in lost.values()}
            self._ready = [(to, id, data if (to, id) in replies else reply) for to, id, reply in self._ready]
        self._changing.clear()

    # Requests that are under way

    def is_known(self, call: Call) -> bool:
        """Whether this request came before: one that was done is answered again, one under way will be."""
        if (kept := self.replies.find(call.key, call.digest)) is not None:
            self._ready.append((call.identity, call.id, kept))
            return True
        running = self._running.get(call.key)
        if running is None:
            return False
        check_same(running.digest, call.digest)
        if call.identity not in running.identities:
            running.identities.append(call.identity)
        self.server.streams.pending.renew_work(call.key)  # whoever repeats it is alive
        return True

    def _begin(self, call: Call, work: Callable[[], Coroutine[Any, Any, bytes]], size: int = 0) -> bool:
        """Begins what counts as `size` rollouts; False where it came before."""
        if self.is_known(call):
            return False
        self.server.refuse_stopping()
        self.server.reserve(size)
        self.spawn(call, work(), size)
        return True

    def spawn(self, call: Call, work: Coroutine[Any, Any, bytes], size: int = 0) -> None:
        task = asyncio.get_running_loop().create_task(work, name=call.method)
        self._running[call.key] = Running(task, [call.identity], call.digest)
        task.add_done_callback(functools.partial(self._finish, call, size, time.perf_counter()))

    def _finish(self, call: Call, size: int, began: float, task: asyncio.Task[bytes]) -> None:
        self.server.release(size)
        running = self._running.pop(call.key)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self.server.closing:
            # Nobody cancelled it: whoever waits asks again when the server is back.
            error = Stopping("the server has stopped", remedy="ask again when it is back")
        else:
            error = Cancelled("cancelled")
        data, kind = (task.result(), None) if error is None else self._failure(call, error)
        if error is not None:
            self.server.streams.pending.end_work(call.key, finish=None)
        self.server.metrics.count_request(call.method, time.perf_counter() - began, kind)
        self.replies.keep(call.key, call.digest, data)
        for identity in running.identities:
            self.send((identity, call.id, data))

    def abandon(self, name: Hashable) -> None:
        if isinstance(name, bytes) and (running := self._running.get(name)) is not None:
            running.task.cancel()

    # What is asked about the order

    def _health(self, call: Call, request: None) -> bytes:
        return messages.pack_reply(ready=not self.server.stopping, in_flight=self.server.in_flight)

    def _info(self, call: Call, request: Request) -> bytes:
        return messages.pack_reply(**msgspec.structs.asdict(self.server.info()))

    def reply_and_keep(self, call: Call, data: bytes) -> None:
        self.replies.keep(call.key, call.digest, data)
        self._changing.append(call)
        self._reply(call, data)

    def _stats(self, call: Call, request: Request) -> bytes:
        server = self.server
        stats = {"name": server.taskset.name, **server.metrics.stats(), **server.host.stats()}
        return messages.pack_reply(stats=stats)

    # Rollouts and episodes

    def _run(self, call: Call, request: messages.RunRequest) -> None:
        size = (request.of or request.n) if isinstance(request, messages.RunGroupRequest) else 1
        if not 1 <= size <= MOST_IN_GROUP:
            raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, got {size}")
        host, pending = self.server.host, self.server.streams.pending
        if request.version is not None:
            host.reach_version(request.model, request.endpoint, request.version)
        lease = pending.find(messages.read_idx(call.payload), call.client) if pending.leased else None
        if lease is None:
            self._begin(call, lambda: host.run_request(call.method, call.payload, size), size)
        elif self._begin(call, lambda: self._run_leased(call, size, request.finish), size):
            pending.begin_work(lease, call.key)

    async def _run_leased(self, call: Call, size: int, finish: bool) -> bytes:
        data = await self.server.host.run_request(call.method, call.payload, size)
        pending = self.server.streams.pending
        if unpack(data, messages.RunResponse).cut_off:
            pending.end_work(call.key, finish=False, expired=False)
        elif not finish:
            pending.end_work(call.key, finish=None)
        return data

    def _change_weights(self, call: Call, request: messages.WeightsRequest) -> None:
        if not self.is_known(call):
            self.spawn(call, self._do_change_weights(call.method, request))

    async def _do_change_weights(self, method: str, request: messages.WeightsRequest) -> bytes:
        return messages.pack_reply(quiet=await self.server.host.change_weights(method, request))

    def _start(self, call: Call, request: messages.StartRequest) -> None:
        self._begin(call, lambda: self._start_episode(call, request), 1)

    async def _start_episode(self, call: Call, request: messages.StartRequest) -> bytes:
        task = self.server.signer.read_task(request.task, self.server.taskset)
        started = await self.server.host.start(
            task, step=request.step, terms=self.terms, name=call.key, holder=call.client
        )
        return messages.pack_reply(episode=started.episode, observation=started.observation, tools=started.tools)

    def _step(self, call: Call, request: messages.StepRequest) -> None:
        step = self.server.host.step
        self._begin(call, lambda: step(request.episode, request.action, request.turn, terms=self.terms))

    def _cancel(self, call: Call, request: messages.CancelRequest) -> bytes | None:
        target = request.id.encode() if isinstance(request.id, str) else request.id
        if not isinstance(target, bytes):
            raise BadRequest("an id is bytes or text")
        target = call.client + target
        book = self.server.host.episodes
        # A start that was answered before it was cancelled: nobody will step what it began.
        episode = (book.live.get(request.id) if isinstance(request.id, str) else None) or book.by_name(target)
        if episode is not None and episode.terms is self.terms:
            if not self.is_known(call):
                self.spawn(call, self._cancel_episode(episode.id))
            return None
        running = self._running.get(target)
        found = running is not None and running.task.get_name() != "sample" and running.task.cancel()
        return messages.pack_reply(found=found)

    async def _cancel_episode(self, episode: str) -> bytes:
        return messages.pack_reply(found=await self.server.host.cancel(episode))
