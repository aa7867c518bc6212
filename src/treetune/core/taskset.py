"""A Taskset is a source of tasks, and defines how their answers are scored.

`Taskset` has the methods that an author writes; `draws.Draws` reads and draws its tasks.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count as count_from
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args
from weakref import WeakSet

import msgspec

from treetune.config.code_files import parse_again
from treetune.config.plugins import absolute_spec, folders_of
from treetune.config.trust import USER, Origin, current_origin, names_from
from treetune.core.contract import SCORED_ALONE, Contract, check_contract, override_by_config
from treetune.core.draws import ConfigT, Draws, TaskT
from treetune.core.finding import Flaw
from treetune.core.score import UNCHECKED, VALID, Score, Verdict, invalid
from treetune.core.task import Task, fill_form
from treetune.core.taskset_config import TasksetConfig
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
from treetune.errors import Declared, TasksetError, TreetuneError, UsageError, plural

if TYPE_CHECKING:
    from treetune.core.environment import Environment, Rendered
    from treetune.core.trace import Trace


class Taskset(Draws[TaskT, ConfigT]):
    """A source of tasks, finite or infinite, that also scores their answers.

        from treetune import Task, Taskset
        from treetune.scorers import number

        class Doubles(Taskset):
            scorer = number()                # or write reward(self, task, answer)

            def load_tasks(self):
                for n in range(100):
                    yield Task(prompt=f"Double {n}.", ground_truth=2 * n)

    Try it: `treetune eval doubles.py:Doubles -m scripted:gold`. For random access, write `task_at` and `count` instead
    of `load_tasks`: then any worker can serve any index, and no tasks are held in memory.
    """

    MULTI_TURN: ClassVar[bool] = False
    """Whether the environments made by `environment()` have several turns or tools; verl then uses our agent loop."""
    NEEDS_CONTAINER: ClassVar[bool] = False
    """Whether its tasks run code or commands; refused before the first task if no sandbox is available."""

    RUNS_CODE: ClassVar[bool] = False
    """Whether its config names code to run or a server to call. Rows that name such a taskset are played only if this
    user built them."""

    scorer: Any = None
    """Scores answers if there is no `reward` method: `scorer = includes()`, from `treetune.scorers`."""

    default_scorer: Any = None
    """Scores tasks with a ground truth if `scorer` is None; tasksets of rows use the rule scorer."""

    CONTRACT: Contract = Contract()
    """The contract of its episodes, the same everywhere. Fields that are set here override those of the tasks'
    environments."""

    ANSWER: ClassVar[Any] = None
    """The place of the answer in replies, an `AnswerFormat`. `scorer` reads the answer there, unless it declares a
    place itself. An environment declares its own."""

    OPEN_KEYS: ClassVar[bool] = True
    """Whether `custom_cls` accepts any config key, which it does if the class has no config type of its own."""

    _declared: Declared = Declared()
    """Where its config was declared."""

    _origin: Origin = USER
    """The origin of the code names in its config and its tasks."""
    _length: int | None = None
    """The number of tasks once loaded. It is pickled, so that another process need not load them to count."""
    tool_methods: ClassVar[tuple[str, ...]] = ()
    """The methods marked with `@tool`, which a model may call in every task."""
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
        if self.config.contract is not None:
            self.CONTRACT = override_by_config(self)
        self.name = type(self).__name__
        self._origin = current_origin()
        if not self.overrides("load_tasks") and not self.overrides("task_at"):
            raise TasksetError(f"{self.name} has no tasks", remedy="write load_tasks() or task_at(index)")
        if self.overrides("task_at") and not self.INFINITE and not self.overrides("count"):
            raise TasksetError(f"{self.name} has task_at() but no length", remedy="write count(), or set INFINITE")
        check_methods(type(self), Taskset)
        if self.ANSWER is not None and self.scorer is not None and self.scorer.answer is None:
            self.scorer = msgspec.structs.replace(self.scorer, answer=self.ANSWER)
        self.named_tools()  # raises early for a wrong name
        if self.INFINITE and self.config.shuffle is not None and not may_read_seed(type(self), Taskset):
            warnings.warn(
                f"{self.name} is INFINITE and reads no seed: shuffle.seed has no effect. "
                "Read self.seed where its tasks are generated.",
                stacklevel=2,
            )

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """Make the taskset from a typed config, as read from a config file."""
        return cls(config, **options)

    # Methods that an author may write

    def load_tasks(self) -> Iterable[TaskT]:
        """Return all tasks, as a list or a generator."""
        count = self.count()
        return (self.task_at(index) for index in (count_from() if count is None else range(count)))

    def task_at(self, index: int) -> TaskT:
        """Return the task at a position, as a pure function of (seed, index). Optional; makes every access O(1)."""
        if self.INFINITE:
            return self._forward(index)
        if index >= len(self._loaded):
            raise self._missing(index, f"it ended after {plural(len(self._loaded), 'task')}")
        return self._loaded[index]

    def count(self) -> int | None:
        """Return the number of tasks; None if INFINITE."""
        if self._length is None and not self.INFINITE:
            self._length = len(self._loaded)
        return self._length

    def check_source(self) -> None:
        """Raise if the source of the tasks is unusable. Called before the first task is drawn."""

    def find_flaws(self) -> list[Flaw]:
        """Return problems of the source that do not prevent reading tasks, such as rows that were left out."""
        return []

    def validate(self, task: TaskT) -> Any:
        """Check that the task is well-formed and solvable: `VALID`, `invalid("why")` or `UNCHECKED`. May be async."""
        if self.default_scorer is None:
            return UNCHECKED
        if self.scorer is not None and task.env_class is None:
            problem = self.scorer.problem(task.ground_truth, task)
            return VALID if problem is None else invalid(f"the ground truth {problem}")
        return VALID if task.ground_truth is not None and task.messages else UNCHECKED

    def scorer_for(self, task: TaskT) -> Any:
        """The scorer of a task that names no environment; None if there is none, or if `reward` is overridden."""
        if self.scorer is None and self.default_scorer is not None and task.ground_truth is not None:
            return self.default_scorer
        return self.scorer

    def answer_format(self, task: TaskT) -> Any:
        """Where a reply to the task gives its answer: the `AnswerFormat` that its environment, its scorer or the
        taskset declares; None if none does."""
        if task.env_class is not None and not self.overrides("environment"):
            return self._format_of(task.env_class)
        scorer = self.scorer_for(task)
        return self.ANSWER if scorer is None else scorer.answer or self.ANSWER

    def _format_of(self, env_class: str) -> Any:
        if env_class not in self._formats:
            try:
                self._formats[env_class] = getattr(self.environment_class(env_class), "ANSWER", None)
            except TreetuneError:  # reported when it is played
                self._formats[env_class] = None
        return self._formats[env_class]

    @cached_property
    def _formats(self) -> dict[str, Any]:
        """The forms that environments declare, by their names."""
        return {}

    def reward(self, task: TaskT, answer: str) -> Any:
        """Return the reward of a single answer, a number or a `Score`. Uses `scorer` by default. May be async."""
        if (scorer := self.scorer_for(task)) is not None:
            return scorer.score(answer, task.ground_truth, task)
        if self.overrides("score_group"):
            return Score(0.0, answer=answer, explanation="scored together with the other rollouts of its task")
        if self.default_scorer is not None:
            problem = f"a row of data_source {task.data_source!r} has no ground truth to compare with"
            raise TasksetError(problem, remedy="set ground_truth, scorer or env_class")
        remedy = "write reward(task, answer), set scorer, or give the task an env_class"
        raise TasksetError(f"{self.name} cannot score its task {task.idx}", remedy=remedy)

    def gold(self, task: TaskT) -> Any:
        """Return the right answer, a list of actions, or None if unknown. By default, the scorer or environment gives
        it, or the ground truth in the form that `ANSWER` declares. May be async."""
        if task.env_class is None:
            form, scorer = self.answer_format(task), self.scorer_for(task)
            if scorer is not None and (form is None or scorer.answer is not None):
                return scorer.gold(task.ground_truth, task)
            return fill_form(form, task.ground_truth)
        cls: Any = self.environment_class(task.env_class)
        return cls.gold(task)

    def score_group(self, task: TaskT, traces: Sequence[Trace]) -> Any:
        """Return the rewards of several traces of one task, scored together. Optional; may be async."""
        if self.scorer is None or not self.scorer.scores_groups:
            raise NotImplementedError
        return self.scorer.score_group(task, traces)

    def environment(self, task: TaskT) -> Environment:
        """Return the environment that runs this task."""
        from treetune.core.environment import SingleTurn, make

        if task.env_class is None:
            return SingleTurn(task, self)
        with names_from(self.tasks_origin):
            return make(self.environment_spec(task.env_class), task)

    @classmethod
    def render(cls, trace: Trace) -> Rendered | str | None:
        """Return what a person sees next to the messages of a trace. Used if this taskset makes its environments
        itself; environments that tasks name have their own `render`."""
        return None

    def contract_of(self, task: TaskT, environment: type | None = None) -> Contract:
        """The contract of a task's episodes: what its environment declares, what the taskset declares, and the turn
        limit of the task. The class of the `environment` is needed if the taskset makes it."""
        from treetune.core.environment import SingleTurn

        if environment is None and not self.overrides("environment"):
            environment = SingleTurn if task.env_class is None else self.environment_class(task.env_class)
        declared: Contract = getattr(environment, "CONTRACT", Contract())
        if declared.max_turns == 1 and self.offers_tools(task):
            declared = msgspec.structs.replace(declared, max_turns=None)  # the environment takes one answer after calls
        declared = declared.override(self.CONTRACT).of_task(task)
        check_contract(declared)
        return msgspec.structs.replace(declared, group_score=self.scores_group_of(task))

    def environment_spec(self, env_class: str) -> str:
        """Resolve the name of an environment; `file.py:Name` is looked up next to the taskset's own file."""
        return absolute_spec(env_class, folders_of(type(self)))

    def environment_class(self, env_class: str) -> type:
        """The class of an environment that a task or the config names."""
        from treetune.config.plugins import environments

        with names_from(self.tasks_origin):
            return environments.resolve(self.environment_spec(env_class), current_origin())

    @property
    def tasks_origin(self) -> Origin:
        """The origin of code names in its tasks: the taskset's origin, unless it reads tasks that others wrote."""
        return self._origin

    def offers_tools(self, task: TaskT) -> bool:
        """Whether `tools_for` returns any tools, determined without making them."""
        return bool(self.tool_methods or self.config.tools or task.tools)

    def tools_for(self, task: TaskT) -> list[Tool | ToolSource]:
        """The tools that a model may call in this task besides the environment's: the taskset's own `@tool` methods,
        those that its config names and those that the task names. Created for each episode."""
        own = name_tools(self.config.tools, ())
        found: list[Tool | ToolSource] = [*bind_tools(self, task)]
        for named in name_tools(self.config.tools, task.tools):
            with names_from(self._origin if named in own else self.tasks_origin):
                found.append(find_tool(self._tool_spec(named), task, current_origin()))
        return found

    def named_tools(self) -> list[Any]:
        """The tools that its config names for all tasks: functions and tool source classes."""
        return [check_tool(self._tool_spec(named), self._origin) for named in name_tools(self.config.tools, ())]

    def _tool_spec(self, named: NamedTool) -> NamedTool:
        """Look up `file.py:name` next to the taskset's own file."""
        return named._replace(name=absolute_spec(named.name, folders_of(type(self)))) if ":" in named.name else named

    def source(self) -> str | None:
        """Return an identifier of the data behind the tasks (a file's hash, a revision), for the fingerprint."""
        return None

    # Methods that a run uses

    @property
    def scores_groups(self) -> bool:
        return self.overrides("score_group") or (self.scorer is not None and self.scorer.scores_groups)

    def scores_group_of(self, task: TaskT) -> bool:
        """Whether the rollouts of this task are scored together."""
        return self.scores_groups

    def scores_alone(self, task: TaskT) -> bool:
        """Whether a single answer to the task has a reward; if not, only `score_group` gives rewards."""
        if not self.scores_group_of(task) or task.env_class is not None or self.overrides("environment"):
            return True
        if self.scorer is not None and not self.overrides("reward"):
            return not self.scorer.scores_groups
        return self.overrides("reward") or self.default_scorer is not None

    def type_of(self, task: Task) -> type[Task]:
        """The concrete type of a task that was received over the wire or read from a file."""
        return self.task_type

    def overrides(self, method: str) -> bool:
        """Whether the class overrides a method of `Taskset`."""
        return getattr(type(self), method) is not getattr(Taskset, method)

    async def gold_of(self, task: TaskT) -> Gold:
        """`gold`, type-checked, and called off the event loop if it is synchronous."""
        from treetune.system.threads import call

        gold = await call(self.gold, task)
        if gold is None or isinstance(gold, str):
            return gold
        if isinstance(gold, list | tuple) and all(isinstance(action, str) or gold_calls(action) for action in gold):
            return list(gold)
        problem = f"{self.name}.gold() returned a {type(gold).__name__} for task {task.idx}: {gold!r:.80}"
        remedy = "return the answer as text, a list of texts and calls ({'tool': name, 'arguments': {}}), or None"
        raise TasksetError(problem, remedy=remedy)

    async def check(self, task: TaskT) -> Verdict:
        """`validate`, called off the event loop if it is synchronous."""
        from treetune.system.threads import call

        return Verdict.of(await call(self.validate, task))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values and open generators, to keep a pickled taskset small."""
        again = {key for key in self.__dict__ if isinstance(getattr(type(self), key, None), cached_property)}
        kept = {key: value for key, value in self.__dict__.items() if key not in again}
        return {**kept, "_reader": None, "_read": 0}


def scored_in_group(name: str, task: Task) -> UsageError:
    remedy = "call run_group(task, n), or write reward(task, answer) to score a single answer"
    return UsageError(f"task {task.idx} of {name} is scored with its group, and here {SCORED_ALONE}", remedy=remedy)


_METHODS = {
    "load_tasks": (),
    "task_at": ("index",),
    "count": (),
    "reward": ("task", "answer"),
    "gold": ("task",),
    "validate": ("task",),
    "score_group": ("task", "traces"),
    "environment": ("task",),
}
"""The methods that an author may write, with the arguments that each receives."""


_sound: WeakSet[type] = WeakSet()
"""Classes that were already checked; tasksets are also made during rollouts."""


def check_methods(cls: type, base: type) -> None:
    """Raise if a method cannot be called with its arguments, such as `def reward(self, answer)`."""
    if cls in _sound:
        return
    for name, given in _METHODS.items():
        written = inspect.getattr_static(cls, name)
        if written is inspect.getattr_static(base, name) or isinstance(written, property | cached_property):
            continue
        method = getattr(cls, name)
        takes_self = inspect.isfunction(written)
        try:
            signature = inspect.signature(method)
        except ValueError:  # a C function without a signature
            continue
        except TypeError:
            problem = f"{cls.__name__}.{name} is a {type(method).__name__}, not a method"
            raise TasksetError(problem, remedy=_write(name, given)) from None
        try:
            signature.bind(*(("self",) if takes_self else ()), *given)
        except TypeError as error:
            problem = f"{cls.__name__}.{name}{signature} cannot be called as {name}({', '.join(given)}): {error}"
            raise TasksetError(problem, remedy=_write(name, given)) from None
    _sound.add(cls)


def _write(name: str, given: tuple[str, ...]) -> str:
    return f"write def {name}({', '.join(('self', *given))})"


def may_read_seed(cls: type, upto: type) -> bool:
    """Whether the source of a class, or of a base below `upto`, mentions a seed. A config that is passed on as a whole
    counts as a mention, because it may be read anywhere."""
    bases = cls.__mro__[: cls.__mro__.index(upto)]
    try:
        source = "".join(parse_again(lambda: list(map(inspect.getsource, bases))))
    except (OSError, TypeError):
        return True
    return re.search(r"seed|shuffle|self\.config\b(?!\.)", source) is not None
