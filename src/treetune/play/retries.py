"""Retries: when a draw that failed is tried again, and whose fault the failures are.

    retries.fail(key, "OSError: ...")   # it waits, longer after each failure
    retries.succeed(key)                # a draw was made, so that what makes tasks works

While nothing succeeds, the source of the tasks is down and no index is at fault: draws are tried again, further and
further apart. A failure counts against an index only where other draws succeed between its failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FIRST_WAIT = 0.05
LONGEST_WAIT = 2.0
_MOST_FAILED = 1024
"""While nothing succeeds, so many different draws are tried at most."""
Key = tuple[str, int]
"""The stream and the index of a draw."""


class _Failure(NamedTuple):
    at: float
    made: int
    """How many draws had succeeded by then."""
    number: int
    """How often it has failed."""
    problem: str


class Retries:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.failed: dict[Key, _Failure] = {}
        """The draws that failed and are not done."""
        self._made = 0
        self._rounds = 0
        """How many rounds of tries have failed since a draw succeeded."""
        self._next_round = 0.0

    def fail(self, key: Key, problem: str) -> bool:
        """Says whether it counts against the index: not where nothing has succeeded since it failed before."""
        now, before = self._clock(), self.failed.get(key)
        counts = before is None or before.made < self._made
        if (before is None or not counts) and (not self._rounds or now >= self._next_round):
            self._rounds += 1
            self._next_round = now + _wait(self._rounds)
        self.failed[key] = _Failure(now, self._made, 1 if before is None else before.number + counts, problem)
        return counts

    def succeed(self, key: Key) -> None:
        self._made += 1
        self._rounds = 0
        self.failed.pop(key, None)

    def forget(self, key: Key) -> None:
        self.failed.pop(key, None)
        if not self.failed:
            self._rounds = 0

    def others_succeed(self, key: Key) -> bool:
        """Whether another draw has succeeded since this one failed."""
        return (failure := self.failed.get(key)) is not None and failure.made < self._made

    def is_due(self, key: Key) -> bool:
        """Whether this draw is to be tried before the next index. While nothing succeeds, most rounds try the next
        index instead, for it may be that only some are at fault."""
        if key not in self.failed or self.others_succeed(key):
            return True
        return len(self.failed) >= _MOST_FAILED or (self._rounds > 0 and self._rounds % 4 == 0)

    def seconds_until(self, key: Key) -> float:
        """How long to wait before this draw is tried."""
        at = self._next_round if self._rounds else 0.0
        if (failure := self.failed.get(key)) is not None:
            at = max(at, failure.at + _wait(failure.number))
        return max(0.0, at - self._clock())


def _wait(number: int) -> float:
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(number - 1, 30))
