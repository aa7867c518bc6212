"""The config of an evaluation: the taskset, the model, the number of tasks and rollouts, sampling and limits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from treetune.config.aliases import suggest_key
from treetune.config.interpolation import conceal
from treetune.config.structs import convert, defaults_of, to_plain
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
    """The keys that evaluations and checks share."""

    taskset: dict[str, Any]
    """The taskset: `id` (or `custom_cls`) and its own keys."""
    num_tasks: Positive | None = None
    """How many tasks; absent: all of a finite taskset."""
    max_concurrent: Positive = 64
    """The most rollouts or checks that run at once."""
    pass_threshold: float = 1.0
    """The reward that counts as solved, unless the environment decides that. A gold answer must reach it."""


class EvalConfig(TasksConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """The model: `scripted:gold`, `local:PATH`, or a name that the endpoint serves."""
    tasks: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    """Only these tasks, by index: the position in load order, which `show` and traces display. Absent: the first
    `num_tasks` of the order."""
    num_rollouts: Positive = 1
    """The number of rollouts per task."""
    sampling: Sampling = Sampling()
    """Temperature, token limits and other sampling options."""
    limits: Limits = Limits()
    """The turn and time limits of one rollout."""
    endpoint: EndpointConfig = EndpointConfig()
    """Where the model is served."""
    max_judge_tokens: Positive | None = None
    """No rollout starts once the judges of this run have used this many tokens; running ones are finished."""
    max_tokens_total: Positive | None = None
    """The same limit for the tokens of the model and of the judges together."""


class ValidateConfig(TasksConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gold: bool = True
    """Run each task with its gold answer, too."""
    limits: Limits = Limits(timeout=600.0)
    """The turn and time limits of one gold rollout; the time limit also applies to `validate`."""


C = TypeVar("C", bound=TasksConfig)
KEYS = {*EvalConfig.__struct_fields__, *ValidateConfig.__struct_fields__}
"""The keys that a YAML file may have. One file serves every verb, and each verb reads its own keys."""


def read_taskset(target: str, overrides: Mapping[str, str], split: str | None = None) -> Taskset[Any, Any]:
    """Reads the taskset of a target, for verbs that read no other key. Refuses a key that no verb knows."""
    data = read_target(target, overrides, split)
    faults: Faults = unknown_keys(data)
    with gather_faults(faults):
        taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    if faults:
        raise ConfigError(faults, source=target)
    return taskset


def unknown_keys(data: Mapping[str, Any]) -> Faults:
    """The top-level keys of a file that no verb knows."""
    structs = {"sampling": Sampling, "limits": Limits, "endpoint": EndpointConfig}
    inside = [f"{name}.{key}" for name, struct in structs.items() for key in struct.__struct_fields__]
    unknown = [str(key) for key in data if key not in KEYS]
    known = [*KEYS, *inside, *keys_of(data.get("taskset"))] if unknown else []
    return [(key, f"{UNKNOWN_KEY}{suggest_key(key, known)}") for key in unknown]


def keys_of(node: Any) -> list[str]:
    """The dotted keys of the taskset that a node names; none if there is no such taskset."""
    with suppress(TreetuneError, TypeError):
        cls = taskset_class(expand_ready({"id": node} if isinstance(node, str) else node))
        if cls is not None:
            return [f"taskset.{key}" for key in cls.config_type.__struct_fields__ if key not in TasksetConfig.HIDDEN]
    return []


class Configured(msgspec.Struct, Generic[C]):
    """A config and the taskset it names."""

    config: C
    taskset: Taskset[Any, Any]

    def resolved(self) -> dict[str, Any]:
        """The config that reproduces this run, with every key spelled out. Values from the environment stay as they
        were written."""
        whole = {**to_plain(self.config), "taskset": describe(self.taskset, self.config.taskset)}
        plain: dict[str, Any] = conceal(whole)
        return plain

    def overridden(self) -> dict[str, Any]:
        """The values that differ from the defaults, by dotted path."""
        of_taskset = {**defaults_of(self.taskset.config_type), "extra": None}  # its keys stand next to the others
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
    """Builds a typed config and its taskset from plain values. One error names every fault, including those of the
    taskset. Pass `taskset`, or its class, if the node only describes it."""
    others = KEYS.difference(struct.__struct_fields__)  # keys that no verb knows stay, and are reported as faults
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
