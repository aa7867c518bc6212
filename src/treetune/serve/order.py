"""The order of a server: its streams, and their state on disk. A draw is stored before its task is handed out.

draw = order.advance(stream)
order.hand_out(draw, task.idx, request_key, digest)
order.commit()                      # once for a batch of requests; if it fails, the draws are handed out again
"""

from __future__ import annotations

from typing import Any

from treetune.errors import DrawFailed, StreamEnded
from treetune.play.leases import HERE, Draw
from treetune.play.streams import Streams, StreamState
from treetune.serve.errors import Misused
from treetune.serve.store import Answer, Store

FAILED = -1
"""The index of a draw that failed."""


class StoredStreams:
    def __init__(self, streams: Streams, store: Store | None = None) -> None:
        self.streams, self.store = streams, store
        self.recovered: dict[bytes, tuple[bytes, Draw]] = {}
        """Draws for requests before this server started, with the digests of the requests."""
        if store is not None:
            self.recovered = store.draws()
            streams.place(store.streams(), keep_leases=True)
            streams.pending.changed = set()
        self._moved: set[str] = set()
        """Streams whose cursor moved."""
        self._given: list[Draw] = []
        self._answers: list[Answer] = []
        self._before: dict[str, StreamState] = {}
        self._curricula: dict[str, Any] = {}
        self.unsaved: set[bytes] = set()
        """Requests that changed something since the last commit."""

    # Draws

    def recall(self, key: bytes, digest: bytes) -> tuple[Draw, float] | None:
        """Returns the draw that an earlier server made for this request if its reply may not have arrived, and the
        seconds of its lease."""
        if key not in self.recovered:
            return None
        kept, draw = self.recovered[key]
        if kept != digest:
            raise Misused("this id was used for another request", remedy="give each request a new id")
        if draw.index == FAILED:
            raise DrawFailed("the task of this request could not be made", remedy="sample again, with a new id")
        del self.recovered[key]
        found = self.streams.pending.get((draw.stream, draw.index))
        if found is None:
            return draw, 0.0
        # Another client may have it by now, or it waits for the next request.
        return (draw, found.seconds) if found.seconds and found.attempt == draw.attempt else None

    def advance(self, stream: str) -> Draw:
        draw = self.streams.advance(stream)
        if self.store is not None:
            self._moved.add(stream)
        return draw

    def hand_out(
        self,
        draw: Draw,
        task: int,
        request: bytes = b"",
        digest: bytes = b"",
        lease: float = 0.0,
        holder: bytes = HERE,
    ) -> None:
        """Called when the task of a draw was created. The client gets it, leased for `lease` seconds if given."""
        pending = self.streams.pending
        if lease:
            pending.lease(draw, task, lease, holder)
        elif pending.making or pending.retries.failed:
            pending.settle(draw)
        if self.store is not None:
            self._given.append(draw)
            if request:
                self.unsaved.add(request)
                self._answers.append((request, digest, draw.stream, draw.index, draw.position, draw.attempt))

    def fail(self, draw: Draw, error: Exception, request: bytes, digest: bytes) -> DrawFailed | StreamEnded:
        """Called when the task of a draw could not be created. Returns the error to raise."""
        self.streams.pending.hold(draw)
        self.refuse(request, digest)
        return self.streams.fail(draw, error)

    def refuse(self, request: bytes, digest: bytes) -> None:
        """The request failed. If it is repeated to the next server, it must not draw."""
        if self.store is not None and request:
            self._answers.append((request, digest, "", FAILED, None, 0))

    # Other changes

    def keep_stream(self, request: bytes, stream: str) -> None:
        """Remembers the position of a stream that the request may change."""
        if self.store is not None:
            self.unsaved.add(request)
            self._moved.add(stream)
            self._before.setdefault(stream, self.streams.stream_state(stream))

    def keep_curriculum(self, request: bytes, stream: str) -> None:
        """Remembers the state of a stream's curriculum that the request may change."""
        self.streams.open(stream)
        if self.store is not None:
            self.unsaved.add(request)
            self._moved.add(stream)
            self._curricula.setdefault(stream, self.streams.curriculum_state(stream))

    def commit(self) -> None:
        """Stores all changes. If that fails, streams and curricula are reset, and their draws are handed out again."""
        store, pending = self.store, self.streams.pending
        if store is None or not (self._moved or pending.changed or self._answers):
            return
        given, answers, before, curricula = self._given, self._answers, self._before, self._curricula
        self._given, self._answers, self._before, self._curricula, self.unsaved = [], [], {}, {}, set()
        changed = pending.changed or set()
        try:
            streams = {
                name: StreamState(self.streams.cursor(name), self.streams.curriculum_state(name))
                for name in self._moved
            }
            store.commit(streams, answers, {key: pending.get(key) for key in changed})
        except Exception:  # for example a full disk, or a curriculum whose state cannot be stored
            for draw in given:
                pending.give_again(draw)
            self.streams.place(before)
            for name, state in curricula.items():
                self.streams.restore_curriculum(name, state)
            raise
        self._moved, pending.changed = set(), set()
