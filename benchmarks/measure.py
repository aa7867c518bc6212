"""What the benchmarks share: CPU beside wall time, best of several, one way to show a result beside an alternative's.

    show("draw: 5 of 1,000,000", cost(lazily), "build all, take 5", cost(eagerly), target="1 ms")

`python -m benchmarks` runs them and keeps what they show in `docs/benchmarks.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "TREETUNE_BENCHMARK_RESULTS"
"""The environment variable that names the file to which results are added, a JSON object a line."""

GSM8K = Path(os.environ.get("TREETUNE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")) / "gsm8k/train.jsonl"


class Cost(NamedTuple):
    """Seconds."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{readable(self.cpu):>10} CPU {readable(self.wall):>10} wall"


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


def show(what: str, ours: Cost, other: str = "", theirs: Cost | None = None, target: str = "", note: str = "") -> None:
    """Prints a cost, and that of what a user would use instead; keeps both for the table of the docs."""
    print(f"{what:<58} {ours}" + (f"   {note}" if note else "") + (f"   target {target}" if target else ""), flush=True)
    result = {"what": what, "cpu": ours.cpu, "wall": ours.wall, "target": target, "note": note}
    if theirs is not None:
        ratio = theirs.cpu / max(ours.cpu, 1e-9)
        print(f"{'  beside: ' + other:<58} {theirs}   {ratio:.1f}x our CPU", flush=True)
        result |= {"other": other, "other_cpu": theirs.cpu, "ratio": ratio}
    if path := os.environ.get(RESULTS):
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")


def readable(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.2f} {unit}"
    raise AssertionError


# Other processes


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes so far, by the scheduler's own account (a tick of 10 ms would be too coarse)."""
    spent = 0.0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def memory_of(pid: int) -> float:
    """Megabytes that are resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def read_ready(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What `treetune serve --json` says when it is ready."""
    assert process.stdout is not None
    lines = b""
    while not lines.endswith(b"}\n"):
        line = process.stdout.readline()
        assert line, "the server did not start"
        lines += line
    found: dict[str, Any] = json.loads(lines)
    return found
