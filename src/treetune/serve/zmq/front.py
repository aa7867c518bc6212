"""The front of a server: takes messages in batches, and gives every request one answer.

What a batch drew is on disk before any of its replies is sent. Answers are kept by request id, so that a client may
repeat a request whatever became of the first. What the requests mean is `server.py`'s to know.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from treetune.errors import TreetuneError
from treetune.serve.errors import BadRequest, Denied, Misused
from treetune.serve.executor import Job
from treetune.serve.metrics import Metrics
from treetune.serve.store import Store
from treetune.serve.zmq.codec import pack, unpack
from treetune.serve.zmq.reply_cache import Answers
from treetune.serve.zmq.sockets import Frames, LoopSocket
from treetune.serve.zmq.wire import Request, failure
from treetune.streams import Draw, Streams, StreamState

log = logging.getLogger("treetune.serve")
R = TypeVar("R", bound=Request)
Handler = Callable[[bytes, bytes, str, bytes], None]
"""Takes the sender's identity, the request's id, its method and payload."""
_LONGEST_ID = 64


class Front:
    streams: Streams

    def __init__(self, token: str | None) -> None:
        self._token = token
        self.answers = Answers()
        self.metrics = Metrics()
        self._handlers: dict[bytes, tuple[str, Handler]] = {}
        self._store: Store | None = None
        self._socket: LoopSocket | None = None
        # What the batch in hand has come to so far.
        self._replies: list[tuple[bytes, bytes, bytes]] = []
        self._drawn: list[tuple[bytes, Draw]] = []
        self._before: dict[str, StreamState] = {}
        self._unsaved: set[bytes] = set()
        """Requests that changed a stream."""
        self._made_later: list[Job] = []
        """Tasks to be made once it is known that they were drawn."""
        self._begun = b""

    def _make(self, job: Job) -> None:
        """Makes a task that was drawn, where that is not done at once."""
        raise NotImplementedError

    def _on_batch(self, batch: list[Frames]) -> None:
        for frames in batch:
            if len(frames) != 4 or not 1 <= len(frames[1]) <= _LONGEST_ID or frames[2] not in self._handlers:
                self._malformed(frames)
                continue
            identity, id, method, payload = frames
            self._begun = b""
            name, handler = self._handlers[method]
            try:
                handler(identity, id, name, payload)
            except Exception as error:
                self._fail(identity, id, name, error)
        self._commit()
        for reply in self._replies:
            self._send(reply)
        self._replies.clear()

    def _malformed(self, frames: Frames) -> None:
        """Dropped and counted; who at least sent an id and a method is told."""
        self.metrics.malformed += 1
        if len(frames) == 4 and 1 <= len(frames[1]) <= _LONGEST_ID:
            known = ", ".join(name.decode() for name in self._handlers)
            error = BadRequest(f"unknown method {frames[2][:40]!r}", remedy=f"the methods are {known}")
            self._replies.append((frames[0], frames[1], pack(failure(error))))

    def _fail(self, identity: bytes, id: bytes, method: str, error: Exception) -> None:
        response = failure(error)
        if response.kind == "failed":
            log.error("%s failed", method, exc_info=error)
        if isinstance(error, BadRequest):
            self.metrics.malformed += 1
        if self._begun == id:
            self.answers.finish(id, b"", keep=False)
        self.metrics.request(method, 0.0, response.kind)
        self._replies.append((identity, id, pack(response)))

    def _commit(self) -> None:
        """What the batch drew is on disk before anybody is told; where it cannot be, nobody is, and no cursor moved."""
        drawn, before, unsaved, later = self._drawn, self._before, self._unsaved, self._made_later
        self._drawn, self._before, self._unsaved, self._made_later = [], {}, set(), []
        if self._store is not None and before:
            try:
                self._store.commit({name: self.streams.stream_state(name) for name in before}, drawn)
            except TreetuneError as error:  # a full disk, a curriculum whose state cannot be kept
                log.error("%s", error)
                self.streams.place(before)
                self._take_back(unsaved, pack(failure(error)))
                later = [job for job in later if job.id not in unsaved]
        for job in later:
            self._make(job)

    def _take_back(self, lost: set[bytes], told: bytes) -> None:
        for id in lost:
            self.answers.drop(id)
        self._replies = [(to, id, told if id in lost else data) for to, id, data in self._replies]
        for id in lost:
            self._replies += [(identity, id, told) for identity in self.answers.finish(id, told, keep=False)]

    def _send(self, reply: tuple[bytes, bytes, bytes]) -> None:
        if self._socket is not None:
            self._socket.send(reply)

    def _answer(self, identity: bytes, id: bytes, method: str, response: Any) -> None:
        """Answers at once, in this batch."""
        self.metrics.request(method, 0.0)
        self._replies.append((identity, id, pack(response)))

    def _read(self, id: bytes, payload: bytes, kind: type[R]) -> R:
        """The request, once its sender has shown the token."""
        request = unpack(payload, kind)
        token = self._token
        if token is not None and not hmac.compare_digest(token.encode(), (request.token or "").encode()):
            raise Denied("the token is missing or wrong", remedy="pass the server's --token to the client")
        if request.ack:
            self.answers.acknowledge([known for known in request.ack if len(known) <= _LONGEST_ID])
        return request

    def _is_known(self, identity: bytes, id: bytes) -> bool:
        """Whether this request came before: one that was done is answered again, one under way will be. One whose
        answer was acknowledged is refused: it is late, or its id was taken twice."""
        if (kept := self.answers.kept(id)) is not None:
            self._replies.append((identity, id, kept))
            return True
        if self.answers.is_settled(id):
            raise Misused("this request was answered, and its answer acknowledged", remedy="give each request a new id")
        return self.answers.join(id, identity)

    def _begin(self, identity: bytes, id: bytes) -> None:
        """From here on a request of this id is under way."""
        self.answers.begin(id, identity)
        self._begun = id

    def _changes(self, id: bytes, stream: str) -> None:
        """Remembers how a stream was before this batch, and that it must be saved before this request is answered."""
        self.streams.open(stream)
        if self._store is None:
            return
        self._unsaved.add(id)
        if stream not in self._before:
            self._before[stream] = self.streams.stream_state(stream)
