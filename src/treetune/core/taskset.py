"""A Taskset is a source of tasks: finite or infinite, lazy.

    class Doubles(Taskset):
        def load_tasks(self):
            for n in range(100):
                yield Task(prompt=f"Double {n}.", ground_truth=str(2 * n))

`task_at` instead of `load_tasks` gives random access: then any worker can serve any index, and nothing is held in
memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count as count_from
from itertools import islice
from operator import index as index_of
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, get_args

import msgspec
from typing_extensions import TypeVar

from treetune.config.plugins import absolute_spec, folders_of
from treetune.config.trust import USER, Origin, current_origin, names_from
from treetune.core import order
from treetune.core.finding import Flaw
from treetune.core.score import UNCHECKED, Score, Verdict
from treetune.core.task import Task
from treetune.core.task_list import MOST_TASKS, list_tasks, warn_of_many
from treetune.core.taskset_config import TasksetConfig
from treetune.core.taskset_contract import check_methods, check_task, may_read_seed, no_tasks, suggest_fields
from treetune.core.tool import (
    Gold,
    NamedTool,
    Tool,
    ToolSource,
    bind_tools,
    check_tool,
    find_tool,
    gold_calls,
    name_tools,
    read_tools,
)
from treetune.errors import (
    Declared,
    GeneratorFailed,
    StreamEnded,
    TasksetError,
    TreetuneError,
    UsageError,
    format_error,
    plural,
    user_code,
)

if TYPE_CHECKING:
    from treetune.core.curriculum.tasks import Curriculum, Learning
    from treetune.core.environment import Environment, Rendered
    from treetune.core.trace import Trace


TaskT = TypeVar("TaskT", bound=Task, default=Task)
ConfigT = TypeVar("ConfigT", bound=TasksetConfig, default=TasksetConfig)


class Taskset(Generic[TaskT, ConfigT]):
    INFINITE: ClassVar[bool] = False
    """`load_tasks` never ends: every draw needs a number of tasks."""
    MULTI_TURN: ClassVar[bool] = False
    """What its own `environment()` makes has several turns, or tools: verl plays its rows by our agent loop."""
    NEEDS_CONTAINER: ClassVar[bool] = False
    """Its tasks run code or commands: refused before the first task where no sandbox can serve it."""

    RUNS_CODE: ClassVar[bool] = False
    """Its config names code to run, or a server to call: rows that name it are played where a build of this user's
    wrote them."""

    scorer: Any = None
    """What scores its answers, where it has no `reward` of its own: `scorer = includes()`, from `treetune.scorers`."""

    config: ConfigT
    name: str
    """What it is called in messages and as the source of its tasks: its class, unless it says otherwise."""

    OPEN_KEYS: ClassVar[bool] = True
    """Whether `custom_cls` may give it any key: so where it has no config type of its own."""

    _declared: Declared = Declared()
    """Where its config stands."""

    _origin: Origin = USER
    """Where the names of code in its config and its tasks come from."""
    _length: int | None = None
    """How many tasks were loaded. It is pickled, so that another process need not load them to know."""
    tool_methods: ClassVar[tuple[str, ...]] = ()
    """The methods that `@tool` marks: what a model may call in every task."""
    task_type: ClassVar[type[Task]] = Task
    config_type: ClassVar[type[TasksetConfig]] = TasksetConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Task):
                    cls.task_type = argument
                elif isinstance(argument, type) and issubclass(argument, TasksetConfig):
                    cls.config_type = argument
        cls.OPEN_KEYS = cls.config_type is TasksetConfig
        cls.tool_methods = read_tools(cls, Taskset)

    def __init__(self, config: ConfigT | None = None) -> None:
        self.config = config if config is not None else self.config_type()  # type: ignore[assignment]
        self.name = type(self).__name__
        self._origin = current_origin()
        self._reader: Iterator[TaskT] | None = None
        self._read = 0
        if not self.overrides("load_tasks") and not self.overrides("task_at"):
            raise TasksetError(f"{self.name} has no tasks", remedy="write load_tasks() or task_at(index)")
        if self.overrides("task_at") and not self.INFINITE and not self.overrides("count"):
            raise TasksetError(f"{self.name} has task_at() but no length", remedy="write count(), or set INFINITE")
        check_methods(type(self), Taskset)
        self.named_tools()  # a wrong name is told now
        if self.INFINITE and self.config.shuffle is not None and not may_read_seed(type(self), Taskset):
            warnings.warn(
                f"{self.name} is INFINITE and reads no seed: shuffle.seed has no effect. "
                "Read self.seed where its tasks are generated.",
                stacklevel=2,
            )

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """The taskset of a typed config, as a config file declares it."""
        return cls(config, **options)

    # What an author writes

    def load_tasks(self) -> Iterable[TaskT]:
        """All tasks, as a list or a generator."""
        count = self.count()
        return (self.task_at(index) for index in (count_from() if count is None else range(count)))

    def task_at(self, index: int) -> TaskT:
        """The task at a position: a pure function of (seed, index). Optional, and what makes everything O(1)."""
        if self.INFINITE:
            return self._forward(index)
        if index >= len(self._loaded):
            raise self._missing(index, f"it ended after {plural(len(self._loaded), 'task')}")
        return self._loaded[index]

    def count(self) -> int | None:
        """How many tasks there are; None where INFINITE."""
        if self._length is None and not self.INFINITE:
            self._length = len(self._loaded)
        return self._length

    def check_source(self) -> None:
        """Raises what is wrong with where the tasks come from; asked before the first one is drawn."""

    def find_flaws(self) -> list[Flaw]:
        """What is wrong with where the tasks come from though there are tasks: rows that were left out."""
        return []

    def validate(self, task: TaskT) -> Any:
        """Is the task well-formed and solvable? `VALID`, `invalid("why")`, or `UNCHECKED`. May be async."""
        return UNCHECKED

    def reward(self, task: TaskT, answer: str) -> Any:
        """The reward of a single answer, a number or a `Score`: what `scorer` says, where it has one. May be async."""
        if self.scorer is not None:
            return self.scorer.score(answer, task.ground_truth, task)
        if self.overrides("score_group"):
            return Score(0.0, answer=answer, explanation="scored together with the other rollouts of its task")
        remedy = "write reward(task, answer), set scorer, or give the task an env_class"
        raise TasksetError(f"{self.name} cannot score its task {task.idx}", remedy=remedy)

    def gold(self, task: TaskT) -> Any:
        """The right answer, a list of actions, or None where it is not known: what the environment says. May be
        async."""
        if task.env_class is None:
            return None if self.scorer is None else self.scorer.gold(task.ground_truth, task)
        cls: Any = self.environment_class(task.env_class)
        return cls.gold(task)

    def score_group(self, task: TaskT, traces: Sequence[Trace]) -> Any:
        """Rewards of several traces of one task, scored together. Optional; may be async."""
        if self.scorer is None or not self.scorer.scores_groups:
            raise NotImplementedError
        return self.scorer.score_group(task, traces)

    def environment(self, task: TaskT) -> Environment:
        """The environment that runs this task."""
        from treetune.core.environment import SingleTurn, make

        if task.env_class is None:
            return SingleTurn(task, self)
        with names_from(self.tasks_origin):
            return make(self.environment_spec(task.env_class), task)

    @classmethod
    def render(cls, trace: Trace) -> Rendered | str | None:
        """What a person reads beside the messages of a trace, where this taskset makes its environments itself; those
        that tasks name have a `render` of their own."""
        return None

    def environment_spec(self, env_class: str) -> str:
        """The name of an environment; `file.py:Name` is looked for beside the taskset's own file."""
        return absolute_spec(env_class, folders_of(type(self)))

    def environment_class(self, env_class: str) -> type:
        """The class of an environment that a task or the config names."""
        from treetune.config.plugins import environments

        with names_from(self.tasks_origin):
            return environments.resolve(self.environment_spec(env_class), current_origin())

    @property
    def tasks_origin(self) -> Origin:
        """Where the names of code in its tasks come from: the taskset, unless it reads tasks that others wrote."""
        return self._origin

    def offers_tools(self, task: TaskT) -> bool:
        """Whether `tools_for` has any, known without making them."""
        return bool(self.tool_methods or self.config.tools or task.tools)

    def tools_for(self, task: TaskT) -> list[Tool | ToolSource]:
        """What a model may call in this task beside its environment's tools: the taskset's own `@tool` methods, what
        its config names, what the task names. Made anew for each episode."""
        own = name_tools(self.config.tools, ())
        found: list[Tool | ToolSource] = [*bind_tools(self, task)]
        for named in name_tools(self.config.tools, task.tools):
            with names_from(self._origin if named in own else self.tasks_origin):
                found.append(find_tool(self._tool_spec(named), task, current_origin()))
        return found

    def named_tools(self) -> list[Any]:
        """What its config names for all tasks: functions, and classes of sources."""
        return [check_tool(self._tool_spec(named), self._origin) for named in name_tools(self.config.tools, ())]

    def _tool_spec(self, named: NamedTool) -> NamedTool:
        """`file.py:name` is looked for beside the taskset's own file."""
        return named._replace(name=absolute_spec(named.name, folders_of(type(self)))) if ":" in named.name else named

    def source(self) -> str | None:
        """What identifies the data behind the tasks (a file's hash, a revision), for the fingerprint."""
        return None

    # What a run uses

    @property
    def seed(self) -> int:
        """The seed of generated tasks: of an infinite taskset `shuffle.seed`, else the config's own `seed`, else 0."""
        if self.INFINITE and self.config.shuffle is not None:
            return self.config.shuffle.seed
        return int(getattr(self.config, "seed", 0))

    @property
    def order_seed(self) -> int | None:
        """The seed of the order; None keeps load order, as an infinite taskset always does."""
        return None if self.INFINITE or self.config.shuffle is None else self.config.shuffle.seed

    @property
    def random_access(self) -> bool:
        """Each task can be made alone, without those before it."""
        return self.overrides("task_at")

    @property
    def sequential(self) -> bool:
        """Only an endless generator: its tasks can be read forward, and in no other order."""
        return self.INFINITE and not self.random_access

    @property
    def scores_groups(self) -> bool:
        return self.overrides("score_group") or (self.scorer is not None and self.scorer.scores_groups)

    def scores_group_of(self, task: TaskT) -> bool:
        """Whether the rollouts of this task are scored together."""
        return self.scores_groups

    @property
    def asks_scorer(self) -> bool:
        """Whether its `reward` is what its scorer says."""
        return type(self).reward is Taskset.reward

    def scores_alone(self, task: TaskT) -> bool:
        """Whether one answer to the task has a reward; where not, only `score_group` gives rewards."""
        if not self.scores_group_of(task) or task.env_class is not None or self.overrides("environment"):
            return True
        if self.scorer is not None and self.asks_scorer:
            return not self.scorer.scores_groups
        return self.overrides("reward")

    def type_of(self, task: Task) -> type[Task]:
        """The concrete type of a task that came back over a wire or from a file."""
        return self.task_type

    def overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Taskset, method)

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
            # The method that the author wrote: without a `task_at` it is `load_tasks` that gave the tasks.
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
        """The task that an endless stream over this taskset gives at `index`, epoch after epoch."""
        return self[self.position_at(order.read_index(index), self._size())]

    def position_at(self, index: int, size: int | None) -> int:
        """Where in load order the task lies that comes at `index` of the order; `size` is what `_size()` says."""
        if self._curriculum is not None:
            return self._curriculum.position_at(index)
        return index if size is None else order.locate(index, size, self.order_seed)[1]

    @property
    def in_load_order(self) -> bool:
        """Whether tasks come in load order, the same in every epoch."""
        return self.order_seed is None and self.config.profile is None

    @property
    def endless(self) -> bool:
        """Whether the order has no end: there are no last tasks, or a schedule draws them again and again."""
        return self.INFINITE or (self.config.profile is not None and self.config.profile.schedule is not None)

    def learning(self) -> Learning | None:
        """What draws by pass rates that rewards move, a fresh one for each stream; None: the order is fixed."""
        profile = self.config.profile
        if profile is None or profile.online is None or self._curriculum is None:
            return None
        return self._curriculum.learn()

    def list_uids(self) -> Iterable[tuple[str, str]]:
        """The uid and the source of each task in load order: every task is made for it."""
        tasks = (self[position] for position in range(self._count() or 0))
        return ((task.uid, task.data_source) for task in tasks)

    @cached_property
    def _curriculum(self) -> Curriculum | None:
        if self.config.profile is None:
            return None
        from treetune.core.curriculum.tasks import TaskCurriculum

        if self.INFINITE:
            remedy = "profile one of its keys: profile: {parameter: level, values: [1, 2, 3]}"
            raise UsageError(f"{self.name} never ends, so its tasks have no pass rates of their own", remedy=remedy)
        return TaskCurriculum(self.config.profile, self.list_uids(), self.order_seed, self.name)

    def _size(self) -> int | None:
        """How many tasks an epoch of the order has; None: it has no end. An empty taskset is an error."""
        if self._curriculum is not None:
            return self._curriculum.size
        count = self._count()
        if count == 0:
            raise no_tasks(self.name)
        return count

    def _count(self) -> int | None:
        """`count`, of a right type: None only of an infinite taskset."""
        with user_code(f"{self.name}.count()"):
            count: Any = self.count()
        if self.INFINITE and count is None:
            return None
        if self.INFINITE or not hasattr(count, "__index__") or count < 0:
            remedy = "return the number of tasks; None where INFINITE = True, and only there"
            raise TasksetError(f"{self.name}.count() gave {count!r:.60}", remedy=remedy)
        return index_of(count)

    def draw(self, num_tasks: int | None = None) -> Iterator[TaskT]:
        """The first `num_tasks` of the order, each at most once; only what is taken is built."""
        if num_tasks is not None and num_tasks < 1:
            raise UsageError(f"the number of tasks must be at least 1, got {num_tasks}")
        if self.endless and num_tasks is None:
            what = "is INFINITE" if self.INFINITE else "has a schedule, which never ends"
            raise UsageError(f"{self.name} {what}: a draw from it needs an end", remedy="pass --num-tasks (-n)")
        if self.in_load_order:
            return self._first(num_tasks)
        size = self._size()
        wanted = min(number for number in (size, num_tasks) if number is not None)
        return (self[self.position_at(index, size)] for index in range(wanted))

    def select_tasks(self, num_tasks: int | None = None) -> list[TaskT]:
        """The tasks of a run, as a list; `draw` gives the same lazily."""
        return list(self.draw(num_tasks))

    async def gold_of(self, task: TaskT) -> Gold:
        """`gold`, off the event loop where it is synchronous, and of a right type."""
        from treetune.system.threads import call

        gold = await call(self.gold, task)
        if gold is None or isinstance(gold, str):
            return gold
        if isinstance(gold, list | tuple) and all(isinstance(action, str) or gold_calls(action) for action in gold):
            return list(gold)
        problem = f"{self.name}.gold() gave a {type(gold).__name__} for task {task.idx}: {gold!r:.80}"
        remedy = "return the answer as text, a list of texts and calls ({'tool': name, 'arguments': {}}), or None"
        raise TasksetError(problem, remedy=remedy)

    async def check(self, task: TaskT) -> Verdict:
        """`validate`, off the event loop where it is synchronous."""
        from treetune.system.threads import call

        return Verdict.of(await call(self.validate, task))

    def __getstate__(self) -> dict[str, Any]:
        """What can be worked out again stays behind: a pickled taskset is small, and holds no open generator."""
        again = {key for key in self.__dict__ if isinstance(getattr(type(self), key, None), cached_property)}
        kept = {key: value for key, value in self.__dict__.items() if key not in again}
        return {**kept, "_reader": None, "_read": 0}

    @cached_property
    def _loaded(self) -> list[TaskT]:
        count = self._count() if self.overrides("count") else None
        with user_code(f"{self.name}.load_tasks()", self._suggest):
            return list_tasks(self.load_tasks(), self.name, count)

    def _first(self, num_tasks: int | None) -> Iterator[TaskT]:
        # A finite generator would have to be built whole to know its count: it is asked for only where it is written.
        # Where both are written, load_tasks() is what reads in order, and needs no count.
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
        """Reads an infinite generator forward to `index`; going back means starting over."""
        reader, self._reader = self._reader, None  # a generator that raised gives nothing more: it is read anew
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
        return msgspec.structs.replace(checked, idx=position, data_source=task.data_source or self.name)

    def _suggest(self, error: Exception) -> str | None:
        return suggest_fields(error, self.task_type)

    def _missing(self, position: int, problem: str) -> TreetuneError:
        """What to say where there is no task at a position: the taskset promised one, or nobody did."""
        if self.INFINITE:
            return TasksetError(f"{self.name} says INFINITE, but {problem}", remedy="drop INFINITE = True")
        count = self._count() or 0
        if position >= count:
            return UsageError(f"{self.name} has no task {position}: they are numbered from 0 to {count - 1}")
        said = f"{self.name}.count() says {count}, but {problem}"
        return TasksetError(said, remedy="count() must be the number of tasks")
