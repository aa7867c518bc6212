"""skyrl-gym's environments as Treetune ones: `env_class: skyrl:NAME`.

    treetune eval tasks.yaml -m MODEL      # where the tasks have env_class: skyrl:gsm8k

NAME is an id that skyrl-gym knows, or `module:Class` or `file.py:Class` of any `skyrl_gym.Env`. The environment is made
from the row that SkyRL would read, so ground truths are in the form that it expects. Its `env_config` has the values of
`extra_info.env_config`; `search_url` and `db_path` also come from TREETUNE_SEARCH_URL and TREETUNE_TEXT2SQL_DB.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from treetune.chat.message import Message
from treetune.config.code_reference import parse_reference
from treetune.config.plugins import environments, load_object
from treetune.config.trust import USER, Origin
from treetune.config.variables import escape_texts
from treetune.core.environment import Action, Environment, Step
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.data.rows.formats import FORMATS
from treetune.errors import MissingExtraError, PluginError, UnknownNameError
from treetune.tasksets.search import URL_VARIABLE
from treetune.tasksets.text2sql import FOLDER_VARIABLE

_VARIABLES = {"search_url": URL_VARIABLE, "db_path": FOLDER_VARIABLE}
"""Keys of skyrl-gym's configs that our environments of the same name take from the process's environment."""

ADAPTER = "treetune.trainers.skyrl.environment:TreetuneTextEnv"
"""The entry point of each environment of ours."""

_theirs: dict[str, Any] = {}
"""skyrl-gym's entries whose place ours have taken."""


def find_theirs(id: str) -> Any:
    """skyrl-gym's own entry of an id, though ours may have its place; None where it has none."""
    entry = registry().get(id)
    return _theirs.get(id) if entry is not None and is_ours(entry) else entry


def registry() -> dict[str, Any]:
    """skyrl-gym's own, by id."""
    try:
        from skyrl_gym.envs import registration
    except ImportError as error:
        raise MissingExtraError.of("skyrl-gym", "skyrl") from error
    known: dict[str, Any] = registration.registry
    return known


def is_ours(entry: Any) -> bool:
    return bool(entry.entry_point == ADAPTER)


def put_entry(entry: Any) -> None:
    known = registry()
    if entry.id in known and not is_ours(known[entry.id]):
        _theirs[entry.id] = known[entry.id]
    known[entry.id] = entry


class SkyRLGymEnvironment(Environment):
    """One episode of a skyrl-gym environment. Its methods are plain functions, so they run in threads."""

    NAME: ClassVar[str] = ""
    ORIGIN: ClassVar[Origin] = USER
    GYM_CLASS: ClassVar[type | None] = None
    """The class, where it is given itself and not its name."""

    @classmethod
    def gold(cls, task: Task) -> str | list[str] | None:
        """What our environment of the same name says."""
        if cls.NAME not in environments.names():
            return None
        ours: type[Environment] = environments.resolve(cls.NAME, cls.ORIGIN)
        return ours.gold(task)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        gym_class, settings = class_of(self.NAME, self.ORIGIN) if self.GYM_CLASS is None else (self.GYM_CLASS, {})
        config = _make_config(gym_class, task.extra_info.get("env_config") or {})
        self._env = gym_class(**{**settings, "env_config": config, "extras": extras_of(task, self.NAME)})

    def start(self) -> list[Message]:
        messages, _ = self._env.init(copy.deepcopy(self.task.messages))
        return list(messages)

    def step(self, action: Action) -> Step:
        output = self._env.step(action.text)
        info = dict(output.get("metadata") or {})
        if output.get("postprocessed_action") is not None:
            info["postprocessed_action"] = output["postprocessed_action"]
        metrics: Mapping[str, Any] = getattr(self._env, "get_metrics", dict)() if output["done"] else {}
        if numbers := {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}:
            info["metrics"] = numbers
        return Step(
            list(output["observations"] or []),
            reward=finite(output["reward"], "reward"),
            done=bool(output["done"]),
            info=msgspec.to_builtins(info, enc_hook=repr),
        )

    def close(self) -> None:
        self._env.close()


def adapt_class(gym_class: type) -> type[Environment]:
    """The Treetune environment that plays a class of skyrl-gym's; a class that is none of its environments as it is."""
    from skyrl_gym import Env

    if issubclass(gym_class, Environment) or not issubclass(gym_class, Env):
        return gym_class
    name = gym_class.__name__
    return type(name, (SkyRLGymEnvironment,), {"NAME": name, "GYM_CLASS": gym_class, "__doc__": gym_class.__doc__})


@lru_cache(maxsize=256)
def environment_class(name: str, origin: Origin) -> type[SkyRLGymEnvironment]:
    """The Treetune environment that plays a skyrl-gym one."""
    class_of(name, origin)  # raises where the name is wrong
    members = {"NAME": name, "ORIGIN": origin, "__doc__": f"skyrl-gym's {name}."}
    return type(f"skyrl:{name}", (SkyRLGymEnvironment,), members)


def extras_of(task: Task, name: str) -> dict[str, Any]:
    """The row of a task as SkyRL hands it to its environments."""
    row = FORMATS["skyrl"].row_of(msgspec.structs.replace(task, env_class=name))
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    extras["extra_info"] = {**extras["extra_info"], "uid": task.uid}
    if (turns := task.extra_info.get("max_turns")) is not None:
        extras["max_turns"] = turns
    return extras


def class_of(name: str, origin: Origin) -> tuple[Any, dict[str, Any]]:
    """The class that skyrl-gym would make, and the arguments it is registered with."""
    try:
        from skyrl_gym import Env
        from skyrl_gym.envs.registration import registry
    except ImportError as error:
        raise MissingExtraError.of("skyrl-gym", "skyrl") from error
    spec = find_theirs(name)
    if spec is None and ":" not in name:
        raise UnknownNameError.of(
            "skyrl-gym environment", name, registry, remedy="one that is not registered is skyrl:module:Class"
        )
    if spec is None:
        found, settings = load_object(parse_reference(name), origin), {}
    else:  # what was registered in this process is the user's
        entry, settings = spec.entry_point, copy.deepcopy(spec.kwargs)
        found = entry if callable(entry) else load_object(parse_reference(entry), USER)
    if isinstance(found, type) and not issubclass(found, Env):
        raise PluginError(f"{name} is no skyrl_gym.Env", remedy="a Treetune environment is named without skyrl:")
    return found, settings


def _make_config(gym_class: Any, given: Mapping[str, Any]) -> Any:
    """What SkyRL's config would have for it: the dataclass that its `env_config` is annotated with, else a mapping
    whose keys are attributes too."""
    from omegaconf import OmegaConf

    for cls in _annotated_types(gym_class):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            fields = {field.name for field in dataclasses.fields(cls)}
            named = {key: os.environ.get(variable) for key, variable in _VARIABLES.items() if key in fields}
            return cls(**{**{key: value for key, value in named.items() if value}, **given})
    return OmegaConf.create(escape_texts(given))  # a row must not read variables


def _annotated_types(gym_class: Any) -> tuple[Any, ...]:
    function: Any = getattr(gym_class, "__init__") if isinstance(gym_class, type) else gym_class  # noqa: B009
    try:
        hint = typing.get_type_hints(function)["env_config"]
    except (KeyError, NameError, TypeError):
        return ()
    return typing.get_args(hint) or (hint,)
