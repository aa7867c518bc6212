"""Measures costs: seconds to start, step and close an environment, memory, and the sandboxes of one episode."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from treetune.audit.report import AuditReport, Quantiles
from treetune.audit.sample import Player, Sample, Subject
from treetune.core.finding import NOTE, WARNING
from treetune.core.trace import Trace

ALONE = 3
"""How many tasks are played alone, one after the other, to measure the resources of a single task."""
LOOK_SECONDS = 0.01
SLOW_SECONDS = 10.0
MEGABYTE = 1 << 20
GONE_SECONDS, GONE_LOOKS = 1.0, 20
"""How long the processes of an episode may take to end, and how often this is checked."""


class Watch:
    """Measures this process and its children many times a second, and keeps the maxima."""

    def __init__(self) -> None:
        self.before = _memory_of(os.getpid())
        self.memory = 0
        self.processes = 0
        self.sandboxes = 0
        self._known = _children_of(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            new = _children_of(os.getpid()) - self._known
            self.processes = max(self.processes, len(new))
            self.sandboxes = max(self.sandboxes, sum(_is_sandbox(pid) for pid in new))
            own = max(0, _memory_of(os.getpid()) - self.before)
            self.memory = max(self.memory, own + sum(map(_memory_of, new)))

    def left(self) -> set[int]:
        """The processes that were started since then and are still running."""
        return _children_of(os.getpid()) - self._known


async def measure_alone(sample: Sample, player: Player, report: AuditReport) -> None:
    """Plays a few tasks one at a time, and measures the memory, processes and sandboxes of each."""
    if not Path("/proc/self/statm").exists():
        return report.leave_out("this system has no /proc to read memory and processes from", "processes-left")
    subjects = [one for one in sample.subjects if one.trace is not None and one.trace.outcome.scored][:ALONE]
    if not subjects:
        return report.leave_out("no gold answer was played to its end", "processes-left")
    if not report.wants("processes-left"):
        return None
    seen: dict[str, list[float]] = {"memory, MB": [], "processes": [], "sandboxes": []}
    kept: dict[int, str] = {}
    # What the first episode loads or keeps warm is not a cost of the task.
    await _play(player, subjects[0])
    await asyncio.sleep(LOOK_SECONDS)
    watches: list[tuple[Subject, Watch]] = []
    for subject in subjects:
        with Watch() as watch:
            await _play(player, subject)
        watches.append((subject, watch))
        seen["memory, MB"].append(watch.memory / MEGABYTE)
        seen["processes"].append(float(watch.processes))
        seen["sandboxes"].append(float(watch.sandboxes))
    for _ in range(GONE_LOOKS):
        if not watches[0][1].left():
            break
        await asyncio.sleep(GONE_SECONDS / GONE_LOOKS)
    for subject, watch in watches:
        left = watch.left()
        if left and not all(map(_is_pooled, left)):
            names = {name for pid in left for name in _names_up(pid)[:1]}
            kept[subject.idx] = f"{len(left)} processes: {', '.join(sorted(names))}"
    for name, values in seen.items():
        if (found := Quantiles.of(values)) is not None:
            report.costs[f"one episode: {name}"] = found
    if len(kept) == len(subjects):
        found_text = f"processes of {len(kept)} episodes that were played alone are still running"
        report.add("processes-left", WARNING, found_text, kept)
    return None


async def _play(player: Player, subject: Subject) -> None:
    assert subject.gold is not None
    await player.play(subject, subject.gold)


def judge_costs(traces: Iterable[Trace], report: AuditReport) -> None:
    """Reports the seconds of the environments, from the gold rollouts."""
    if not report.wants("slow-environment", "close-fails"):
        return
    played = [trace for trace in traces if trace.turns]
    seconds = {
        "seconds to start": [trace.timing.start for trace in played],
        "seconds of a step": [trace.timing.environment / len(trace.turns) for trace in played],
        "seconds to close": [trace.timing.close for trace in played],
        "turns": [float(len(trace.turns)) for trace in played],
    }
    for name, values in seconds.items():
        if (found := Quantiles.of(values)) is not None:
            report.costs[f"gold: {name}"] = found
    spent = Quantiles.of([t.timing.start + t.timing.environment + t.timing.close for t in played])
    if spent is not None and spent.median > SLOW_SECONDS:
        text = f"half of the episodes take more than {spent.median:.1f} seconds of the environment's time"
        report.add("slow-environment", NOTE, text)
    failed = {trace.task.idx: warning for trace in played for warning in trace.warnings if "close failed" in warning}
    report.add("close-fails", WARNING, f"{len(failed)} environments do not close", failed)


class _Process(NamedTuple):
    name: str
    parent: int
    memory: int
    """In bytes."""


def _find_process(pid: int) -> _Process | None:
    """Returns None if it has ended."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = after.split()
    return _Process(before.partition("(")[2], int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def _memory_of(pid: int) -> int:
    """Returns the memory of a process in bytes; 0 if it has ended."""
    return found.memory if (found := _find_process(pid)) is not None else 0


def _children_of(pid: int) -> set[int]:
    """Returns all descendants of a process."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for file in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(child) for child in file.read_text().split()} - found
                found |= new
                waiting += new
    return found


def _names_up(pid: int) -> list[str]:
    """Returns the names of a process, its parent and so on; none if it has ended."""
    names: list[str] = []
    while pid > 1 and (found := _find_process(pid)) is not None:
        names.append(found.name)
        pid = found.parent
    return names


def _is_sandbox(pid: int) -> bool:
    """Whether it is the outer process of a sandbox, whose parent belongs to no sandbox."""
    names = _names_up(pid)
    return names[:1] == ["bwrap"] and names[1:2] != ["bwrap"]


def _is_pooled(pid: int) -> bool:
    """Whether it belongs to a machine that is kept warm for the next episode, or has ended, so it is not a leftover."""
    names = _names_up(pid)
    return not names or "bwrap" in names
