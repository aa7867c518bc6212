"""The config of an evaluation: the taskset, the model, how many tasks and rollouts, sampling and limits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from treetune.config.aliases import suggest_key
from treetune.config.structs import convert, defaults_of, to_plain
from treetune.config.variables import conceal
from treetune.core.draws import TasksetConfig
from treetune.core.fingerprint import find_differences
from treetune.core.from_config import build_taskset, describe, expand_ready, taskset_class
from treetune.core.policy import Sampling
from treetune.core.taskset import Taskset
from treetune.errors import UNKNOWN_KEY, ConfigError, Faults, TreetuneError, gather_faults
from treetune.models import EndpointConfig
from treetune.play.episode import Limits
from treetune.tasksets.target import read_target

Positive = Annotated[int, msgspec.Meta(ge=1)]


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that evaluating and checking have in common."""

    taskset: dict[str, Any]
    """The taskset: `id` (or `custom_cls`) and its own keys."""
    num_tasks: Positive | None = None
    """How many tasks; absent: all of a finite taskset."""
    max_concurrent: Positive = 64
    """The most rollouts, or checks, under way at once."""
    pass_threshold: float = 1.0
    """The reward from which a rollout counts as solved, where the environment does not say so itself; a gold answer
    must reach it."""


class EvalConfig(TasksConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """The model: `scripted:gold`, `local:PATH`, or a name that the endpoint serves."""
    tasks: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    """Only these, by their index: the position in load order, which `show` and traces tell. Absent: the first
    `num_tasks` of the order."""
    num_rollouts: Positive = 1
    """How many times each task is tried."""
    sampling: Sampling = Sampling()
    """Temperature, token limits and the like."""
    limits: Limits = Limits()
    """Turns and seconds of one rollout."""
    endpoint: EndpointConfig = EndpointConfig()
    """Where the model is served."""
    max_judge_tokens: Positive | None = None
    """No rollout begins once the judges of this run have used so many tokens; those in progress are finished."""
    max_tokens_total: Positive | None = None
    """The same for the tokens of the model and of the judges together."""


class ValidateConfig(TasksConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gold: bool = True
    """Run each task with its gold answer too."""
    limits: Limits = Limits(timeout=600.0)
    """Turns and seconds of one gold rollout; the seconds hold for `validate` too."""


C = TypeVar("C", bound=TasksConfig)
KEYS = {*EvalConfig.__struct_fields__, *ValidateConfig.__struct_fields__}
"""The keys that a YAML file may have: one file serves every verb, and each verb reads its own keys."""


def read_taskset(target: str, overrides: Mapping[str, str], split: str | None = None) -> Taskset[Any, Any]:
    """The taskset of a target, for verbs that read no other key. Refuses a key that no verb knows."""
    data = read_target(target, overrides, split)
    faults: Faults = unknown_keys(data)
    with gather_faults(faults):
        taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    if faults:
        raise ConfigError(faults, source=target)
    return taskset


def unknown_keys(data: Mapping[str, Any]) -> Faults:
    """The keys at the top of a file that no verb knows."""
    structs = {"sampling": Sampling, "limits": Limits, "endpoint": EndpointConfig}
    inside = [f"{name}.{key}" for name, struct in structs.items() for key in struct.__struct_fields__]
    unknown = [str(key) for key in data if key not in KEYS]
    known = [*KEYS, *inside, *keys_of(data.get("taskset"))] if unknown else []
    return [(key, f"{UNKNOWN_KEY}{suggest_key(key, known)}") for key in unknown]


def keys_of(node: Any) -> list[str]:
    """The keys of the taskset that a node names, dotted; none where there is no such taskset."""
    with suppress(TreetuneError, TypeError):
        cls = taskset_class(expand_ready({"id": node} if isinstance(node, str) else node))
        if cls is not None:
            return [f"taskset.{key}" for key in cls.config_type.__struct_fields__ if key not in TasksetConfig.HIDDEN]
    return []


class Configured(msgspec.Struct, Generic[C]):
    """A config with the taskset it names."""

    config: C
    taskset: Taskset[Any, Any]

    def resolved(self) -> dict[str, Any]:
        """The config that runs this again, every key spelled out; what came from the environment as it was written."""
        whole = {**to_plain(self.config), "taskset": describe(self.taskset, self.config.taskset)}
        plain: dict[str, Any] = conceal(whole)
        return plain

    def overridden(self) -> dict[str, Any]:
        """The values that differ from the defaults, by dotted path."""
        of_taskset = {**defaults_of(self.taskset.config_type), "extra": None}  # its keys stand beside the others
        defaults = {**defaults_of(type(self.config)), "taskset": of_taskset}
        return {path: value for path, _, value in find_differences(defaults, self.resolved())}


Evaluation = Configured[EvalConfig]
Validation = Configured[ValidateConfig]


def read_config(
    data: Mapping[str, Any],
    struct: type[C],
    raw: Mapping[str, str] = {},
    source: str = "config",
    taskset: Taskset[Any, Any] | type[Taskset[Any, Any]] | None = None,
) -> Configured[C]:
    """A typed config with its taskset from plain values; one error names every fault, the taskset's included. The
    `taskset`, or its class, is given where the node only describes it."""
    others = KEYS.difference(struct.__struct_fields__)  # keys that no verb knows stay, to be found at fault
    own = {key: value for key, value in data.items() if key not in others}
    faults: Faults = []
    with gather_faults(faults):
        is_known = set(own) <= set(struct.__struct_fields__)
        config = convert(own, struct, raw=raw, elsewhere=() if is_known else keys_of(data.get("taskset")))
    with gather_faults(faults):
        cls = taskset if isinstance(taskset, type) else None
        made = partial(build_taskset, data.get("taskset"), raw=raw, source=source, cls=cls)
        built = taskset if isinstance(taskset, Taskset) else made()
    if faults:
        raise ConfigError(faults, source=source)
    return Configured(config, built)
