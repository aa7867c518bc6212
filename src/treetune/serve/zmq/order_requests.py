"""What clients ask about the order of tasks: draws, leases, what was learned, where the streams are.

Each handler is given the call and its request, and gives the response, or None where it will come later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from treetune.core.task import Task
from treetune.play.leases import Draw, check_lease
from treetune.serve import messages
from treetune.serve.errors import Busy
from treetune.serve.messages import failure, pack, unpack
from treetune.serve.server import Given
from treetune.serve.task_signer import pack_task
from treetune.serve.zmq.auth import Call

if TYPE_CHECKING:
    from treetune.serve.zmq.door import ZmqDoor

_MOST_WAITING = 20_000
"""Samples that wait for a slow taskset, before the answer is `busy`."""


class OrderRequests:
    def __init__(self, door: ZmqDoor) -> None:
        self._door = door

    def sample(self, call: Call, request: messages.SampleRequest) -> None:
        if self._door.is_known(call):
            return
        server = self._door.server
        server.refuse_stopping()
        if request.index is None and self._door.under_way() > _MOST_WAITING:
            raise Busy("too many requests are waiting for a task", remedy="ask again soon")
        lease, order, again = 0.0, server.order, request.index is not None
        if request.index is not None:
            draw = server.streams.draw_at(request.index)
        elif order.recovered and (before := order.recall(call.key, call.digest)) is not None:
            (draw, lease), again = before, True  # it is drawn, and only its reply is missing
        else:
            lease = (server.config.lease or 0.0) if request.lease is None else check_lease(request.lease)
            draw = order.advance(request.stream)
        if not server.streams.cheap or (not again and server.streams.pending.seconds_until(draw) > 0):
            if again:
                self._door.spawn(call, self._fetch(draw, lease))
            else:
                server.streams.pending.hold(draw)
                self._door.spawn(call, self._make(call, draw, lease))  # which runs after the commit of this batch
            return
        try:
            task = server.streams.task(draw)
            data = self._pack_sample(task, draw, lease)
        except Exception as error:
            told = error if again else order.fail(draw, error, call.key, call.digest)
            self._door.replies.keep(call.key, call.digest, pack(failure(told)))
            raise told from None
        if not again:
            order.hand_out(draw, task.idx, call.key, call.digest, lease, call.client)
        self._door.reply_and_keep(call, data)

    async def _fetch(self, draw: Draw, lease: float) -> bytes:
        return self._pack_sample(await self._door.server.host.fetch(draw), draw, lease)

    async def _make(self, call: Call, draw: Draw, lease: float) -> bytes:
        async def fetch(draw: Draw) -> tuple[int, bytes]:
            task = await self._door.server.host.fetch(draw)
            return task.idx, self._pack_sample(task, draw, lease)

        given: Given = {"request": call.key, "digest": call.digest, "lease": lease, "holder": call.client}
        return await self._door.server.make(draw, fetch, **given)

    def _pack_sample(self, task: Task, draw: Draw, lease: float = 0.0) -> bytes:
        """The response with a task, sealed."""
        if type(task) is not Task:
            # As it will be once it has travelled: an integer in a field of floats comes out as a float.
            task = unpack(pack(task), type(task))
        sealed = msgspec.Raw(pack_task(task, self._door.server.signer.sign(task)))
        self._door.server.metrics.sources[task.data_source] += 1
        return pack(messages.SampleResponse(task=sealed, index=draw.index, attempt=draw.attempt, lease=lease or None))

    def renew(self, call: Call, request: messages.LeaseRequest) -> bytes:
        pending = self._door.server.streams.pending
        return messages.pack_reply(found=pending.renew_task(request.idx, call.client, request.lease))

    def finish_lease(self, call: Call, request: messages.LeaseRequest) -> None:
        if not self._door.is_known(call):
            pending = self._door.server.streams.pending
            end = pending.give_back_task if call.method == "give_back" else pending.finish_task
            found = end(request.idx, call.client)
            self._door.reply_and_keep(call, messages.pack_reply(found=found))

    def observe(self, call: Call, request: messages.ObserveRequest) -> None:
        server = self._door.server
        task = server.signer.read_task(request.task, server.taskset)
        if self._door.is_known(call):
            return
        server.order.keep_curriculum(call.key, request.stream)
        server.streams.observe(task, request.reward, request.stream)
        server.streams.pending.finish_task(task.idx, call.client)
        self._door.reply_and_keep(call, messages.pack_reply())

    def state(self, call: Call, request: messages.StateRequest) -> bytes:
        return messages.pack_reply(state=self._door.server.streams.state(request.stream))

    def restore(self, call: Call, request: messages.RestoreRequest) -> None:
        if self._door.is_known(call):
            return
        for stream in request.state.streams:
            self._door.server.order.keep_stream(call.key, stream)
        self._door.server.streams.restore(request.state)
        self._door.reply_and_keep(call, messages.pack_reply())
