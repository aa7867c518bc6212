"""Timing shared by the benchmarks: CPU beside wall time, best of several, printed as ratios."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple


class Cost(NamedTuple):
    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{_readable(self.cpu):>10} CPU {_readable(self.wall):>10} wall"


def cost(work: Callable[[], Any], repeat: int = 3, per: int = 1) -> Cost:
    """The cheapest of `repeat` runs, divided by `per`."""
    best = Cost(float("inf"), float("inf"))
    for _ in range(repeat):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        spent = Cost((time.process_time() - cpu) / per, (time.perf_counter() - wall) / per)
        best = min(best, spent)
    return best


def memory(work: Callable[[], Any]) -> int:
    """The peak of what `work` allocates, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def show(what: str, ours: Cost, other: str = "", theirs: Cost | None = None, target: str = "") -> None:
    print(f"{what:<52} {ours}" + (f"   target {target}" if target else ""))
    if theirs is not None:
        print(f"{'  beside: ' + other:<52} {theirs}   {theirs.cpu / max(ours.cpu, 1e-9):.1f}x our CPU")


def _readable(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.2f} {unit}"
    raise AssertionError
