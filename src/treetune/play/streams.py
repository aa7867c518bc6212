"""Streams hand out a taskset's tasks in order. Each named stream is one cursor, kept only here.

    streams = Streams(taskset)
    draw, task = await streams.sample("trainer-a")      # the next index of that stream, and its task

A task is a pure function of its draw. If making a task fails, its draw is tried again; it is skipped only if it fails
too often while others succeed. `state()` is a small value for a checkpoint; `restore` refuses a state of a different
taskset.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

from treetune.core.fingerprint import Fingerprint, taskset_fingerprint
from treetune.core.order import LAST, read_index
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import (
    DrawFailed,
    GeneratorFailed,
    ResumeError,
    StreamEnded,
    TasksetError,
    TreetuneError,
    UsageError,
    reason_of,
)
from treetune.play.leases import DRAW_TRIES, Draw, Pending, PendingDraws, name_draw
from treetune.play.reader import AHEAD, Reader, take
from treetune.system.digest import digest
from treetune.system.threads import call_apart

CHEAP_SECONDS = 0.002
"""Tasks that take less time than this are made on the event loop, others in a thread or by a worker."""
MOST_STREAMS = 1024
_PROBES = 8
log = logging.getLogger(__name__)
T = TypeVar("T")


class Identity(msgspec.Struct, frozen=True):
    """Identifies the tasks that a cursor refers to."""

    fingerprint: Fingerprint
    count: int | None = None
    probe: str | None = None
    """A hash of a few tasks, to detect changed data under an unchanged config."""

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
    """The next index to hand out."""
    curriculum: Any = None
    """What it has learned from observed rewards: pass rates, and how often each was drawn."""
    pending: list[Pending] = []
    """Unfinished draws before that index."""


class State(msgspec.Struct, frozen=True):
    """The positions of streams, and the taskset they belong to: small, and plain when encoded."""

    streams: dict[str, StreamState]
    taskset: Identity


class Streams:
    def __init__(self, taskset: Taskset[Any, Any], tries: int = DRAW_TRIES) -> None:
        """`tries` is how often the task of a draw may fail, while others succeed, before it is skipped."""
        self.taskset = taskset
        self.pending = PendingDraws(tries=tries)
        self.sequential = taskset.sequential
        """Whether the taskset is only a generator, whose tasks can only be read forward."""
        self.cheap = not self.sequential
        self.make_apart: Callable[[int], Awaitable[Task]] = partial(call_apart, self._make)
        """Makes the task at a position without blocking the loop: in a thread, or by the workers of a pool."""
        self.identity: Identity
        self._streams: dict[str, _Stream] = {}
        self._slow = 0
        """How many recent tasks were slow to make, minus those that were not."""
        self.readers: list[Reader] = []
        """The readers of a generator. Streams at nearby positions share one."""

    def load(self) -> None:
        """Load what the first draw would wait for: the data, the count, and a few tasks to measure their cost."""
        count = self.count
        self.taskset.learning()  # compute the initial state of every stream now
        probe = None if self.sequential else self._probe()
        self.identity = Identity(taskset_fingerprint(self.taskset), count, probe)

    @cached_property
    def count(self) -> int | None:
        """The number of tasks in an epoch; None if the order is endless."""
        return self.taskset._size()

    def _probe(self) -> str:
        last = self.count - 1 if self.count is not None else _PROBES - 1
        indices = sorted({last * number // (_PROBES - 1) for number in range(_PROBES)})
        tasks, spent = [], []
        for index in indices:
            position = self.taskset.position_at(index, None) if self.count is None else index
            began = time.perf_counter()
            tasks.append(self.taskset[position])
            spent.append(time.perf_counter() - began)
        self.cheap = min(spent) < CHEAP_SECONDS
        return digest([(task.uid, task.extra_info) for task in tasks])

    # The cursors

    def open(self, name: str) -> _Stream:
        """Return the stream of this name; it is created if needed."""
        if name not in self._streams:
            if len(name) > 128:
                raise UsageError("the name of a stream can have at most 128 characters")
            if len(self._streams) >= MOST_STREAMS:
                raise UsageError(f"there are {MOST_STREAMS} streams already", remedy="use one of them")
            self._streams[name] = _Stream(self.taskset)
        return self._streams[name]

    def advance(self, stream: str = "") -> Draw:
        """The next draw of a stream: one to hand out again, else the draw at the cursor. The cursor moves only here."""
        current = self._streams.get(stream) or self.open(stream)
        if self.pending.due and (due := self.pending.take(stream)) is not None:
            return due
        position = None
        if current.learning is not None:
            position = current.learning.draw(current.index)
        draw = Draw(stream, current.index, position)
        current.index += 1
        return draw

    async def sample(
        self, stream: str = "", fetch: Callable[[Draw], Awaitable[Task]] | None = None
    ) -> tuple[Draw, Task]:
        """The next draw, and its task as made by `fetch`."""
        self.pending.hold(draw := self.advance(stream))
        task = await self.make(draw, fetch or self.fetch)
        self.pending.settle(draw)
        return draw, task

    async def make(
        self, draw: Draw, fetch: Callable[[Draw], Awaitable[T]], excused: tuple[type[Exception], ...] = ()
    ) -> T:
        """Call `fetch` on a held draw and return the result. A failure counts as a try, unless it is `excused`. A draw
        that failed before waits until its next try is due."""
        try:
            if (seconds := self.pending.seconds_until(draw)) > 0:
                await asyncio.sleep(seconds)
            return await fetch(draw)
        except excused:
            self.pending.give_back(draw)
            raise
        except Exception as error:
            raise self.fail(draw, error) from error
        except BaseException:  # the caller was cancelled
            self.pending.give_back(draw)
            raise

    def fail(self, draw: Draw, error: Exception) -> DrawFailed | StreamEnded:
        """Record that the task of a held draw could not be made; return the error to raise."""
        problem = reason_of(error)
        where, most = name_draw(draw.stream, draw.index), self.pending.tries
        if isinstance(error, GeneratorFailed | StreamEnded):
            self.pending.give_back(draw)  # the generator has not reached this index
            if isinstance(error, StreamEnded):
                return error
            remedy = f"sample again: the generator is restarted, and {where} is not drawn yet"
        elif (tries := self.pending.fail(draw, problem)) < most:
            remedy = f"sample again: {where} was tried {tries} of {most} times, and is not drawn yet"
        else:
            remedy = f"sample again: {where} was tried {tries} of {most} times, and is skipped if others succeed"
        if isinstance(error, TreetuneError) and error.remedy:
            remedy = f"{error.remedy}; {remedy}"
        return DrawFailed(problem, remedy=remedy)

    def draw_at(self, index: int) -> Draw:
        """The draw at an index of the order. No cursor moves."""
        if self.sequential:
            problem = f"{self.taskset.name} is only a generator: its tasks cannot be drawn by index"
            raise UsageError(problem, remedy="sample without an index, or write task_at(index)")
        return Draw("", read_index(index))

    def cursor(self, stream: str = "") -> int:
        return self._streams[stream].index if stream in self._streams else 0

    @property
    def cursors(self) -> dict[str, int]:
        return {name: stream.index for name, stream in self._streams.items()}

    def observe(self, task: Task, reward: float, stream: str = "") -> None:
        """Update the pass rate of a task, if the stream has a curriculum."""
        reward = finite(reward, "an observed reward")
        if (learning := self.open(stream).learning) is not None:
            learning.observe(task, reward)

    def state(self, stream: str | None = None) -> State:
        """The state of one stream, or of all streams, including the unnamed one."""
        names = [stream] if stream is not None else dict.fromkeys(["", *self._streams])
        return State({name: self.stream_state(name) for name in names}, self.identity)

    def stream_state(self, name: str) -> StreamState:
        return StreamState(self.cursor(name), self.curriculum_state(name), self.pending.of(name))

    def curriculum_state(self, name: str) -> Any:
        stream = self._streams.get(name) or _Stream(self.taskset)  # does not create the stream
        return None if stream.learning is None else stream.learning.state()

    def restore(self, state: State) -> None:
        """Move the streams in `state` to where they were; others do not move. Leased tasks are handed out again."""
        if changes := state.taskset.differences(self.identity):
            raise ResumeError(
                "the taskset changed since this state was taken: " + "; ".join(changes),
                remedy="serve the taskset as it was then, or start again without the state",
            )
        self.place(state.streams)

    def place(self, streams: Mapping[str, StreamState], keep_leases: bool = False) -> None:
        if wrong := [name for name, entry in streams.items() if not 0 <= entry.index < LAST]:
            raise UsageError(f"the cursor of a stream must be a number from 0 to 2**62; invalid: {wrong[:5]}")
        if wrong := [name for name, entry in streams.items() if _has_wrong_draws(entry)]:
            raise UsageError(f"an unfinished draw must come before the cursor of its stream; invalid: {wrong[:5]}")
        if len(self._streams.keys() | streams.keys()) > MOST_STREAMS:  # checked before any stream is created
            raise UsageError(f"there can be at most {MOST_STREAMS} streams", remedy="restore fewer of them")
        for name, entry in streams.items():
            self.pending.place(name, entry.pending, keep_leases)
            if entry.index == 0 and entry.curriculum is None:
                self._streams.pop(name, None)  # a stream at its beginning need not be kept
                continue
            self.restore_curriculum(name, entry.curriculum)
            self.open(name).index = entry.index

    def restore_curriculum(self, name: str, state: Any) -> None:
        if (learning := self.open(name).learning) is not None and state is not None:
            learning.restore(state)

    # The tasks

    def position(self, draw: Draw) -> int:
        """The position in load order of the task of a draw."""
        if draw.position is not None:
            return draw.position
        return self.taskset.position_at(draw.index, self.count)

    def task(self, draw: Draw) -> Task:
        """Make the task of a draw synchronously; not for generators."""
        return self._make(self.position(draw))

    async def fetch(self, draw: Draw) -> Task:
        """Make the task of a draw without blocking the loop."""
        position = self.position(draw)
        if self.sequential:
            return await self._reader(draw.stream, position).task(position)
        return self._make(position) if self.cheap else await self.make_apart(position)

    def _make(self, position: int) -> Task:
        began = time.perf_counter()
        task: Task = self.taskset[position]
        if time.perf_counter() - began > CHEAP_SECONDS * 2:
            self._slow += 1
            self.cheap = self.cheap and self._slow < 8
        elif self._slow:
            self._slow -= 1
        return task

    def _reader(self, name: str, index: int) -> Reader:
        """The reader of a stream. A generator only goes forward, so a stream far from the others reads a copy of the
        taskset."""
        stream = self.open(name)
        near = next((reader for reader in self.readers if reader.reaches(index)), None)
        if near is not None and near is stream.reader:
            return near
        used = [other.reader for other in self._streams.values() if other is not stream]
        if near is None:
            alone = stream.reader is not None and stream.reader not in used
            near = stream.reader if alone and stream.reader is not None else self._new_reader(name, used)
        stream.reader = near
        self.readers = [reader for reader in self.readers if reader is near or reader in used]
        return near

    def _new_reader(self, name: str, used: Sequence[Reader | None]) -> Reader:
        taskset = self.taskset
        if any(reader is not None and reader.taskset is taskset for reader in used):
            log.info("%s is only a generator: stream %r reads a copy of it from the beginning", taskset.name, name)
            try:
                taskset = copy.deepcopy(taskset)
            except Exception as error:
                problem = f"{taskset.name} is only a generator and cannot be copied for a second stream: {error}"
                raise TasksetError(problem, remedy="use one stream, or write task_at(index)") from error
        self.readers.append(reader := Reader(taskset, self.pending.tries))
        return reader


class _Stream:
    """A cursor, with its own pass rates if they change, and a reader if the taskset is a generator."""

    def __init__(self, taskset: Taskset[Any, Any]) -> None:
        self.index = 0
        self.learning = taskset.learning()
        self.reader: Reader | None = None


def _has_wrong_draws(entry: StreamState) -> bool:
    return any(not 0 <= draw.index < entry.index or draw.tries < 0 or draw.attempt < 0 for draw in entry.pending)


async def load(taskset: Taskset[Any, Any], tries: int = DRAW_TRIES) -> Streams:
    """The streams of a taskset, ready to hand out tasks."""
    streams = Streams(taskset, tries)
    await call_apart(streams.load)
    return streams


async def draw_tasks(taskset: Taskset[Any, Any], num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
    """Yield the first tasks of the order with their occurrences, without a cursor, made in batches off the loop."""
    tasks = taskset.draw(num_tasks)
    seen: Counter[str] = Counter()
    failure = None
    while failure is None:
        batch, failure = await call_apart(take, islice(tasks, AHEAD))
        for task in batch:
            uid = task.uid
            yield task, seen[uid]
            seen[uid] += 1
        if not batch and failure is None:
            return
    raise failure
