"""The ZMQ door of a server: takes messages in batches and gives every request one reply.

    EnvServer(taskset, doors=[ZmqDoor("tcp://127.0.0.1:5555")])

The client is identified before anything is decoded. The draws of a batch are on disk before any of its replies is sent.
Replies are kept by client and request id, so a client may repeat a request. Each handler gets the call and its request,
and returns the response, or None if the response will come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import zmq

from treetune.core.task import Task
from treetune.errors import UsageError
from treetune.play.episode_table import SessionLimits
from treetune.play.group import MOST_IN_GROUP
from treetune.play.leases import Draw, check_lease
from treetune.serve import messages
from treetune.serve.errors import BadRequest, Busy
from treetune.serve.messages import ServerRequest, check_values, failure, pack, unpack
from treetune.serve.server import Door, EnvServer, Given
from treetune.serve.task_signer import pack_task
from treetune.serve.zmq.calls import LONGEST_ID, Call, CallTable, Gate, Reply
from treetune.serve.zmq.listener import ZmtpListener
from treetune.serve.zmq.sockets import MOST_BYTES, Frames, LoopSocket, bind_address, encrypt_server, new_socket
from treetune.system.access import check_address, load_curve_key

_SHRINK_SECONDS = 5.0
_MOST_WAITING = 20_000
"""Samples that may wait for a slow taskset; further ones get `busy`."""
Handler = Callable[[Call, Any], bytes | None]
"""Handles the request; returns the response, or None if the response will come later."""


class ZmqDoor(Door):
    name = "zmq"

    def __init__(self, address: str = "tcp://127.0.0.1:5555") -> None:
        """`:5555` is a port on this machine only; port 0 takes a free one."""
        self.address = f"tcp://127.0.0.1{address}" if address.startswith(":") else address
        self.terms = SessionLimits(render=messages.pack_step)
        self._socket: LoopSocket | ZmtpListener | None = None
        self.methods: dict[bytes, tuple[type[ServerRequest] | None, Handler]] = {
            b"health": (None, self._health),  # answered without a token
            b"info": (ServerRequest, self._info),
            b"sample": (messages.SampleRequest, self._sample),
            b"run_rollout": (messages.RunRolloutRequest, self._run),
            b"run_group": (messages.RunGroupRequest, self._run),
            b"set_version": (messages.WeightsRequest, self._change_weights),
            b"pause": (messages.WeightsRequest, self._change_weights),
            b"resume": (messages.WeightsRequest, self._change_weights),
            b"start": (messages.StartRequest, self._start),
            b"step": (messages.StepRequest, self._step),
            b"cancel": (messages.CancelRequest, self._cancel),
            b"observe": (messages.ObserveRequest, self._observe),
            b"state": (messages.StateRequest, self._state),
            b"restore": (messages.RestoreRequest, self._restore),
            b"stats": (ServerRequest, self._stats),
            b"renew": (messages.LeaseRequest, self._renew),
            b"finish": (messages.LeaseRequest, self._finish_lease),
            b"give_back": (messages.LeaseRequest, self._finish_lease),
            b"ack": (ServerRequest, lambda call, request: None),
        }

    # Lifecycle

    def attach(self, server: EnvServer) -> None:
        super().attach(server)
        check_address(self.address, server.config.access)
        self.calls = CallTable(server, self.send)
        self._gate = Gate(server.config.access.token)

    async def open(self) -> None:
        if (file := self.server.config.access.curve_key) is not None:
            socket = new_socket(zmq.ROUTER, most_bytes=MOST_BYTES)
            self.public_key = encrypt_server(socket, load_curve_key(file))
            self.address = bind_address(socket, self.address)
            self._socket = LoopSocket(socket, self.take_batch)
        else:
            listener = ZmtpListener(self.take_batch, self._gate.admits)
            self.address = await listener.start(self.address)
            self._socket = listener
        self._shrinker = asyncio.create_task(self._shrink())

    def under_way(self) -> int:
        return len(self.calls.running)

    async def close(self) -> None:
        if self._socket is None:
            return
        await self.calls.stop()
        self._shrinker.cancel()
        if isinstance(self._socket, ZmtpListener):
            await self._socket.close()
        else:
            self._socket.close()

    def gauges(self) -> dict[str, float]:
        return {"kept_answers": len(self.calls.replies)}

    async def _shrink(self) -> None:
        while True:
            await asyncio.sleep(_SHRINK_SECONDS)
            self.calls.replies.shrink()

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
                    self.calls.reply(call, response)
            except Exception as error:
                self.calls.fail(call or Call(frames[0], frames[1], frames[2].decode()), error)
        self.calls.finish_batch()

    def refuse_malformed(self, frames: Frames) -> None:
        """Counts a malformed message. Answers with an error if it has at least an id and a method."""
        self.server.metrics.malformed += 1
        if len(frames) >= 3 and 1 <= len(frames[1]) <= LONGEST_ID:
            known = ", ".join(name.decode() for name in self.methods)
            error = BadRequest(f"unknown method {frames[2][:40]!r}", remedy=f"the methods are {known}")
            self.calls.refuse_malformed(frames[0], frames[1], error)

    def send(self, reply: Reply) -> None:
        if self._socket is not None:
            self._socket.send(reply)

    def _read(self, call: Call, kind: type[ServerRequest]) -> ServerRequest:
        check_values(call.payload)
        request = unpack(call.payload, kind)
        if request.ack:
            self.calls.acknowledge(call.client, request.ack)
        return request

    def abandon(self, name: Hashable) -> None:
        if isinstance(name, bytes) and (running := self.calls.running.get(name)) is not None:
            running.task.cancel()

    # The server

    def _health(self, call: Call, request: None) -> bytes:
        return messages.pack_reply(ready=not self.server.stopping, in_flight=self.server.in_flight)

    def _info(self, call: Call, request: ServerRequest) -> bytes:
        return messages.pack_reply(**msgspec.structs.asdict(self.server.info()))

    def _stats(self, call: Call, request: ServerRequest) -> bytes:
        server = self.server
        stats = {"name": server.taskset.name, **server.metrics.stats(), **server.host.stats()}
        return messages.pack_reply(stats=stats)

    # The order

    def _sample(self, call: Call, request: messages.SampleRequest) -> None:
        server, calls = self.server, self.calls
        if calls.is_known(call):
            return
        server.refuse_stopping()
        if request.index is None and len(calls.running) > _MOST_WAITING:
            raise Busy("too many requests are waiting for a task", remedy="ask again soon")
        lease, order, again = 0.0, server.order, request.index is not None
        if request.index is not None:
            draw = server.streams.draw_at(request.index)
        elif order.recovered and (before := order.recall(call.key, call.digest)) is not None:
            (draw, lease), again = before, True  # already drawn; only its reply is missing
        else:
            lease = (server.config.lease or 0.0) if request.lease is None else check_lease(request.lease)
            draw = order.advance(request.stream)
        if not server.streams.cheap or (not again and server.streams.pending.seconds_until(draw) > 0):
            if again:
                calls.spawn(call, self._fetch_sample(draw, lease))
            else:
                server.streams.pending.hold(draw)
                calls.spawn(call, self._make_sample(call, draw, lease))  # runs after this batch was stored
            return
        try:
            task = server.streams.task(draw)
            data = self._pack_sample(task, draw, lease)
        except Exception as error:
            failed = error if again else order.fail(draw, error, call.key, call.digest)
            calls.replies.keep(call.key, call.digest, pack(failure(failed)))
            raise failed from None
        if not again:
            order.hand_out(draw, task.idx, call.key, call.digest, lease, call.client)
        calls.reply_and_keep(call, data)

    async def _fetch_sample(self, draw: Draw, lease: float) -> bytes:
        return self._pack_sample(await self.server.host.fetch(draw), draw, lease)

    async def _make_sample(self, call: Call, draw: Draw, lease: float) -> bytes:
        async def fetch(draw: Draw) -> tuple[int, bytes]:
            task = await self.server.host.fetch(draw)
            return task.idx, self._pack_sample(task, draw, lease)

        given: Given = {"request": call.key, "digest": call.digest, "lease": lease, "holder": call.client}
        return await self.server.make(draw, fetch, **given)

    def _pack_sample(self, task: Task, draw: Draw, lease: float = 0.0) -> bytes:
        """The response with a signed task."""
        if type(task) is not Task:
            # In the form that the client will send back: an integer in a float field becomes a float.
            task = unpack(pack(task), type(task))
        sealed = msgspec.Raw(pack_task(task, self.server.signer.sign(task)))
        self.server.metrics.sources[task.data_source] += 1
        return pack(messages.SampleResponse(task=sealed, index=draw.index, attempt=draw.attempt, lease=lease or None))

    def _renew(self, call: Call, request: messages.LeaseRequest) -> bytes:
        pending = self.server.streams.pending
        return messages.pack_reply(found=pending.renew_task(request.idx, call.client, request.lease))

    def _finish_lease(self, call: Call, request: messages.LeaseRequest) -> None:
        if not self.calls.is_known(call):
            pending = self.server.streams.pending
            end = pending.give_back_task if call.method == "give_back" else pending.finish_task
            found = end(request.idx, call.client)
            self.calls.reply_and_keep(call, messages.pack_reply(found=found))

    def _observe(self, call: Call, request: messages.ObserveRequest) -> None:
        server = self.server
        task = server.signer.read_task(request.task, server.taskset)
        if self.calls.is_known(call):
            return
        server.order.keep_curriculum(call.key, request.stream)
        server.streams.observe(task, request.reward, request.stream)
        server.streams.pending.finish_task(task.idx, call.client)
        self.calls.reply_and_keep(call, messages.pack_reply())

    def _state(self, call: Call, request: messages.StateRequest) -> bytes:
        return messages.pack_reply(state=self.server.streams.state(request.stream))

    def _restore(self, call: Call, request: messages.RestoreRequest) -> None:
        if self.calls.is_known(call):
            return
        for stream in request.state.streams:
            self.server.order.keep_stream(call.key, stream)
        self.server.streams.restore(request.state)
        self.calls.reply_and_keep(call, messages.pack_reply())

    # Rollouts and episodes

    def _run(self, call: Call, request: messages.RunRequest) -> None:
        size = (request.of or request.n) if isinstance(request, messages.RunGroupRequest) else 1
        if not 1 <= size <= MOST_IN_GROUP:
            raise UsageError(f"a group must have 1 to {MOST_IN_GROUP} rollouts, got {size}")
        host, pending = self.server.host, self.server.streams.pending
        if request.version is not None:
            host.reach_version(request.model, request.endpoint, request.version)
        lease = pending.find(messages.read_idx(request.task), call.client) if pending.leased else None
        if lease is None:
            self.calls.begin(call, lambda: host.run_request(call.method, call.payload, size), size)
        elif self.calls.begin(call, lambda: self._run_leased(call, size, request.finish), size):
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
        if not self.calls.is_known(call):
            self.calls.spawn(call, self._do_change_weights(call.method, request))

    async def _do_change_weights(self, method: str, request: messages.WeightsRequest) -> bytes:
        return messages.pack_reply(quiet=await self.server.host.change_weights(method, request))

    def _start(self, call: Call, request: messages.StartRequest) -> None:
        self.calls.begin(call, lambda: self._start_episode(call, request), 1)

    async def _start_episode(self, call: Call, request: messages.StartRequest) -> bytes:
        task = self.server.signer.read_task(request.task, self.server.taskset)
        started = await self.server.host.start(
            task, step=request.step, terms=self.terms, name=call.key, holder=call.client
        )
        return messages.pack_reply(**msgspec.structs.asdict(started))

    def _step(self, call: Call, request: messages.StepRequest) -> None:
        step = self.server.host.step
        self.calls.begin(call, lambda: step(request.episode, request.action, request.turn, terms=self.terms))

    def _cancel(self, call: Call, request: messages.CancelRequest) -> bytes | None:
        target = request.id.encode() if isinstance(request.id, str) else request.id
        if not isinstance(target, bytes):
            raise BadRequest("an id must be bytes or text")
        target = call.client + target
        book = self.server.host.episodes
        # The start was answered before it was cancelled, so its episode must end.
        episode = (book.live.get(request.id) if isinstance(request.id, str) else None) or book.by_name(target)
        if episode is not None and episode.terms is self.terms:
            if not self.calls.is_known(call):
                self.calls.spawn(call, self._cancel_episode(episode.id))
            return None
        running = self.calls.running.get(target)
        found = running is not None and running.task.get_name() != "sample" and running.task.cancel()
        return messages.pack_reply(found=found)

    async def _cancel_episode(self, episode: str) -> bytes:
        return messages.pack_reply(found=await self.server.host.cancel(episode))
