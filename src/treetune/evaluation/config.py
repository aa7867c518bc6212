"""The config of an evaluation (taskset, model, how many, sampling, limits), and whether the config of a run folder may
be used, because it determines what runs, and anyone may have written it.

    read_config(data, EvalConfig).taskset
    remember(Path("runs/x"))                  # `eval`: its config is this user's
    take_up(Path("runs/x"), trust=False)      # `eval --resume`: raises if it is not, and would call a model

Whatever a config names is checked where it is read and loaded (`config/trust.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from treetune.config.aliases import suggest_key
from treetune.config.code_reference import find_file, find_reference
from treetune.config.interpolation import conceal
from treetune.config.structs import convert, defaults_of, load_yaml, to_plain
from treetune.config.trust import (
    CONFIG,
    Origin,
    is_own_config,
    is_run_config,
    origin_of,
    own_names,
    refusal,
    remember_config,
    remember_names,
)
from treetune.core.contract import Limits
from treetune.core.fingerprint import find_differences
from treetune.core.from_config import build_taskset, expand_ready, node_of, taskset_class
from treetune.core.mixture import owner_of
from treetune.core.policy import Sampling
from treetune.core.task import Task, own_values
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import UNKNOWN_KEY, ConfigError, Faults, TreetuneError, gather_faults
from treetune.models import EndpointConfig, check_script, endpoint_of, is_behind_endpoint
from treetune.tasksets.target import read_target

Positive = Annotated[int, msgspec.Meta(ge=1)]


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that evaluations and checks share."""

    taskset: dict[str, Any]
    """The taskset: `id` (or `custom_cls`) and its own keys."""
    num_tasks: Positive | None = None
    """How many tasks; absent: all of a finite taskset."""
    max_concurrent: Positive = 64
    """The maximum number of rollouts or checks that run at once."""
    pass_threshold: float = 1.0
    """The reward that counts as solved, unless the environment decides that. A gold answer must reach it."""


class EvalConfig(TasksConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """The model: `scripted:gold`, `local:PATH`, or a name that the endpoint serves."""
    agent: str | dict[str, Any] | None = None
    """A program that plays each task and calls the model itself: a known agent, a Python file, a command line, or its
    settings: command, sandbox, answer, env, limits."""
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
"""The keys that a YAML file may have. One file works for every verb, and each verb reads its own keys."""


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
        whole = {**to_plain(self.config), "taskset": node_of(self.taskset, self.config.taskset)}
        plain: dict[str, Any] = conceal(whole)
        return plain

    def overridden(self) -> dict[str, Any]:
        """The values that differ from the defaults, by dotted path."""
        of_taskset = {**defaults_of(self.taskset.config_type), "extra": None}  # its keys are next to the others
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


# The config of a run folder


def remember(run: Path) -> None:
    """Marks the config of a run folder as this user's. If the cache cannot be written, `--trust` is needed later."""
    remember_config(load_yaml(run / CONFIG))


class TaskCode:
    """Trusts the code that recorded tasks of a run name. A config of this user does not make the traces theirs: only
    code that tasks of this user have named is trusted."""

    def __init__(self, run: Path, trust: bool = False) -> None:
        from treetune.runs.run import load_config  # loads numpy

        self._config = load_config(run)
        self._what = f"a task of {run}"
        self._trust = trust
        self.own = bool(self._config) and is_own_config(self._config)
        """Whether this user's `eval` wrote the config."""
        self._known = own_names(self._config) if self.own else set()

    def origin_of(self, task: Task) -> Origin:
        return Origin.of_data(self._what, self._trust or (self.own and _names_in(task) <= self._known))

    def remember(self, taskset: Taskset[Any, Any], task: Task) -> None:
        """Trusts the code that a just played task names, if this user chose the taskset."""
        if not (new := _names_in(task) - self._known):
            return
        self._known |= new
        if self.own and owner_of(taskset, task)[0].tasks_origin.trusted:
            remember_names(self._config, new)


def _names_in(task: Task) -> set[str]:
    fields = [value for value in own_values(task).values() if isinstance(value, str) and _is_code(value)]
    return {name for name in (task.env_class, *task.tools) if name is not None and ":" in name}.union(fields)


def _is_code(text: str) -> bool:
    return find_file(text) is not None or find_reference(text) is not None


def take_up(run: Path, trust: bool) -> tuple[str, dict[str, str]]:
    """Returns the TARGET for resuming a run folder, and its overrides."""
    target = str(run / CONFIG)
    if not is_run_config(target):
        from treetune.runs.run import no_run

        raise no_run(run, own=True)
    refuse_foreign_model(target, trust)
    return target, ({"taskset.trust": "true"} if trust else {})


def refuse_foreign_model(target: str, trust: bool = False) -> None:
    """Raises if the model of someone else's run would be downloaded or started, would be called at an unusual address,
    or is code. Any other TARGET is the user's."""
    if not is_run_config(target):
        return
    data: dict[str, Any] = load_yaml(target)
    origin, run = origin_of(target, data, trust), Path(target).parent
    if origin.trusted:
        return
    if data.get("agent"):
        raise refusal(run, f"would run a program: {data['agent']}")
    model = str(data.get("model", ""))
    kind, _, named = model.partition(":")
    if kind == "vllm" or (kind == "local" and not Path(named).expanduser().exists()):
        raise refusal(run, f"would download or start a model: {model}")
    check_script(model, origin)
    if is_behind_endpoint(model):
        _, endpoint = endpoint_of(model, convert(data.get("endpoint"), EndpointConfig, path="endpoint"))
        if (endpoint.base_url, endpoint.api_key_env) != (EndpointConfig().base_url, None):
            raise refusal(run, f"would call a server: {endpoint.base_url}")
