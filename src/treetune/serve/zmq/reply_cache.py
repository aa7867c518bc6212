"""ReplyCache: replies by the id that the client gave its request. Repeating the id repeats the reply, not the work.

    replies.begin(id, identity)
    replies.join(id, other)         # True: it is under way, and that identity gets the reply too
    replies.finish(id, data)        # the identities that wait for it

Kept until acknowledged, or for a bounded time and size.
"""

from __future__ import annotations

import time
from collections import OrderedDict

MOST_BYTES = 256 << 20
MOST_REPLIES = 100_000
SECONDS = 900.0


class ReplyCache:
    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST_REPLIES, seconds: float = SECONDS) -> None:
        self._most_bytes, self._most, self._seconds = most_bytes, most, seconds
        self._waiting: dict[bytes, list[bytes]] = {}
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._settled: OrderedDict[bytes, None] = OrderedDict()
        self._bytes = 0

    def begin(self, id: bytes, identity: bytes) -> None:
        self._waiting[id] = [identity]

    def join(self, id: bytes, identity: bytes) -> bool:
        """Whether the request is under way already; this identity then gets its reply too."""
        waiting = self._waiting.get(id)
        if waiting is None:
            return False
        if identity not in waiting:
            waiting.append(identity)
        return True

    def kept(self, id: bytes) -> bytes | None:
        found = self._kept.get(id)
        return found[1] if found is not None else None

    def keep(self, id: bytes, data: bytes) -> None:
        """Keeps a reply that is given at once."""
        self._kept[id] = (time.monotonic(), data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes or len(self._kept) > self._most:
            self.shrink()

    def finish(self, id: bytes, data: bytes, keep: bool = True) -> list[bytes]:
        """Who waits for the reply; nobody where it was given already."""
        waiting = self._waiting.pop(id, [])
        if keep and waiting:
            self.keep(id, data)
        return waiting

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
        """Forgets a reply that was not given after all."""
        if (found := self._kept.pop(id, None)) is not None:
            self._bytes -= len(found[1])

    @property
    def under_way(self) -> int:
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._kept)

    def shrink(self) -> None:
        """Forgets what is too old, or too much."""
        kept = self._kept
        oldest = time.monotonic() - self._seconds
        while kept:
            id, (when, data) = next(iter(kept.items()))
            if len(kept) <= self._most and self._bytes <= self._most_bytes and when >= oldest:
                return
            del kept[id]
            self._bytes -= len(data)
