"""What scores a row's task: a `ScoredBy`, which a row holds as text in `extra_info.scorer`.

    scored_by(taskset, task)        # the rule, a scorer, an environment or the taskset: a `ScoredBy`
    taskset_of(scored_by)           # what scores the row's task, from the row alone, made once per process
    with_type(task, taskset)        # the row's task as the taskset knows it

| kind | text |
|---|---|
| `rule` | `rule` |
| `scorer` | `{"scorer":{"kind":"includes"}}` |
| `environment` | `env:gsm8k` |
| `taskset` | `{"id":"my_tasks:Colours","level":2}` |

Python files that a scorer names are stored in the cache (`code_store.py`) and run only if that module allows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import msgspec

from treetune.config.interpolation import fill_variables, mark_variables
from treetune.config.plugins import absolute_spec, environments, folders_of
from treetune.config.structs import to_plain
from treetune.config.trust import LOOK, Origin, code_folders, is_own_scorer, names_from, remember_scorer, trusts
from treetune.core.contract import SCORED_ALONE, Contract
from treetune.core.environment import Environment
from treetune.core.from_config import build_taskset
from treetune.core.mixture import owner_of, parts_of
from treetune.core.task import Task, own_fields, own_values
from treetune.core.taskset import Taskset
from treetune.core.tool import NamedTool, Tool, ToolSource, find_tool
from treetune.data.rows.code_store import SCHEME, keep_class, keep_files, locate_files
from treetune.errors import TasksetError, TreetuneError, UntrustedCode, UsageError
from treetune.play.given_tasks import GivenTasks
from treetune.scorers import read_scorer
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.scorer import Rule, Scorer, kind_named
from treetune.system.digest import digest

FORMS = 'write text: rule, env:NAME, a scorer as {"scorer": {"kind": ...}}, or a taskset as JSON'

_ENVIRONMENT, _SCORER = "env:", '{"scorer":'

_METHODS = {kind: kind for kind in ("choice", "code", "exact", "f1", "includes", "json", "math", "number")}
_METHODS |= {"math_verify": "math", "math-verify": "math"}
"""The scorer kind that a method names, for all kinds that need no keys. Any other method means the rule."""


class ScoredBy(msgspec.Struct, frozen=True):
    kind: Literal["rule", "scorer", "environment", "taskset"]
    value: str = ""
    """The name of the environment, or the scorer or taskset as JSON."""

    @classmethod
    def read(cls, text: Any) -> ScoredBy | None:
        """Parse the text of a row. Returns None if it holds none."""
        if text is not None and not isinstance(text, str):
            raise TasksetError(f"a row has a scorer that is not text: {text!r:.80}", remedy=FORMS)
        return _read(text) if text else None

    @classmethod
    def of_scorer(cls, scorer: Scorer) -> ScoredBy:
        plain = mark_variables(msgspec.to_builtins(scorer.without_files()))
        if plain == {"kind": "rule"}:
            return BY_RULE
        return cls("scorer", msgspec.json.encode({"scorer": plain}).decode())

    @property
    def text(self) -> str:
        """The text form that a row holds."""
        if self.kind == "rule":
            return "rule"
        return f"{_ENVIRONMENT}{self.value}" if self.kind == "environment" else self.value

    @property
    def by_scorer(self) -> bool:
        """Whether the task is scored by a scorer or the rule, which compare one answer with the ground truth."""
        return self.kind in ("rule", "scorer")


BY_RULE = ScoredBy("rule")


@lru_cache(maxsize=256)
def _read(text: str) -> ScoredBy:
    if text == BY_RULE.text:
        return BY_RULE
    if text.startswith(_ENVIRONMENT):
        return ScoredBy("environment", text.removeprefix(_ENVIRONMENT))
    return ScoredBy("scorer" if text.startswith(_SCORER) else "taskset", text)


def scored_by_row(task: Task) -> ScoredBy | None:
    """Return what scores a row's task, if its other columns determine that."""
    if task.env_class is not None:
        return ScoredBy("environment", task.env_class)
    if task.ground_truth is None:
        return None
    return ScoredBy.of_scorer(scorer_of_method(task.reward_spec.get("method")) or Rule())


def scorer_of_method(method: Any) -> Scorer | None:
    """Return the scorer that a row's `reward_spec.method` or a config's `reward_method` names; None means the rule."""
    return _scorer_of_method(method) if isinstance(method, str) and method in _METHODS else None


@lru_cache(maxsize=256)
def _scorer_of_method(method: str) -> Scorer:
    return kind_named(_METHODS[method])()


_ONLY_BUILD = ("filter", "profile", "tokenizer", "shuffle")
"""Keys of a taskset that select tasks but do not change rewards."""

SEVERAL_TURNS = (
    "have its episodes played: in verl by our agent loop (`run_with_tasks`, `play_by_tasks`), in TRL by "
    "rollout_func=tasks.rollout; or train with SkyRL, AReaL, or from `treetune serve`"
)


def scored_by(taskset: Taskset[Any, Any], task: Task) -> ScoredBy | None:
    """Return what scores a task of this taskset, or None if nothing can score it from its row."""
    taskset, task = owner_of(taskset, task)
    if (of_row := getattr(taskset, "scored_by", None)) is not None:  # rows say it themselves
        return of_row(task)  # type: ignore[no-any-return]
    if (
        (task.env_class is None and taskset.overrides("reward"))
        or taskset.overrides("environment")
        or own_fields(type(task))
        or taskset.tool_methods
        or taskset.overrides("score_group")
        or Contract() != taskset.CONTRACT
    ):
        return describe_taskset(taskset)
    if taskset.config.tools and task.env_class is None:
        return describe_taskset(taskset)
    if task.env_class is not None:
        return describe_environment(absolute_spec(task.env_class, folders_of(type(taskset))))
    scorer = taskset.scorer_for(task)
    return None if scorer is None else describe_scorer(scorer)


def describe_scorer(scorer: Scorer) -> ScoredBy:
    """Describe a scorer of this user as a row names it. If the scorer calls a model, it is marked as named by this
    user."""
    described = ScoredBy.of_scorer(scorer)
    if scorer.calls_models:
        remember_scorer(described.text)
    return described


def describe_environment(env_class: str, cache_dir: Any = None) -> ScoredBy:
    """Describe an environment as a row names it. Its file is stored in the cache if it has one."""
    return ScoredBy("environment", str(keep_files(env_class, cache_dir)))


def describe_taskset(taskset: Taskset[Any, Any], cache_dir: Any = None) -> ScoredBy:
    """Describe a taskset as JSON, from which any process that has the class can rebuild it."""
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    keys = {key: value for key, value in {**config, **further}.items() if value is not None and key not in _ONLY_BUILD}
    if taskset.config.contract is not None:
        keys["contract"] = taskset.config.contract.declared
    cls = type(taskset)
    if (foreign := getattr(cls, "FOREIGN", None)) is not None:  # any process can rebuild it from its name
        named: dict[str, Any] = {"id": foreign}
    else:
        named = {"custom_cls": {"path": keep_class(cls, cache_dir), "name": cls.__qualname__}}
    node = {**named, **mark_variables(keep_files(keys, cache_dir))}
    _keep_tools(node, cache_dir)
    described = msgspec.json.encode(node).decode()
    if cls.RUNS_CODE:
        remember_scorer(described)
    return ScoredBy("taskset", described)


def refuse_groups(taskset: Taskset[Any, Any], task: Task, in_groups: bool = False) -> str | None:
    """Return a warning about what is lost if a taskset scores groups of answers. Raises if it scores only groups.
    `in_groups`: whether a taskset's own `score_group` is called."""
    taskset, task = owner_of(taskset, task)
    if not taskset.scores_group_of(task) or (in_groups and taskset.overrides("score_group")):
        return None
    if not taskset.scores_alone(task):
        raise only_groups(taskset.name, "" if taskset.scorer is not None else "write reward(task, answer) too, or ")
    return f"{taskset.name}.score_group() is not called here: {SCORED_ALONE}"


def only_groups(name: str, before: str = "") -> UsageError:
    return UsageError(
        f"{name} only scores groups, and here {SCORED_ALONE}",
        remedy=f"{before}train with verl or TRL, or from `treetune serve`, which score groups",
    )


@lru_cache(maxsize=256)
def taskset_of(scored: ScoredBy, *, trust: bool = False) -> Taskset[Any, Any]:
    """Return the taskset that scores a row's task. All names in it come from the row."""
    if scored.kind == "rule":
        return GivenTasks(default_scorer=Rule())
    origin = Origin.of_data("a row", trust or is_own_scorer(scored.text))
    with names_from(origin):
        if scored.kind == "environment":
            spec = locate_files(scored.value)
            environments.resolve(spec, origin)  # run its file now, before many threads ask for it at once
            return GivenTasks(spec, name="environment")
        try:
            node = msgspec.json.decode(scored.value, type=dict[str, Any])
        except msgspec.DecodeError:
            raise UsageError(
                f"a row names something that is not a scorer: {scored.value!r:.80}", remedy=FORMS
            ) from None
        taskset = _make_of_node(node, origin)
    for part in parts_of(taskset):
        if part.scorer is not None and part.scorer.calls_models:
            origin.refuse(f"calls a model that your builds did not name: {scored.value:.200}")
        if part.RUNS_CODE:
            origin.refuse(f"runs code or calls a server that your builds did not name: {scored.value:.200}")
    return taskset


def declared_contract(scorer: Any) -> Contract:
    """What the taskset that a row names declares for its episodes, besides what their environment declares."""
    scored = ScoredBy.read(scorer)
    return Contract() if scored is None or scored.kind != "taskset" else taskset_of(scored).CONTRACT


def environment_of(scored: ScoredBy) -> type:
    """Return the environment class that scores a row's task."""
    return environments.resolve(locate_files(scored.value), Origin.of_data("a row"))


def _make_of_node(node: dict[str, Any], origin: Origin) -> Taskset[Any, Any]:
    if node.keys() == {"scorer"}:
        read = read_scorer(fill_variables(node["scorer"], trust=origin.trusted), "the scorer of a row")
        if read.scores_groups:
            raise only_groups("its judge")
        return GivenTasks(scorer=read, default_scorer=Rule())
    check_tools(node, origin.trusted)
    custom = node.get("custom_cls")
    kept = isinstance(custom, Mapping) and str(custom.get("path", "")).startswith(SCHEME)
    node = fill_variables(locate_files(node), trust=origin.trusted or kept)
    return build_taskset(node, path="scorer", source="the scorer of a row")


def check_tools(node: Any, trust: bool = False) -> None:
    """Refuse tools with settings, which may name commands, files and URLs, and tools that are code, unless one of this
    user's builds wrote them or `trust` is set."""
    for tools in _find_tools(node):
        plain = isinstance(tools, list) and all(isinstance(name, str) and ":" not in name for name in tools)
        if not (plain or trusts(trust) or (code_folders()[0] / "tools" / digest(tools)).is_file()):
            raise UntrustedCode(f"a row names tools that your builds did not name: {tools!r:.80}", remedy=LOOK)


def _keep_tools(node: Any, cache_dir: Any) -> None:
    for tools, folder in product(_find_tools(node), code_folders(cache_dir)):
        with contextlib.suppress(OSError):
            (folder / "tools").mkdir(parents=True, exist_ok=True)
            (folder / "tools" / digest(tools)).touch()


def _find_tools(node: Any) -> Iterator[Any]:
    """Yield the values under `tools` in a node, at any depth."""
    if isinstance(node, Mapping):
        if node.get("tools"):
            yield node["tools"]
        for value in node.values():
            yield from _find_tools(value)
    elif isinstance(node, list):
        for item in node:
            yield from _find_tools(item)


def with_type(task: Task, taskset: Taskset[Any, Any]) -> Task:
    """Convert a row's task to the class that the taskset declares."""
    kind = taskset.task_type
    own = own_values(task)
    if kind is Task or not (own or own_fields(kind)):
        return task
    fields = {name: getattr(task, name) for name in Task.__struct_fields__}
    try:
        return msgspec.convert({**fields, **own}, kind)
    except msgspec.ValidationError as error:
        raise TasksetError(f"a row is not a {kind.__name__}: {error}") from None


def kind_of(taskset: Taskset[Any, Any], task: Task) -> tuple[Scorer, Task] | None:
    """Return the scorer kind that scores a task, and the task as the scorer knows it; None if code or an environment
    scores it."""
    taskset, task = owner_of(taskset, task)
    if (of_row := getattr(taskset, "scored_by", None)) is not None:
        scored: ScoredBy | None = of_row(task)
        return (taskset_of(scored).scorer or Rule(), task) if scored is not None and scored.by_scorer else None
    if task.env_class is not None or taskset.overrides("reward"):
        return None
    scorer = taskset.scorer_for(task)
    return None if scorer is None else (scorer, task)


def reading_of(taskset: Taskset[Any, Any], task: Task) -> tuple[AnswerFormat | None, Scorer | None, Task]:
    """The form in which a reply gives its answer, the scorer kind that reads it, and the task in the form that the
    scorer knows. None if nothing is declared."""
    taskset, task = owner_of(taskset, task)
    scorer, known = kind_of(taskset, task) or (None, task)
    try:
        return taskset.answer_format(task), scorer, known
    except TreetuneError:  # the scorer of the task is not known here
        return None, scorer, known


class ScoredEnvironment(Environment):
    """The environment of SkyRL rows that name none (`scored`): one answer, scored according to `extra_info.scorer`."""

    def __new__(cls, task: Task, **settings: Any) -> Any:
        # It does not wrap another environment, so rows are played in the same environment as in `eval`.
        extra = dict(task.extra_info)
        taskset = taskset_of(ScoredBy.read(extra.pop("scorer", None)) or BY_RULE)
        plain = msgspec.structs.replace(task, extra_info=extra)
        return taskset.environment(with_type(plain, taskset))

    @staticmethod
    def tools_for(task: Task) -> list[Tool | ToolSource]:
        """Return the tools of the taskset that scores the task, and those of the row."""
        taskset = taskset_of(ScoredBy.read(task.extra_info.get("scorer")) or BY_RULE)
        return row_tools(with_type(task, taskset), taskset)


def row_tools(task: Task, scorer: Taskset[Any, Any], *, trust: bool = False) -> list[Tool | ToolSource]:
    """Return what a model may call in a row's task: the tools of its taskset, and those that the row names. Code names
    are trusted under the same rules as those of environments."""
    found: list[Tool | ToolSource] = list(scorer.tools_for(msgspec.structs.replace(task, tools=[])))
    origin = Origin.of_data("a row", trust)
    found += [find_tool(NamedTool(locate_files(name)), task, origin) for name in task.tools]
    return found
