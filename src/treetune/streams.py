"""Streams hand out a taskset's tasks in order: each named stream is one cursor, owned here and nowhere else.

    streams = Streams(taskset)
    draw = streams.advance("trainer-a")      # the next index of that stream
    task = await streams.fetch(draw)         # its task: a pure function of the draw

`state()` is a small value for a checkpoint; `restore` refuses one that was taken over other tasks.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import msgspec

from treetune.errors import ResumeError, TasksetError, UsageError, user_code
from treetune.order import LAST, read_index
from treetune.score import finite
from treetune.target import Fingerprint, taskset_fingerprint
from treetune.task import Task, digest
from treetune.taskset import Taskset
from treetune.threads import call_apart

CHEAP_SECONDS = 0.002
"""A task that is made faster than this is made on the event loop; others in a thread or by a worker."""
MOST_STREAMS = 1024
_PROBES = 8
AHEAD = 64
"""How many tasks are read before they are asked for."""
KEPT = 4096
"""How many of the latest tasks of a generator can be given again."""
_TAKING_SECONDS = 0.05


class Draw(msgspec.Struct, frozen=True):
    """One draw from a stream; all that is needed to make its task again."""

    stream: str
    index: int
    position: int | None = None
    """Where a curriculum chose it: the position in the taskset."""


class Identity(msgspec.Struct, frozen=True):
    """What a cursor is a cursor over."""

    fingerprint: Fingerprint
    count: int | None = None
    probe: str | None = None
    """A hash of a few tasks, for data that changed behind an unchanged config."""

    @property
    def digest(self) -> str:
        return digest(self)

    def differences(self, now: Identity) -> list[str]:
        changes = self.fingerprint.differences(now.fingerprint)
        if self.count != now.count:
            changes.append(f"number of tasks: {self.count} -> {now.count}")
        elif self.probe != now.probe:
            changes.append("the tasks themselves changed")
        return changes


class StreamState(msgspec.Struct, frozen=True):
    index: int
    """The next index it gives."""
    curriculum: Any = None


class State(msgspec.Struct, frozen=True):
    """Where every stream is, and over which tasks: small, and plain when encoded."""

    streams: dict[str, StreamState]
    taskset: Identity


class Streams:
    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self.taskset = taskset
        self.sequential = taskset.INFINITE and not taskset.random_access
        """Only a generator: its tasks can be read forward, one reader a stream."""
        self.cheap = not self.sequential
        self.count: int | None = None
        self.identity: Identity
        self._streams: dict[str, _Stream] = {}
        self._slow = 0
        """Tasks of late that took long to make, less those that did not."""
        self._is_read = False
        """Whether a reader has the taskset itself; others get copies."""

    def load(self) -> None:
        """Whatever the first draw would wait for: data, the count, a few tasks to know them and their cost by."""
        self.count = self.taskset._size()
        probe = None if self.sequential else self._probe()
        self.identity = Identity(taskset_fingerprint(self.taskset), self.count, probe)

    def _probe(self) -> str:
        last = self.count - 1 if self.count is not None else _PROBES - 1
        positions = sorted({last * number // (_PROBES - 1) for number in range(_PROBES)})
        tasks, spent = [], []
        for position in positions:
            began = time.perf_counter()
            tasks.append(self.taskset[position])
            spent.append(time.perf_counter() - began)
        self.cheap = min(spent) < CHEAP_SECONDS
        return digest([(task.uid, task.extra_info) for task in tasks])

    # The cursors

    def open(self, name: str) -> _Stream:
        """A stream, which is a new one where there is none yet."""
        if name not in self._streams:
            if len(name) > 128:
                raise UsageError("the name of a stream can have 128 characters")
            if len(self._streams) >= MOST_STREAMS:
                raise UsageError(f"there are {MOST_STREAMS} streams already", remedy="use one of them")
            self._streams[name] = _Stream(self.taskset)
        return self._streams[name]

    def advance(self, stream: str = "") -> Draw:
        """The next draw of a stream; the only place where a cursor moves on."""
        current = self._streams.get(stream) or self.open(stream)
        position = None
        if current.curriculum is not None:
            with user_code(f"{self.taskset.name}.curriculum().draw()"):
                position = current.curriculum.draw(current.index)
            if type(position) is not int or not 0 <= position < (LAST if self.count is None else self.count):
                problem = f"{self.taskset.name}.curriculum().draw() gave {position!r:.60}"
                raise TasksetError(problem, remedy="return the position of a task: a number from 0 on, below count()")
        draw = Draw(stream, current.index, position)
        current.index += 1
        return draw

    def draw_at(self, index: int) -> Draw:
        """The draw of an index of the order, whatever the cursors say."""
        if self.sequential:
            problem = f"{self.taskset.name} is only a generator: it has no task at an index of your choice"
            raise UsageError(problem, remedy="sample without an index, or write task_at(index)")
        return Draw("", read_index(index))

    def cursor(self, stream: str = "") -> int:
        return self._streams[stream].index if stream in self._streams else 0

    @property
    def cursors(self) -> dict[str, int]:
        return {name: stream.index for name, stream in self._streams.items()}

    def observe(self, task: Task, reward: float, stream: str = "") -> None:
        """Tells the stream's curriculum, where there is one."""
        if (curriculum := self.open(stream).curriculum) is not None:
            with user_code(f"{self.taskset.name}.curriculum().observe()"):
                curriculum.observe(task, finite(reward, "an observed reward"))

    def state(self, stream: str | None = None) -> State:
        """Of all streams, or of one. The one without a name is always among them, so a first state goes back too."""
        names = [stream] if stream is not None else dict.fromkeys(["", *self._streams])
        return State({name: self.stream_state(name) for name in names}, self.identity)

    def stream_state(self, name: str) -> StreamState:
        stream = self._streams.get(name) or _Stream(self.taskset)  # asking opens none
        if stream.curriculum is None:
            return StreamState(stream.index)
        with user_code(f"{self.taskset.name}.curriculum().state()"):
            # Plain values only: anything else could not be kept, nor travel.
            return StreamState(stream.index, msgspec.to_builtins(stream.curriculum.state(), builtin_types=(bytes,)))

    def restore(self, state: State) -> None:
        """Puts the streams of `state` where they were; others stay."""
        if changes := state.taskset.differences(self.identity):
            raise ResumeError(
                "the taskset changed since this state was taken: " + "; ".join(changes),
                remedy="serve the taskset as it was then, or begin anew without the state",
            )
        self.place(state.streams)

    def place(self, streams: Mapping[str, StreamState]) -> None:
        if wrong := [name for name, entry in streams.items() if not 0 <= entry.index < LAST]:
            raise UsageError(f"the cursor of a stream is a number from 0 to 2**62; wrong are {wrong}")
        for name, entry in streams.items():
            if entry.index == 0 and entry.curriculum is None:
                self._streams.pop(name, None)  # a stream at its very beginning is one that never was
                continue
            stream = self.open(name)
            if stream.curriculum is not None and entry.curriculum is not None:
                with user_code(f"{self.taskset.name}.curriculum().restore()"):
                    stream.curriculum.restore(entry.curriculum)
            stream.index = entry.index

    # The tasks

    def task(self, draw: Draw) -> Task:
        """The task of a draw, made here and now; not for generators."""
        began = time.perf_counter()
        position = draw.position
        if position is None:  # what `taskset.at` does, with the count known
            position = self.taskset.position_at(draw.index, self.count)
        task: Task = self.taskset[position]
        slow = time.perf_counter() - began > CHEAP_SECONDS * 2
        self._slow = self._slow + 1 if slow else max(0, self._slow - 1)
        self.cheap = self.cheap and self._slow < 8
        return task

    async def fetch(self, draw: Draw) -> Task:
        """The same without blocking the loop."""
        if self.sequential:
            return await self._reader(draw.stream).task(draw.index if draw.position is None else draw.position)
        if self.cheap:
            return self.task(draw)
        task: Task = await call_apart(self.task, draw)
        return task

    def _reader(self, name: str) -> Reader:
        stream = self.open(name)
        if stream.reader is None:
            try:  # each stream reads at its own pace, so each needs a generator of its own
                stream.reader = Reader(copy.deepcopy(self.taskset) if self._is_read else self.taskset)
            except Exception as error:
                problem = f"{self.taskset.name} is only a generator and cannot be copied for a second stream: {error}"
                raise TasksetError(problem, remedy="use one stream, or write task_at(index)") from error
            self._is_read = True
        return stream.reader


class _Stream:
    """A cursor, with its own curriculum where the taskset has them, and its own reader where that is a generator."""

    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self.index = 0
        self.curriculum = taskset.curriculum()
        self.reader: Reader | None = None


async def load(taskset: Taskset[Any, Any]) -> Streams:
    """The streams of a taskset, ready to give tasks."""
    streams = Streams(taskset)
    await call_apart(streams.load)
    return streams


async def draw_tasks(taskset: Taskset[Any, Any], num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
    """The first tasks of the order with their occurrence, without a cursor; made off the loop in small batches."""
    tasks = taskset.draw(num_tasks)
    seen: Counter[str] = Counter()
    failure = None
    while failure is None:
        batch, failure = await call_apart(_take, islice(tasks, AHEAD))
        for task in batch:
            uid = task.uid
            yield task, seen[uid]
            seen[uid] += 1
        if not batch and failure is None:
            return
    raise failure


def _take(tasks: Iterator[Task]) -> tuple[list[Task], Exception | None]:
    """As many tasks as there is time for, and what went wrong with the next."""
    taken: list[Task] = []
    until = time.monotonic() + _TAKING_SECONDS
    try:
        for task in tasks:
            taken.append(task)
            if time.monotonic() > until:
                break
    except Exception as error:
        return taken, error
    return taken, None


class Reader:
    """Reads a generator forward, a few tasks ahead, and keeps the latest to give them again."""

    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self._taskset = taskset
        self._tasks: dict[int, Task] = {}
        self._next = 0
        self._lock = asyncio.Lock()
        self._failure: Exception | None = None

    async def task(self, index: int) -> Task:
        async with self._lock:
            while index not in self._tasks:
                await self._read(index)
            return self._tasks[index]

    async def _read(self, index: int) -> None:
        if not self._next <= index <= self._next + KEPT:
            # A restored cursor: reading begins anew, a little before it, which is all a generator allows.
            self._tasks, self._next, self._failure = {}, max(0, index - KEPT // 2), None
        if self._failure is not None:
            raise self._failure  # a generator that has failed gives nothing more
        tasks, self._failure = await call_apart(_take, map(self._taskset.at, range(self._next, index + AHEAD)))
        for task in tasks:
            self._tasks[self._next] = task
            self._tasks.pop(self._next - KEPT, None)
            self._next += 1


class Curriculum(Protocol):
    def draw(self, index: int) -> int:
        """The position of the task that draw number `index` gives."""
        ...

    def observe(self, task: Task, reward: float) -> None:
        """What a rollout of a task earned."""
        ...

    def state(self) -> Any:
        """A small plain value (numbers, texts, lists, dicts) that `restore` goes on from."""
        ...

    def restore(self, state: Any) -> None: ...
