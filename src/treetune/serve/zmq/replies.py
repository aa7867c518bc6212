"""The replies of a server, by who asked for what under which id: repeating a request repeats its reply, not the work.

replies.keep(key, digest, data)
replies.find(key, digest)           # the data; raises Misused where another request had that key
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from treetune.serve.errors import Misused


class ReplyCache:
    """They are kept until acknowledged, or for a bounded time and size."""

    def __init__(self, most_bytes: int = 256 << 20, most: int = 100_000, seconds: float = 900.0) -> None:
        self._most_bytes, self._most, self._seconds = most_bytes, most, seconds
        self._kept: OrderedDict[bytes, tuple[float, bytes, bytes]] = OrderedDict()
        self._settled: OrderedDict[bytes, None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, digest: bytes) -> bytes | None:
        """The reply to this very request. One whose reply was acknowledged is late, or its id was taken twice."""
        if (found := self._kept.get(key)) is not None:
            check_same(found[1], digest)
            return found[2]
        if self.is_settled(key):
            raise Misused("this request was answered, and its answer acknowledged", remedy="give each request a new id")
        return None

    def keep(self, key: bytes, digest: bytes, data: bytes) -> None:
        self._kept[key] = (time.monotonic(), digest, data)
        self._bytes += len(data)
        if self._bytes > self._most_bytes or len(self._kept) > self._most:
            self.shrink()

    def acknowledge(self, keys: Iterable[bytes]) -> None:
        """Forgets the replies, but not that they were given: a late repetition must not begin anew."""
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
        """Forgets what is too old, or too much."""
        oldest = time.monotonic() - self._seconds
        while self._kept:
            key, (when, _, _) = next(iter(self._kept.items()))
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes and when >= oldest:
                return
            self.drop(key)


def check_same(before: bytes, now: bytes) -> None:
    """Refuses a request under an id that this client used for another one."""
    if before != now:
        raise Misused(
            "this client used the id for another request: another method, or another payload",
            remedy="give each request a new id; to repeat one, send the same frames",
        )
