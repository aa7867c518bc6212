"""What is remembered of episodes that have ended: why, and the last answer, which may be asked for again.

    past = Past()
    past.add("e-1", gone("expired", "nobody stepped this episode"), name="a request")
    past.of("e-1").kind                     # "expired"

All of it is bounded: by number, and the answers by their size.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import msgspec

_MOST = 20_000
"""Ended episodes that are still told apart from those that never were."""
_MOST_ANSWER_BYTES = 64 << 20


class Gone(msgspec.Struct, frozen=True, gc=False):
    """Why an episode is no more."""

    kind: str
    error: str


gone = lru_cache(maxsize=64)(Gone)
"""One for many: thousands may end for one reason."""


class Past:
    def __init__(self, most_answer_bytes: int = _MOST_ANSWER_BYTES) -> None:
        self._most_answer_bytes = most_answer_bytes
        self._ids, self._names = _Ring(_MOST), _Ring(_MOST)
        self._answers: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._answer_bytes = 0

    def add(self, id: str, why: Gone, name: str | None = None) -> None:
        """`name` is that of the request which started it."""
        self._ids.add(id, why)
        if name is not None:
            self._names.add(name, why)

    def of(self, id: str) -> Gone | None:
        return self._ids.get(id)

    def of_name(self, name: str) -> Gone | None:
        return self._names.get(name)

    def keep_answer(self, id: str, turn: int, answer: bytes) -> None:
        """The answer to the step that ended an episode."""
        self._answers[id] = (turn, answer)
        self._answer_bytes += len(answer)
        while len(self._answers) > 1 and (len(self._answers) > _MOST or self._answer_bytes > self._most_answer_bytes):
            _, (_, dropped) = self._answers.popitem(last=False)
            self._answer_bytes -= len(dropped)

    def answer(self, id: str, turn: int | None) -> bytes | None:
        kept = self._answers.get(id)
        return kept[1] if kept is not None and kept[0] == turn else None


class _Ring:
    """The latest texts with what is known of each, as hashes in one piece of memory: thousands of small objects would
    lie among all that the episodes used, and keep it from being given back."""

    def __init__(self, most: int) -> None:
        self._hashes = bytearray(8 * most)
        self._known: list[Gone | None] = [None] * most
        self._next = 0

    def add(self, text: str, why: Gone) -> None:
        at = self._next
        self._hashes[8 * at : 8 * at + 8] = _hashed(text)
        self._known[at] = why
        self._next = (at + 1) % len(self._known)

    def get(self, text: str) -> Gone | None:
        wanted = _hashed(text)
        at = self._hashes.find(wanted)
        while at >= 0 and at % 8:  # across two of them
            at = self._hashes.find(wanted, at + 1)
        return self._known[at // 8] if at >= 0 else None


def _hashed(text: str) -> bytes:
    return hash(text).to_bytes(8, "big", signed=True)
