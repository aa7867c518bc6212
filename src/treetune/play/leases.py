"""Draws that are not finished: their tasks could not be made, are being made, or are leased.

    pending.hold(draw)                              # its task is being made
    pending.fail(draw, "OSError: ...")              # its task failed: hand out again, skip after some tries
    pending.lease(draw, task.idx, 60.0, holder)     # handed out for a minute
    pending.expire()                                # hand out again what was neither finished nor renewed

A cursor only moves forward. Unfinished draws behind it are kept here, and handed out before the cursor moves again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from treetune.errors import UsageError

LONGEST_LEASE = 7 * 86400.0
"""The maximum duration of a lease in seconds."""
HERE = b""
"""The holder of leases without a client: this process, or the HTTP server."""
DRAW_TRIES = 3
"""How often the task of a draw may fail before it is skipped."""
FIRST_WAIT = 0.05
LONGEST_WAIT = 2.0
_MOST_FAILED = 1024
"""While nothing succeeds, at most this many different draws are tried."""
Key = tuple[str, int]
"""The stream and the index of a draw."""
log = logging.getLogger(__name__)


class Draw(msgspec.Struct, frozen=True):
    """One draw from a stream, with everything needed to make its task again."""

    stream: str
    index: int
    position: int | None = None
    """The position in the taskset, if a curriculum chose it."""
    attempt: int = 0
    """How often it was handed out before and its lease expired."""

    @property
    def key(self) -> Key:
        return self.stream, self.index


class Pending(msgspec.Struct, frozen=True):
    """The saved form of an unfinished draw."""

    index: int
    position: int | None = None
    attempt: int = 0
    tries: int = 0
    """How often making its task failed."""
    seconds: float = 0.0
    """The duration of its lease; 0 if it waits to be handed out."""
    task: int = 0
    """The `idx` of the leased task."""
    holder: bytes = HERE
    """The client that holds the lease."""


class PendingDraws:
    def __init__(self, clock: Callable[[], float] = time.monotonic, tries: int = DRAW_TRIES) -> None:
        """`tries` is how often the task of a draw may fail, while others succeed, before it is skipped."""
        self.clock, self.tries = clock, tries
        self.retries = Retries(clock)
        self._all: dict[Key, Pending] = {}
        self.due: dict[str, list[int]] = {}
        """Indices to hand out, by stream, as heaps. Some may be finished by now."""
        self.making: dict[Key, Draw] = {}
        """The draws whose tasks are being made."""
        self.expires: dict[Key, float] = {}
        """When leases expire. This is not saved: after a restart each lease runs for its full duration again."""
        self._leases: dict[tuple[bytes, int], list[Key]] = {}
        """Leases by holder and task."""
        self.work: dict[Key, set[Hashable]] = {}
        """The requests and episodes that use a lease."""
        self._lease_of: dict[Hashable, Key] = {}
        self.changed: set[Key] | None = None
        """The keys that changed since draws were last saved; None if they are not saved."""
        self.skipped = self.expired = self.given_back = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def leased(self) -> int:
        """The number of leased tasks."""
        return len(self.expires)

    # Making a task

    def take(self, stream: str) -> Draw | None:
        """The first draw of a stream to hand out again. Draws that failed too often are skipped."""
        indices = self.due.get(stream)
        later: list[int] = []
        draw = None
        while indices and draw is None:
            key = (stream, heappop(indices))
            found = self._all.get(key)
            if found is None or found.seconds or key in self.making:
                continue
            if found.tries >= self.tries and self.retries.others_succeed(key):
                self._skip(key, found)
            elif not self.retries.is_due(key):
                later.append(found.index)
            else:
                draw = self.making[key] = Draw(stream, found.index, found.position, found.attempt)
        if indices is not None:
            for index in later:
                heappush(indices, index)
            if not indices:
                del self.due[stream]
        return draw

    def _skip(self, key: Key, found: Pending) -> None:
        self.skipped += 1
        problem = self.retries.failed[key].problem
        log.warning("%s is skipped, after %d tries: %s", name_draw(*key), found.tries, problem)
        self._put(key, None)

    def seconds_until(self, draw: Draw) -> float:
        """How long to wait before trying a draw, because it failed or because nothing else succeeds."""
        return self.retries.seconds_until(draw.key) if self.retries.failed else 0.0

    def hold(self, draw: Draw) -> None:
        """Record that the task of the draw is being made."""
        key = draw.key
        self.making[key] = draw
        if key not in self._all:
            self._put(key, Pending(draw.index, draw.position, draw.attempt))

    def settle(self, draw: Draw) -> None:
        """Record that the task of the draw was handed out."""
        if self.retries.failed:
            self.retries.succeed(draw.key)
        if self._release(draw):
            self._put(draw.key, None)

    def fail(self, draw: Draw, problem: str) -> int:
        """Record a failure, and count it as a try if the index may be the cause; return the number of tries."""
        key = draw.key
        if not self._release(draw):
            return 0  # the stream was restored to another position
        found = self._all[key]
        if self.retries.fail(key, problem):
            found = msgspec.structs.replace(found, tries=found.tries + 1)
        self._put(key, found)
        return found.tries

    def give_back(self, draw: Draw) -> None:
        """Return a draw because the caller gave up; the next request gets it."""
        if self._release(draw):
            self._put(draw.key, self._all[draw.key])

    def give_again(self, draw: Draw) -> None:
        """Hand out the draw again, because the client got an error instead of the task."""
        self._put(draw.key, Pending(draw.index, draw.position, draw.attempt))

    def _release(self, draw: Draw) -> bool:
        if self.making.get(draw.key) is not draw:
            return False
        del self.making[draw.key]
        return True

    # Leases

    def lease(self, draw: Draw, task: int, seconds: float, holder: bytes) -> None:
        if self.retries.failed:
            self.retries.succeed(draw.key)
        self._release(draw)
        self._put(draw.key, Pending(draw.index, draw.position, draw.attempt, 0, seconds, task, holder))

    def find(self, task: int, holder: bytes, free: bool = False) -> Key | None:
        """The first lease that a client has on a task; with `free`, the first that is not in use."""
        leases = self._leases.get((holder, task)) if self._leases else None
        return next((key for key in leases if not (free and key in self.work)), None) if leases else None

    def attempt(self, key: Key) -> int:
        return self._all[key].attempt

    def renew_task(self, task: int, holder: bytes, seconds: float | None = None) -> bool:
        """Renew the first lease that a client has on a task; return whether there is one."""
        return self._change(
            task, holder, lambda key: self.renew(key, None if seconds is None else check_lease(seconds))
        )

    def finish_task(self, task: int, holder: bytes) -> bool:
        """Finish the lease; return whether there was one."""
        return self._change(task, holder, self.finish)

    def give_back_task(self, task: int, holder: bytes) -> bool:
        """Hand out the task to the next request; return whether there was a lease."""
        return self._change(task, holder, lambda key: self._give_out_again(key, expired=False))

    def _change(self, task: int, holder: bytes, change: Callable[[Key], None]) -> bool:
        if (key := self.find(task, holder)) is None:
            return False
        change(key)
        return True

    def renew(self, key: Key, seconds: float | None = None) -> None:
        if key in self.expires:
            if seconds is not None and seconds != self._all[key].seconds:
                self._all[key] = msgspec.structs.replace(self._all[key], seconds=seconds)
                self._note(key)
            self.expires[key] = self.clock() + self._all[key].seconds

    def finish(self, key: Key) -> None:
        if key in self.expires:
            self._put(key, None)

    def begin_work(self, key: Key, name: Hashable) -> None:
        """Record that a request or episode of this name uses a leased task."""
        if key in self.expires:
            self.work.setdefault(key, set()).add(name)
            self._lease_of[name] = key
            self.renew(key)

    def renew_work(self, name: Hashable) -> None:
        """Renew the lease that a request or episode uses, because its client has sent something."""
        if (key := self._lease_of.get(name)) is not None:
            self.renew(key)

    def renew_all_work(self) -> None:
        for key in self.work:
            self.renew(key)

    def end_work(self, name: Hashable, finish: bool | None = True, expired: bool = True) -> None:
        """End the use of a lease by a request or episode. If it was the last one, the lease is finished. With `finish`
        False, the task is handed out again instead, as expired or given back; with None the lease stays."""
        if (key := self._lease_of.pop(name, None)) is None:
            return
        self.work[key].discard(name)
        if self.work[key]:
            return
        del self.work[key]
        if finish:
            self.finish(key)
        elif finish is False:
            self._give_out_again(key, expired)

    def expire(self) -> list[Hashable]:
        """Hand out again what was neither finished nor renewed; return the names of the work on it."""
        now = self.clock()
        work: list[Hashable] = []
        for key in [key for key, expires in self.expires.items() if expires <= now]:
            work += self.work.get(key, ())
            self._give_out_again(key)
        return work

    def _give_out_again(self, key: Key, expired: bool = True) -> None:
        found = self._all[key]
        self.expired += expired
        self.given_back += not expired
        self._put(key, Pending(found.index, found.position, found.attempt + 1))

    # Saving and restoring

    def of(self, stream: str) -> list[Pending]:
        """The draws of a stream for a checkpoint, except those being made, because a client waits for them."""
        return [found for key, found in self._all.items() if key[0] == stream and key not in self.making]

    def get(self, key: Key) -> Pending | None:
        return self._all.get(key)

    def place(self, stream: str, pending: Iterable[Pending], keep_leases: bool = False) -> None:
        """Replace the draws of a stream. Unless `keep_leases` is set, leased tasks are handed out again."""
        for key in [key for key in self._all if key[0] == stream]:
            self.making.pop(key, None)
            self._put(key, None)
        for found in pending:
            if found.seconds and not keep_leases:
                found = Pending(found.index, found.position, found.attempt + 1)
            self._put((stream, found.index), found)

    def _put(self, key: Key, found: Pending | None) -> None:
        before = self._all.pop(key, None)
        if before is not None and before.seconds:
            self._forget_lease(key, before)
        self._note(key)
        if found is None:
            if self.retries.failed:
                self.retries.forget(key)
            return
        self._all[key] = found
        if found.seconds:
            self.expires[key] = self.clock() + found.seconds
            self._leases.setdefault((found.holder, found.task), []).append(key)
        elif key not in self.making:
            heappush(self.due.setdefault(key[0], []), key[1])

    def _note(self, key: Key) -> None:
        if self.changed is not None:
            self.changed.add(key)

    def _forget_lease(self, key: Key, lease: Pending) -> None:
        del self.expires[key]
        of_task = self._leases[lease.holder, lease.task]
        of_task.remove(key)
        if not of_task:
            del self._leases[lease.holder, lease.task]
        for name in self.work.pop(key, ()):
            self._lease_of.pop(name, None)


def name_draw(stream: str, index: int) -> str:
    return f"index {index}" + (f" of stream {stream!r}" if stream else "")


def check_lease(seconds: float) -> float:
    """Check the duration of a lease; 0 means no lease."""
    if not 0 <= seconds <= LONGEST_LEASE:
        problem = f"a lease of {seconds!r:.40} seconds"
        raise UsageError(problem, remedy=f"a lease has 0 (none) to {LONGEST_LEASE:.0f} seconds")
    return seconds


# Retrying failed draws


class _Failure(NamedTuple):
    at: float
    made: int
    """How many draws had succeeded when it failed."""
    number: int
    """How often it has failed."""
    problem: str


class Retries:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.failed: dict[Key, _Failure] = {}
        """The draws that failed and are not finished."""
        self._made = 0
        self._rounds = 0
        """How many rounds of tries have failed since a draw last succeeded."""
        self._next_round = 0.0

    def fail(self, key: Key, problem: str) -> bool:
        """Record a failure. Returns whether it counts against the index; it does not if no draw has succeeded since the
        last failure of this one."""
        now, before = self.clock(), self.failed.get(key)
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
        """Whether to try this draw before the next index. While nothing succeeds, most rounds try the next index,
        because perhaps only some indices fail."""
        if key not in self.failed or self.others_succeed(key):
            return True
        return len(self.failed) >= _MOST_FAILED or (self._rounds > 0 and self._rounds % 4 == 0)

    def seconds_until(self, key: Key) -> float:
        """How long to wait before trying this draw."""
        at = self._next_round if self._rounds else 0.0
        if (failure := self.failed.get(key)) is not None:
            at = max(at, failure.at + _wait(failure.number))
        return max(0.0, at - self.clock())


def _wait(number: int) -> float:
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(number - 1, 30))
