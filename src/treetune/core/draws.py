"""How the tasks of a taskset are read and drawn: by position in load order, or by index in the order of a stream.

    taskset[3]                  # the task at a position
    taskset.at(1000)            # the task at an index of an endless stream
    taskset.draw(20)            # the first 20 tasks of the order, built one by one

`Draws` is the base of `Taskset`, which adds the methods that an author writes. Each task is checked, and is the same
wherever it is played.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import count as count_from
from itertools import islice
from operator import index as index_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import msgspec
from typing_extensions import TypeVar

from treetune.chat.images import is_address, urls_in
from treetune.chat.message import add_paragraph
from treetune.config.aliases import keys_meant
from treetune.core import order
from treetune.core.task import Task
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import (
    EmptyTasksetError,
    GeneratorFailed,
    StreamEnded,
    TasksetError,
    TreetuneError,
    UsageError,
    did_you_mean,
    format_error,
    plural,
    user_code,
)

if TYPE_CHECKING:
    from treetune.core.curriculum import Curriculum, Learning


T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=Task, default=Task)
ConfigT = TypeVar("ConfigT", bound=TasksetConfig, default=TasksetConfig)


class Draws(Generic[TaskT, ConfigT]):
    """Reads and draws the tasks that `load_tasks` or `task_at` return, for a run."""

    INFINITE: ClassVar[bool] = False
    """Set to True if `load_tasks` never ends. Every draw then needs a number of tasks."""

    config: ConfigT
    name: str
    """The name in messages, and the default source of its tasks; the class name by default."""
    task_type: ClassVar[type[Task]] = Task

    _reader: Iterator[TaskT] | None = None
    """Reads an endless generator forward."""
    _read = 0
    """How many tasks the reader has read."""

    if TYPE_CHECKING:

        def load_tasks(self) -> Iterable[TaskT]: ...
        def task_at(self, index: int) -> TaskT: ...
        def count(self) -> int | None: ...
        def overrides(self, method: str) -> bool: ...
        def answer_format(self, task: TaskT) -> Any: ...

    @property
    def seed(self) -> int:
        """The seed of generated tasks: `shuffle.seed` of an infinite taskset, else the config's own `seed`, else 0."""
        if self.INFINITE and self.config.shuffle is not None:
            return self.config.shuffle.seed
        return int(getattr(self.config, "seed", 0))

    @property
    def order_seed(self) -> int | None:
        """The seed of the order; None for load order. An infinite taskset always keeps load order."""
        return None if self.INFINITE or self.config.shuffle is None else self.config.shuffle.seed

    @property
    def random_access(self) -> bool:
        """Whether each task can be made alone, without the ones before it."""
        return self.overrides("task_at")

    @property
    def sequential(self) -> bool:
        """Whether it is only an endless generator, whose tasks can only be read forward."""
        return self.INFINITE and not self.random_access

    def __getitem__(self, position: int) -> TaskT:
        """The task at a position in load order."""
        if type(position) is not int or position < 0:
            position = order.read_index(position)
        try:
            task = self.task_at(position)
        except TreetuneError:
            raise
        except IndexError as error:
            raise self._missing(position, f"task_at({position}) failed: {format_error(error)}") from error
        except Exception as error:
            # Name the method that the author wrote: without `task_at`, `load_tasks` made the tasks.
            method = f"task_at({position})" if self.overrides("task_at") else f"load_tasks()[{position}]"
            raise TasksetError(
                f"{self.name}.{method} failed: {format_error(error)}", remedy=self._suggest(error)
            ) from error
        return self._set_position(task, position)

    def __iter__(self) -> Iterator[TaskT]:
        """All tasks in load order, built one by one."""
        if not self.overrides("load_tasks"):
            count = self._count()
            yield from (self[position] for position in (count_from() if count is None else range(count)))
            return
        with user_code(f"{self.name}.load_tasks()", self._suggest):
            for position, task in enumerate(self.load_tasks()):
                yield self._set_position(task, position)

    def at(self, index: int) -> TaskT:
        """The task at `index` of an endless stream over this taskset, epoch after epoch."""
        return self[self.position_at(order.read_index(index), self._size())]

    def position_at(self, index: int, size: int | None) -> int:
        """The position in load order of the task at `index` of the order; `size` is the result of `_size()`."""
        if self._curriculum is not None:
            return self._curriculum.position_at(index)
        return index if size is None else order.locate(index, size, self.order_seed)[1]

    @property
    def in_load_order(self) -> bool:
        """Whether tasks come in load order, the same in every epoch."""
        return self.order_seed is None and self.config.profile is None

    @property
    def endless(self) -> bool:
        """Whether the order has no end: the taskset is infinite, or a schedule keeps drawing its tasks."""
        return self.INFINITE or (self.config.profile is not None and self.config.profile.schedule is not None)

    def learning(self) -> Learning | None:
        """Return a new `Learning` for a stream, which draws by changing pass rates; None if the order is fixed."""
        profile = self.config.profile
        if profile is None or profile.online is None or self._curriculum is None:
            return None
        return self._curriculum.learn()

    def list_uids(self) -> Iterable[tuple[str, str]]:
        """The uid and source of each task in load order. This builds every task."""
        tasks = (self[position] for position in range(self._count() or 0))
        return ((task.uid, task.data_source) for task in tasks)

    @cached_property
    def _curriculum(self) -> Curriculum | None:
        if self.config.profile is None:
            return None
        from treetune.core.curriculum import TaskCurriculum

        if self.INFINITE:
            remedy = "profile one of its keys: profile: {parameter: level, values: [1, 2, 3]}"
            raise UsageError(f"{self.name} never ends, so its tasks have no pass rates of their own", remedy=remedy)
        return TaskCurriculum(self.config.profile, self.list_uids(), self.order_seed, self.name)

    def _size(self) -> int | None:
        """The number of tasks in an epoch of the order; None if it has no end. An empty taskset is an error."""
        if self._curriculum is not None:
            return self._curriculum.size
        count = self._count()
        if count == 0:
            raise no_tasks(self.name)
        return count

    def _count(self) -> int | None:
        """`count`, type-checked: None only for an infinite taskset."""
        with user_code(f"{self.name}.count()"):
            count: Any = self.count()
        if self.INFINITE and count is None:
            return None
        if self.INFINITE or not hasattr(count, "__index__") or count < 0:
            remedy = "return the number of tasks, or None if (and only if) INFINITE = True"
            raise TasksetError(f"{self.name}.count() returned {count!r:.60}", remedy=remedy)
        return index_of(count)

    def draw(self, num_tasks: int | None = None) -> Iterator[TaskT]:
        """The first `num_tasks` of the order, each at most once. Tasks are built only as they are taken."""
        if num_tasks is not None and num_tasks < 1:
            raise UsageError(f"the number of tasks must be at least 1, got {num_tasks}")
        if self.endless and num_tasks is None:
            what = "is INFINITE" if self.INFINITE else "has a schedule, which never ends"
            raise UsageError(f"{self.name} {what}: a draw needs a number of tasks", remedy="pass --num-tasks (-n)")
        if self.in_load_order:
            return self._first(num_tasks)
        size = self._size()
        wanted = min(number for number in (size, num_tasks) if number is not None)
        return (self[self.position_at(index, size)] for index in range(wanted))

    def select_tasks(self, num_tasks: int | None = None) -> list[TaskT]:
        """The tasks of a run, as a list; `draw` yields the same tasks lazily."""
        return list(self.draw(num_tasks))

    @cached_property
    def _loaded(self) -> list[TaskT]:
        count = self._count() if self.overrides("count") else None
        with user_code(f"{self.name}.load_tasks()", self._suggest):
            return list_tasks(self.load_tasks(), self.name, count)

    def _first(self, num_tasks: int | None) -> Iterator[TaskT]:
        # Counting a finite generator would build it whole, so `_size` is only used if `count` is overridden.
        # If `task_at` and `load_tasks` are both overridden, load_tasks() reads in order and needs no count.
        in_order = not self.random_access or self.overrides("load_tasks")
        count = self._size() if self.overrides("count") and not (in_order and self.random_access) else None
        wanted = min((number for number in (count, num_tasks) if number is not None), default=None)
        tasks = iter(self) if in_order else (self[position] for position in count_from())
        given = 0
        for task in islice(tasks, wanted):
            given += 1
            if given == MOST_TASKS and wanted is None:
                warn_of_many(self.name, given, "-n says how many to take")
            yield task
        if wanted is not None and given < wanted and (self.INFINITE or count is not None):
            raise self._missing(given, f"it ended after {plural(given, 'task')}")
        if not given:
            raise no_tasks(self.name)

    def _forward(self, index: int) -> TaskT:
        """Reads an infinite generator forward to `index`; to go back, it starts over."""
        reader, self._reader = self._reader, None  # a generator that raised is exhausted, so it is started again
        try:
            with user_code(f"{self.name}.load_tasks()", self._suggest):
                if reader is None or index < self._read:
                    self._read = 0
                    reader = iter(self.load_tasks())
                for task in reader:
                    self._read += 1
                    if self._read > index:
                        self._reader = reader
                        return task
        except TreetuneError as error:
            raise GeneratorFailed(error.message, remedy=error.remedy, place=self._read) from error
        ended = self._missing(index, f"it ended after {plural(self._read, 'task')}")
        raise StreamEnded(ended.message, remedy=ended.remedy)

    def _set_position(self, task: TaskT, position: int) -> TaskT:
        checked: TaskT = check_task(task, self.task_type, of=self.name, by=type(self).__name__, position=position)
        placed = msgspec.structs.replace(checked, idx=position, data_source=task.data_source or self.name)
        form = self.answer_format(placed)
        return placed if form is None else with_request(placed, form)

    def _suggest(self, error: Exception) -> str | None:
        return suggest_fields(error, self.task_type)

    def _missing(self, position: int, problem: str) -> TreetuneError:
        """The error for a missing task: the taskset promised one, or the caller asked for too high a position."""
        if self.INFINITE:
            return TasksetError(f"{self.name} declares INFINITE = True, but {problem}", remedy="drop INFINITE = True")
        count = self._count() or 0
        if position >= count:
            return UsageError(f"{self.name} has no task {position}: they are numbered from 0 to {count - 1}")
        said = f"{self.name}.count() says {count}, but {problem}"
        return TasksetError(said, remedy="count() must be the number of tasks")


MOST_TASKS = 5_000_000
"""The maximum number of tasks held in memory if the taskset does not state its size."""
MOST_OF_MEMORY = 0.5
"""The share of the free memory, measured when loading begins, that they may take."""
WARN_SECONDS = 5.0
_LOOK_EVERY = 256


def list_tasks(tasks: Iterable[T], name: str, count: int | None) -> list[T]:
    """`count` is the number of tasks, if the taskset states it."""
    if isinstance(tasks, list):
        return tasks
    if count is not None:
        return list(islice(tasks, count))
    loaded: list[T] = []
    wait = WARN_SECONDS
    next_warning, room = time.monotonic() + wait, _free_bytes() * MOST_OF_MEMORY + _used_bytes()
    for task in tasks:
        loaded.append(task)
        if len(loaded) % _LOOK_EVERY:
            continue
        if len(loaded) >= MOST_TASKS or _used_bytes() > room:
            raise _without_end(name, len(loaded))
        if time.monotonic() > next_warning:
            warn_of_many(name, len(loaded), "all are kept in memory")
            wait *= 2
            next_warning += wait
    return loaded


def warn_of_many(name: str, number: int, then: str) -> None:
    goes_on = f"{name}.load_tasks() has yielded {number:,} tasks and has not ended; {then}"
    warnings.warn(f"{goes_on}. If it never ends, set INFINITE = True", stacklevel=3)


def _without_end(name: str, number: int) -> TasksetError:
    return TasksetError(
        f"{name}.load_tasks() has yielded {number:,} tasks and has not ended: no more are kept in memory",
        remedy="set INFINITE = True if it never ends; otherwise write count(), and task_at(index) to "
        "keep no tasks in memory",
    )


def _used_bytes() -> float:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def _free_bytes() -> float:
    """The free memory of this machine, or the limit of the container this process runs in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")
    try:
        return min(free, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit
        return free


def with_request(task: TaskT, form: Any) -> TaskT:
    """The task, whose prompt asks for the form of its answer if the form says so (`instruct`)."""
    if form is None or not form.instruct or task.prompt is None:
        return task
    messages = add_paragraph(task.messages, form.ask())
    prompt = messages[-1]["content"] if isinstance(task.prompt, str) else messages
    return msgspec.structs.replace(task, prompt=prompt)


def check_task(task: TaskT, declared: type[Task], *, of: str, by: str, position: int) -> TaskT:
    """Return the task as read back from its record, in its declared type; `of` is the taskset, `by` its class."""
    if type(task) is not declared:
        kind = type(task).__name__
        remedy = f"declare it: class {by}(Taskset[{kind}, ...])"
        problem = f"{of} declares tasks of type {declared.__name__}, but returned a {kind}"
        raise TasksetError(problem, remedy=remedy if isinstance(task, Task) else "give Task(prompt=...) objects")
    try:
        # Structs do not check their fields when made. After this round trip, the task holds the same values wherever it
        # is played: a date in `extra_info` becomes text.
        kept: TaskT = _decoder(declared).decode(_encoder.encode(task))  # type: ignore[assignment]
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        problem = f"{of}: task {position} cannot be saved as JSON and read back: {error}"
        remedy = "give its fields values of their declared types: text, numbers, lists, dicts"
        raise TasksetError(problem, remedy=remedy) from None
    if isinstance(kept.prompt, list):
        for url in urls_in(kept.prompt):
            if not is_address(url):
                problem = (
                    f"{of}: task {position} has an image at {url!r:.100}, which only programs on "
                    "this machine could read"
                )
                raise TasksetError(
                    problem, remedy="write image_part(to_url(path)), so that the task contains the image"
                )
    return kept


def suggest_fields(error: Exception, task_type: type[Task]) -> str | None:
    """Suggest how to fix a task made with fields that it does not have; None if another error was raised."""
    kind, said = task_type.__name__, str(error)
    if not isinstance(error, TypeError):
        return None
    if said == "Extra positional arguments provided":
        return f"name its fields: {kind}(prompt=..., ground_truth=...)"
    if (unknown := re.fullmatch(r"Unexpected keyword argument '(\w+)'", said)) is None:
        return None
    meant = keys_meant(unknown[1])
    if "ground_truth" in meant:
        return "write ground_truth=..."
    if "prompt_template" in meant:
        return "write prompt=..."
    near = did_you_mean(unknown[1], task_type.__struct_fields__)
    return f"a {kind} has no field {unknown[1]!r}{near or f'; write extra_info={{{unknown[1]!r}: ...}}'}"


def no_tasks(name: str) -> EmptyTasksetError:
    remedy = "load_tasks() must return at least one task; check its filters and files"
    return EmptyTasksetError(f"{name} has no tasks", remedy=remedy)


_encoder = msgspec.json.Encoder()


@lru_cache(maxsize=256)
def _decoder(task_type: type[Task]) -> msgspec.json.Decoder[Task]:
    return msgspec.json.Decoder(task_type)
