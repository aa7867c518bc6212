"""A schedule says how often each pass rate is drawn, and how that changes as a stream goes on.

    Gaussian(start=0.8, end=0.2, width=0.15, over=10_000)      # easy tasks first, hard ones later
    Pools(hard=0.2, normal=1.0, easy=0.2)                      # three pools with fixed shares

What is drawn are arms: the tasks of one pass rate, the sources of a mixture, the values of a parameter. `Staged` says
which arm comes at an index, as a pure function; `Credits` does the same one draw at a time, for shares that change.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from treetune.core.order import Interleave

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]

BINS = 80
"""Pass rates are told apart to 1/80: rates of 4, 5, 8, 10, 16 and 20 rollouts are kept as they are."""
STAGES = 100
"""In so many steps a Gaussian falls."""
LEAST_SHARE = 1e-6
"""An arm with a smaller share is not drawn."""


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pools", tag_field="kind"):
    hard: Weight = 0.2
    """The weight of tasks that are seldom solved; the share of a pool is its weight, however many tasks it has."""
    normal: Weight = 1.0
    """The weight of those between."""
    easy: Weight = 0.2
    """The weight of tasks that are mostly solved."""
    hard_to: Rate = 0.25
    """The highest pass rate of a hard task."""
    easy_above: Rate = 0.75
    """Tasks with a higher pass rate are easy."""

    def __post_init__(self) -> None:
        if not self.hard + self.normal + self.easy:
            raise ValueError("every pool has the weight 0: one at least needs more")
        if self.hard_to > self.easy_above:
            raise ValueError(f"hard_to ({self.hard_to:g}) is above easy_above ({self.easy_above:g})")

    def bin_of(self, rate: float) -> int:
        return 0 if rate <= self.hard_to else 2 if rate > self.easy_above else 1

    def weight(self, bin: int, stage: int) -> float:
        return (self.hard, self.normal, self.easy)[bin]

    def starts(self) -> list[int]:
        """The index at which each stage begins; the last never ends."""
        return [0]


class Gaussian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gaussian", tag_field="kind"):
    start: Rate = 0.8
    """The pass rate that is drawn most at the beginning."""
    end: Rate = 0.2
    """The one that is drawn most from the draw `over` on."""
    width: Annotated[float, msgspec.Meta(gt=0)] = 0.15
    """The standard deviation."""
    over: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """The number of draws over which the mean goes from `start` to `end`, evenly."""

    def bin_of(self, rate: float) -> int:
        return round(rate * BINS)

    def weight(self, bin: int, stage: int) -> float:
        steps = min(STAGES, self.over)
        mean = self.end if stage >= steps else self.start + (self.end - self.start) * (stage + 0.5) / steps
        return math.exp(-(((bin / BINS - mean) / self.width) ** 2) / 2)

    def starts(self) -> list[int]:
        steps = min(STAGES, self.over)
        return [self.over * stage // steps for stage in range(steps + 1)]


Schedule = Pools | Gaussian


def normalise(weights: Sequence[float]) -> list[float]:
    """Shares that sum to 1, where tiny ones are 0. Where all weights vanish, the arms have equal shares."""
    total = math.fsum(weights)
    if not total:
        return [1 / len(weights)] * len(weights)
    return [weight / total if weight / total >= LEAST_SHARE else 0.0 for weight in weights]


class Staged:
    """Arms whose shares change from stage to stage: any index is reached without the ones before it."""

    def __init__(
        self, starts: Sequence[int], shares: Callable[[int], Sequence[float]], seed: int | None = None
    ) -> None:
        """`shares` gives those of all arms in a stage."""
        self._starts = starts
        self._seed = seed
        self._shares = shares
        self._stages: list[_Stage] = []
        self._lock = threading.Lock()
        """Tasks are made in several threads, and stages are worked out as they are reached."""

    def at(self, index: int) -> tuple[int, int]:
        """The arm that draw `index` takes from, and which of that arm's own draws it is."""
        stage = self._stage(bisect_right(self._starts, index) - 1)
        number, within = stage.interleave.at(index)
        return stage.arms[number], stage.offsets[number] + within

    def _stage(self, number: int) -> _Stage:
        if len(self._stages) <= number:
            with self._lock:
                while len(self._stages) <= number:
                    self._stages.append(self._next_stage())
        return self._stages[number]

    def _next_stage(self) -> _Stage:
        number = len(self._stages)
        shares = self._shares(number)
        arms = [arm for arm, share in enumerate(shares) if share]
        drawn = [0] * len(shares)
        start = self._starts[number]
        if number:
            before = self._stages[-1]
            drawn = list(before.drawn)
            counts = before.interleave.counts_before(start)
            for arm, offset, count in zip(before.arms, before.offsets, counts, strict=True):
                drawn[arm] = offset + count
        interleave = Interleave([shares[arm] for arm in arms], self._seed)
        # Its points go on where those of the stage before ended, so only what it gives from here on counts.
        counts = interleave.counts_before(start)
        offsets = [drawn[arm] - count for arm, count in zip(arms, counts, strict=True)]
        return _Stage(arms, interleave, offsets, drawn)


class _Stage(msgspec.Struct):
    arms: list[int]
    """Those that are drawn in it."""
    interleave: Interleave
    offsets: list[int]
    """What to add to an arm's number in the interleave for its number among all its draws."""
    drawn: list[int]
    """How often each arm of all was drawn before it."""


class Credits:
    """Draws arms by shares that may be others at every draw: each arm earns its share, and the one with most pays 1.
    So every arm is within a few draws of what its shares sum to."""

    def __init__(self, arms: int) -> None:
        self.values = [0.0] * arms

    def draw(self, shares: Sequence[float]) -> int:
        values = self.values
        best = -1
        for arm, share in enumerate(shares):
            if share:
                values[arm] += share
                if best < 0 or values[arm] > values[best]:
                    best = arm
        values[best] -= 1
        return best
