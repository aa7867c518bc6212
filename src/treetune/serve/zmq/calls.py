"""The requests of a ZMQ door: who sent them, which are running, which were answered. Each runs once and gets one reply.

    call = gate.identify(frames)            # raises Denied, Misused or BadRequest; the payload is not decoded
    calls = CallTable(server, send)
    if not calls.is_known(call):
        calls.spawn(call, work())           # its reply is sent when it has ended
    calls.finish_batch()                    # stores the draws of the batch, then sends its replies

A client may repeat a request: the repetition gets the same reply, and no work is done twice.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

from treetune.errors import TreetuneError
from treetune.play.episode_table import EpisodeEnded
from treetune.play.protocol import PROTOCOL
from treetune.serve.errors import BadRequest, Cancelled, Denied, Misused, Stopping, WorkerLost
from treetune.serve.messages import CLIENT_BYTES, failure, pack, read_head
from treetune.serve.server import EnvServer
from treetune.serve.zmq.sockets import Frames

LONGEST_ID = 64
_LONGEST_DIGEST = 32
_MOST_CLIENTS = 4096


class Call(NamedTuple):
    """A request: its client, id, method and payload."""

    identity: bytes
    """The identity of the connection."""
    id: bytes
    method: str
    payload: bytes = b""
    client: bytes = b""
    key: bytes = b""
    """The client and the id, which together identify the request."""
    digest: bytes = b""
    """A digest of method and payload. The same key with another digest is another request."""


class Gate:
    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token is not None else None
        self._clients: dict[bytes, bytes] = {}
        """Clients by accepted head: a client sends the same head with every request."""

    def admits(self, frames: Frames) -> bool:
        """Whether a large frame is accepted after these frames: only as the payload of a client with the token."""
        return len(frames) == 4 and self._has_token(frames[3][1 + CLIENT_BYTES :])

    def identify(self, frames: Frames) -> Call:
        if len(frames) != 5:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}: a request has four frames, not {len(frames) - 1}",
                remedy="install the same version of treetune on both sides; docs/serving/wire-format.md has the format",
            )
        identity, id, method, head, payload = frames
        client = self._clients.get(head) or self._read(head)
        # Most requests are short enough to serve as their own digest.
        digest = method + payload
        if len(digest) > _LONGEST_DIGEST:
            digest = blake2b(digest, digest_size=_LONGEST_DIGEST).digest()
        return Call(identity, id, method.decode(), payload, client, client + id, digest)

    def _read(self, head: bytes) -> bytes:
        protocol, client, token = read_head(head)
        if protocol != PROTOCOL:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}, the client protocol {protocol}",
                remedy="install the same version of treetune on both sides",
            )
        if not self._has_token(token):
            raise Denied("the token is missing or wrong", remedy="pass the server's --token to the client")
        if len(self._clients) >= _MOST_CLIENTS:
            self._clients.clear()
        self._clients[head] = client
        return client

    def _has_token(self, token: bytes) -> bool:
        return self._token is None or hmac.compare_digest(self._token, token)


log = logging.getLogger("treetune.serve")
Reply = tuple[bytes, bytes, bytes]
"""The identity of a connection, the id of its request, the data."""


class ReplyCache:
    """The replies, kept until they are acknowledged, or up to a limit of time and size."""

    def __init__(self, most_bytes: int = 256 << 20, most: int = 100_000, seconds: float = 900.0) -> None:
        self._most_bytes, self._most, self._seconds = most_bytes, most, seconds
        self._kept: OrderedDict[bytes, tuple[float, bytes, bytes]] = OrderedDict()
        self._settled: OrderedDict[bytes, None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, digest: bytes) -> bytes | None:
        """Returns the reply to this request. Raises Misused if its reply was acknowledged, or its id was used for
        another request."""
        if (found := self._kept.get(key)) is not None:
            check_same(found[1], digest)
            return found[2]
        if self.is_settled(key):
            raise Misused(
                "this request was answered, and the client has acknowledged the answer",
                remedy="give each request a new id",
            )
        return None

    def keep(self, key: bytes, digest: bytes, data: bytes) -> None:
        self._kept[key] = (time.monotonic(), digest, data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes or len(self._kept) > self._most:
            self.shrink()

    def acknowledge(self, keys: Iterable[bytes]) -> None:
        """Drops the replies but remembers the keys: a late repetition must not run again."""
        for key in keys:
            self.drop(key)
            self._settled[key] = None
        while len(self._settled) > self._most:
            self._settled.popitem(last=False)

    def is_settled(self, key: bytes) -> bool:
        return key in self._settled

    def drop(self, key: bytes) -> None:
        if (found := self._kept.pop(key, None)) is not None:
            self._bytes -= len(found[2])

    def shrink(self) -> None:
        """Drops replies that are too old or too many."""
        oldest = time.monotonic() - self._seconds
        while self._kept:
            key, (when, _, _) = next(iter(self._kept.items()))
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes and when >= oldest:
                return
            self.drop(key)


def check_same(before: bytes, now: bytes) -> None:
    """Raises Misused if the client used the id for another request."""
    if before != now:
        raise Misused(
            "this client used the id for another request: another method, or another payload",
            remedy="give each request a new id; to repeat one, send the same frames",
        )


class RunningCall(NamedTuple):
    """Running work, and the connections that wait for its reply."""

    task: asyncio.Task[bytes]
    identities: list[bytes]
    digest: bytes


class CallTable:
    def __init__(self, server: EnvServer, send: Callable[[Reply], None]) -> None:
        self._server, self.send = server, send
        self._count = server.metrics.count_request
        self.replies = ReplyCache()
        self.running: dict[bytes, RunningCall] = {}
        """Running calls by the key of their request."""
        self._ready: list[Reply] = []
        """The replies of the current batch."""
        self._changing: list[Call] = []
        """The requests of the current batch that were completed at once."""

    def acknowledge(self, client: bytes, ids: list[bytes]) -> None:
        """Records that the client has received the replies to its requests with these ids."""
        keys = [client + id for id in ids if len(id) <= LONGEST_ID]
        self.replies.acknowledge(keys)
        if (pending := self._server.streams.pending).work:
            for key in keys:
                pending.end_work(key)

    # Replies of the current batch

    def reply(self, call: Call, data: bytes, kind: str | None = None) -> None:
        """Adds a reply to this batch; `kind` is the kind of an error."""
        self._count(call.method, 0.0, kind)
        self._ready.append((call.identity, call.id, data))

    def reply_and_keep(self, call: Call, data: bytes) -> None:
        self.replies.keep(call.key, call.digest, data)
        self._changing.append(call)
        self.reply(call, data)

    def fail(self, call: Call, error: BaseException) -> None:
        self.reply(call, *self._pack_failure(call, error))

    def refuse_malformed(self, identity: bytes, id: bytes, error: BadRequest) -> None:
        self._ready.append((identity, id, pack(failure(error))))

    def _pack_failure(self, call: Call, error: BaseException) -> tuple[bytes, str | None]:
        if isinstance(error, EpisodeEnded) and error.why is not None and error.why.kind == "worker_lost":
            error = WorkerLost(error.why.error, remedy="start another")
        response = failure(error)
        if response.kind == "failed" and not isinstance(error, TreetuneError):
            log.error("%s failed", call.method, exc_info=error)
        if isinstance(error, BadRequest):
            self._server.metrics.malformed += 1
        return pack(response), response.kind

    def finish_batch(self) -> None:
        """Stores the draws of the batch, then sends its replies. If storing fails, its requests fail, and their draws
        are handed out again."""
        unsaved = self._server.order.unsaved
        try:
            self._server.order.commit()
        except Exception as error:
            log.error("%s", error)
            data = pack(failure(error))
            lost = {call.key: call for call in self._changing if call.key in unsaved}
            for key in lost:
                self.replies.drop(key)
            replies = {(call.identity, call.id) for call in lost.values()}
            self._ready = [(to, id, data if (to, id) in replies else reply) for to, id, reply in self._ready]
        self._changing.clear()
        for reply in self._ready:
            self.send(reply)
        self._ready.clear()

    # Running requests

    def is_known(self, call: Call) -> bool:
        """Returns whether this request came before. A finished one gets its reply again; a running one will get it."""
        if (kept := self.replies.find(call.key, call.digest)) is not None:
            self._ready.append((call.identity, call.id, kept))
            return True
        running = self.running.get(call.key)
        if running is None:
            return False
        check_same(running.digest, call.digest)
        if call.identity not in running.identities:
            running.identities.append(call.identity)
        self._server.streams.pending.renew_work(call.key)  # its client is alive
        return True

    def begin(self, call: Call, work: Callable[[], Coroutine[Any, Any, bytes]], size: int = 0) -> bool:
        """Starts work that counts as `size` rollouts; returns False if the request came before."""
        if self.is_known(call):
            return False
        self._server.refuse_stopping()
        self._server.reserve(size)
        self.spawn(call, work(), size)
        return True

    def spawn(self, call: Call, work: Coroutine[Any, Any, bytes], size: int = 0) -> None:
        task = asyncio.get_running_loop().create_task(work, name=call.method)
        self.running[call.key] = RunningCall(task, [call.identity], call.digest)
        task.add_done_callback(functools.partial(self._finish, call, size, time.perf_counter()))

    def _finish(self, call: Call, size: int, began: float, task: asyncio.Task[bytes]) -> None:
        self._server.release(size)
        running = self.running.pop(call.key)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self._server.closing:
            error = Stopping("the server has stopped", remedy="retry when it is back")
        else:
            error = Cancelled("cancelled")
        data, kind = (task.result(), None) if error is None else self._pack_failure(call, error)
        if error is not None:
            self._server.streams.pending.end_work(call.key, finish=None)
        self._count(call.method, time.perf_counter() - began, kind)
        self.replies.keep(call.key, call.digest, data)
        for identity in running.identities:
            self.send((identity, call.id, data))

    async def stop(self) -> None:
        """Cancels running work; the replies are sent when it has ended."""
        for running in list(self.running.values()):
            running.task.cancel()
        while self.running:
            await asyncio.wait([running.task for running in self.running.values()])
            await asyncio.sleep(0)
