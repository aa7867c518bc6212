"""How a row is scored from itself alone, in any process: by its `scorer`.

    scorer_for(taskset, task)       # "rule", "env:gsm8k", or the taskset as JSON: {"id":"my_tasks:Colours","level":2}
    taskset_of(scorer)              # what scores the row's task, made once per process
    with_type(task, taskset)        # the row's task as the taskset knows it

Files that a scorer names are those of `treetune.rows.kept_code`: code of rows from elsewhere is not run unless trusted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from treetune.config import to_plain
from treetune.environment import Environment, SingleTurn
from treetune.errors import TasksetError, UsageError
from treetune.mixture import owner_of
from treetune.plugins import Registry, environments, tasksets
from treetune.rows.kept_code import check_module, keep_files, locate_files, spec_of
from treetune.rows.rule import RULE, RuleTaskset
from treetune.target import build_taskset
from treetune.task import Task, own_fields, own_values
from treetune.taskset import ByEnvironment, Taskset

ENVIRONMENT = "env:"

_ONLY_BUILD = ("filter", "pass_rates", "tokenizer", "shuffle")
"""Keys of a taskset that decide which tasks there are, not what they earn."""


def scorer_for(taskset: Taskset[Any, Any], task: Task) -> str | None:
    """The scorer of a task of this taskset; None where nothing can score it from its row."""
    taskset, task = owner_of(taskset, task)
    if (said := getattr(taskset, "scorer_of", None)) is not None:  # rows say it themselves
        scorer: str | None = said(task)
        return scorer
    plain = type(taskset).reward is RuleTaskset.reward
    alone = task.env_class is None and taskset.overrides("reward") and not plain
    if alone or taskset.overrides("environment") or own_fields(type(task)):
        return describe_taskset(taskset)
    if task.env_class is not None:
        return scorer_of_environment(taskset.environment_spec(task.env_class))
    return RULE if plain and task.ground_truth is not None else None


def scorer_of_environment(env_class: str) -> str:
    return ENVIRONMENT + str(keep_files(env_class))


def describe_taskset(taskset: Taskset[Any, Any], cache_dir: Any = None) -> str:
    """A taskset as JSON, from which any process that has its class makes it again."""
    config = to_plain(taskset.config)
    further = config.pop("extra", {})
    keys = {key: value for key, value in {**config, **further}.items() if value is not None and key not in _ONLY_BUILD}
    place, _, name = spec_of(type(taskset), cache_dir).rpartition(":")
    head: dict[str, Any] = {"custom_cls": {"path": place if place.endswith(".py") else f"pkg://{place}", "name": name}}
    return msgspec.json.encode({**head, **keep_files(keys, cache_dir)}).decode()


def refuse_groups(taskset: Taskset[Any, Any], task: Task) -> str | None:
    """What is lost where a taskset scores several answers together; refused where nothing would be left."""
    taskset, task = owner_of(taskset, task)
    if not taskset.scores_group_of(task):
        return None
    if task.env_class is None and not taskset.overrides("reward") and not taskset.overrides("environment"):
        raise UsageError(
            f"{taskset.name} only scores groups, and a row is scored alone",
            remedy="write reward(task, answer) too, or train from `treetune serve`, which scores groups",
        )
    return f"{taskset.name}.score_group() is not called for rows: trainers score each answer alone"


SEVERAL_TURNS = "train tasks of several turns with SkyRL, AReaL or TRL, or from `treetune serve`"


def refuse_several_turns(taskset: Taskset[Any, Any], task: Task) -> None:
    """verl's reward functions are given one answer. An environment that does not say how long its episodes are is found
    out when it is played."""
    taskset, task = owner_of(taskset, task)
    own = taskset.overrides("environment") and not hasattr(taskset, "scorer_of")
    if task.env_class is None or own or task.extra_info.get("max_turns") == 1:
        return
    spec = taskset.environment_spec(task.env_class)
    cls: Any = environments.resolve(locate_files(spec, trust=getattr(taskset.config, "trust", True)))
    if has_several_turns(cls):
        raise UsageError(f"{task.env_class} has episodes of several turns, and verl plays one", remedy=SEVERAL_TURNS)


def has_several_turns(environment: Any) -> bool:
    """Whether an environment says that its episodes have several turns."""
    contract = getattr(environment, "CONTRACT", None)
    return bool(getattr(environment, "MULTI_TURN", False)) or (contract is not None and contract.max_turns > 1)


@lru_cache(maxsize=256)
def taskset_of(scorer: str, *, trust: bool = False) -> Taskset[Any, Any]:
    """The taskset that scores a row's task."""
    if scorer == RULE:
        return _ByRule()
    if scorer.startswith(ENVIRONMENT):
        spec = locate_files(scorer.removeprefix(ENVIRONMENT), trust=trust)
        _check_module(spec, environments, trust)
        environments.resolve(spec)  # its file runs now, before many threads ask for it at once
        return ByEnvironment(spec, name="environment")
    try:
        node = msgspec.json.decode(scorer)
    except msgspec.DecodeError:
        raise UsageError(
            f"a row names a scorer that is none: {scorer!r:.80}", remedy="it is rule, env:NAME, or a taskset as JSON"
        ) from None
    if not isinstance(node, dict):
        raise UsageError(f"a row names a scorer that is none: {scorer!r:.80}")
    _check_module(str(node.get("id", "")), tasksets, trust)
    path = str((node.get("custom_cls") or {}).get("path", ""))
    if path.startswith("pkg://"):
        check_module(path.removeprefix("pkg://"), trust=trust)
    return build_taskset(locate_files(node, trust=trust), path="scorer", source="the scorer of a row")


def _check_module(spec: str, registry: Registry, trust: bool) -> None:
    """A module that a name stands for must be trusted; files are checked where they are located."""
    place, _, _ = spec.rpartition(":")
    if place and not place.endswith(".py") and spec not in registry.names() and place not in registry.foreign:
        check_module(place, trust=trust)


def with_type(task: Task, taskset: Taskset[Any, Any]) -> Task:
    """A row's task as the class that the taskset declares."""
    kind = taskset.task_type
    own = own_values(task)
    if kind is Task or not (own or own_fields(kind)):
        return task
    fields = {name: getattr(task, name) for name in Task.__struct_fields__}
    try:
        return msgspec.convert({**fields, **own}, kind)
    except msgspec.ValidationError as error:
        raise TasksetError(f"a row is no {kind.__name__}: {error}") from None


class ScoredEnvironment(Environment):
    """The environment of SkyRL's rows that name none (`scored`): one answer, scored as `extra_info.scorer` says."""

    def __new__(cls, task: Task, **settings: Any) -> Any:
        # Not an environment around another: what is played is the one that eval plays.
        extra = dict(task.extra_info)
        taskset = taskset_of(extra.pop("scorer", RULE))
        plain = msgspec.structs.replace(task, extra_info=extra)
        return taskset.environment(with_type(plain, taskset))


class _ByRule(RuleTaskset):
    """Scores rows that have no taskset of their own."""

    def load_tasks(self) -> list[Task]:
        return []

    def environment(self, task: Task) -> Environment:
        return SingleTurn(task, self)

    def reward(self, task: Task, answer: str) -> Any:
        if task.ground_truth is None:
            raise TasksetError(f"a row of data_source {task.data_source!r} has no ground truth to compare with")
        return super().reward(task, answer)
