"""The weights of a model that is being trained: the current version, and when the model must not be called.

    weights = Weights()
    weights.set_version(7)                              # the trainer has loaded version 7
    await weights.pause(calls="finish")                 # no new call to the model begins
    weights.resume(8)                                   # rollouts continue with version 8

A rollout calls its policy between `begin_call` and `end_call`, and waits in `wait` during a pause. A pause does not
count against a rollout's time, and ends by itself after a while, because its client may be gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from treetune.errors import UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_SECONDS = 600.0
LONGEST_PAUSE = 86400.0
MOST_ABORTS = 30
"""How often in a row a model server may abort a call before it fails."""
LONGEST_WAIT = 5.0
MOST_MODELS = 1024
"""The maximum number of models whose weights are tracked."""
HIGHEST_VERSION = 2**31 - 1
"""Trainers store the versions of tokens in 32 bits."""

Calls = Literal["finish", "abort", "leave"]
"""How a pause handles running calls: wait for them, abort them (each is repeated afterwards), or leave them alone."""
Stale = Literal["cut", "mark"]
"""How to handle a rollout that is too old: cut it off, or play it to its end and mark its trace."""


class Weights:
    def __init__(self, counts: Counter[str] | None = None) -> None:
        """`counts` receives the counts of pauses and aborted calls."""
        self.version: int | None = None
        """None if unknown."""
        self.paused = False
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._calls: dict[asyncio.Task[Any], bool] = {}
        """Running calls, by the tasks that wait for them, and whether each was aborted."""
        self._changed = asyncio.Event()
        """Set briefly when the last running call ends, or when the pause ends."""
        self._watching: set[Callable[[int], None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._paused_at = self._paused_seconds = 0.0

    # For the trainer, or the model server

    def set_version(self, version: int) -> None:
        """Set the version, which may be lower than before."""
        self.version = check_version(version)
        for watch in list(self._watching):
            watch(version)

    def reach(self, version: int) -> bool:
        """Raise the version to at least this one; return whether it changed."""
        if version < 0 or (self.version is not None and version <= self.version):
            return False
        self.set_version(version)
        return True

    async def pause(self, calls: Calls = "finish", seconds: float = PAUSE_SECONDS) -> bool:
        """Stop new calls until `resume`, or until `seconds` have passed. Returns whether no call is running."""
        check_pause(calls, seconds)
        if not self.paused:
            self.counts["pauses"] += 1
            self._paused_at = time.monotonic()
        self.paused = True
        loop = asyncio.get_running_loop()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = loop.call_later(seconds, self._expire)
        if calls == "abort":
            for task in [task for task, aborted in self._calls.items() if not aborted]:
                self._calls[task] = True
                task.cancel()
        while calls != "leave" and self.paused and self._calls:
            await self._changed.wait()
        return not self._calls

    def resume(self, version: int | None = None) -> None:
        """End the pause, and set the version if given."""
        if version is not None:
            self.set_version(version)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.paused:
            self._paused_seconds += time.monotonic() - self._paused_at
        self.paused = False
        self._wake()

    def _expire(self) -> None:
        log.warning("a pause was not ended in time: rollouts continue with the weights that are loaded")
        self.counts["expired_pauses"] += 1
        self.resume()

    @property
    def pause_left(self) -> float:
        """Seconds until the pause ends by itself."""
        if self._expiry is None:
            return 0.0
        return max(0.001, self._expiry.when() - asyncio.get_running_loop().time())

    # For rollouts

    def clock(self) -> float:
        """The time in seconds; it stands still during pauses."""
        return (self._paused_at if self.paused else time.monotonic()) - self._paused_seconds

    async def wait(self) -> float:
        """Wait for the end of the pause; return the seconds that it took."""
        began = time.perf_counter()
        while self.paused:
            await self._changed.wait()
        return time.perf_counter() - began

    def begin_call(self) -> asyncio.Task[Any]:
        """Record the start of a model call in the running task; must be followed by `end_call`."""
        # `asyncio.timeout` would do the same at three times the cost, for every call of every rollout.
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = False
        return task

    def was_aborted(self, call: asyncio.Task[Any]) -> bool:
        """Whether a pause cancelled the call, which is then repeated."""
        aborted = self._calls[call] and call.cancelling() == 1  # only the pause cancelled it
        if aborted:
            self.counts["aborted_calls"] += 1
        return aborted

    def end_call(self, call: asyncio.Task[Any]) -> None:
        if self._calls.pop(call):
            call.uncancel()
        if self.paused and not self._calls:
            self._wake()

    def watch(self, changed: Callable[[int], None]) -> None:
        """Call `changed` with each new version, until `unwatch`."""
        self._watching.add(changed)

    def unwatch(self, changed: Callable[[int], None]) -> None:
        self._watching.discard(changed)

    @property
    def in_use(self) -> bool:
        return self.paused or bool(self._calls or self._watching)

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


class Staleness:
    """How many versions the weights may advance during a rollout, before it is cut off or marked."""

    def __init__(self, most: int, stale: Stale = "cut") -> None:
        if most < 0 or stale not in ("cut", "mark"):
            raise UsageError(
                f"max_staleness must be 0 or more, and stale 'cut' or 'mark'; got {most!r} and {stale!r:.40}"
            )
        self.most, self._stale = most, stale
        self._playing: asyncio.Timeout | None = None
        self._why: str | None = None

    async def play(self, rollout: Awaitable[None]) -> str | None:
        """Play the rollout; return the reason if it was cut off."""
        try:
            async with asyncio.timeout(None) as playing:
                self._playing = playing
                await rollout
        except TimeoutError:
            if not playing.expired():
                raise
        finally:
            self._playing = None
        return self._why

    def cut(self, why: str) -> None:
        """End the rollout, unless it has already ended."""
        if self._stale == "cut" and self._playing is not None and self._why is None:
            self._why = why
            self._playing.reschedule(asyncio.get_running_loop().time())


class WeightsBook:
    """The weights of a host's models, by the model name and endpoint in requests."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._all: dict[tuple[str | None, str | None], Weights] = {}

    def of(self, model: str | None = None, endpoint: str | None = None) -> Weights:
        key = (model, endpoint.rstrip("/") if endpoint is not None else None)
        found = self._all.get(key)
        if found is None:
            if len(self._all) >= MOST_MODELS:
                self._forget_oldest()
            found = self._all[key] = Weights(self._counts)
        return found

    def known(self) -> list[tuple[str | None, str | None, Weights]]:
        """The models with a version or a pause."""
        return [(*key, one) for key, one in self._all.items() if one.version is not None or one.paused]

    def figures(self) -> dict[str, int]:
        known = [weights for _, _, weights in self.known()]
        versions = [weights.version for weights in known if weights.version is not None]
        figures = {"paused_models": sum(weights.paused for weights in known)}
        return {**figures, "version": max(versions)} if versions else figures

    def _forget_oldest(self) -> None:
        """Remove the oldest unused entry, because a trainer may use a new model name at every step."""
        oldest = next((key for key, one in self._all.items() if not one.in_use), None)
        if oldest is None:
            raise UsageError(f"{MOST_MODELS} models are in use, and no more can be tracked")
        del self._all[oldest]


def wait_after_abort(number: int) -> float:
    """Seconds until a call is repeated that a model server has aborted `number` times before."""
    return min(LONGEST_WAIT, 0.05 * 2.0**number)


def check_version(version: int) -> int:
    if not 0 <= version <= HIGHEST_VERSION:
        raise UsageError(f"a version of the weights must be 0 to {HIGHEST_VERSION}, got {version!r:.40}")
    return version


def parse_version(value: object) -> int | None:
    """The version sent by a model server, as a number or digits; None for anything else, such as `default`."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    return value if type(value) is int and 0 <= value <= HIGHEST_VERSION else None


def check_pause(calls: str, seconds: float) -> None:
    if calls not in ("finish", "abort", "leave"):
        raise UsageError(f"calls must be 'finish', 'abort' or 'leave', not {calls!r:.40}")
    if not 0 < seconds <= LONGEST_PAUSE:
        raise UsageError(f"a pause must be more than 0 and at most {LONGEST_PAUSE:.0f} seconds, got {seconds!r:.40}")
