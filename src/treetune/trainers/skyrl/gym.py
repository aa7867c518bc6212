"""skyrl-gym's registry in both directions: its environments in Treetune, and Treetune's environments in it.

    treetune eval tasks.yaml -m MODEL              # if the tasks have env_class: skyrl:gsm8k

NAME in `skyrl:NAME` is an id that skyrl-gym knows, or `module:Class` or `file.py:Class` of any `skyrl_gym.Env`. The
environment is built from the row that SkyRL would read, so ground truths have the form that it expects. Its
`env_config` holds the values of `extra_info.env_config`; `search_url` and `db_path` can also come from the variables
TREETUNE_SEARCH_URL and TREETUNE_TEXT2SQL_DB.

    register()                                     # all that have an id
    register("my_env.py:MyEnv", id="my_env")       # one of your own

A registry belongs to one process: call `register` where SkyRL creates environments, inside its entry-point task.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import py_compile
import sysconfig
import typing
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from treetune.chat.message import Message
from treetune.config.code_reference import parse_reference
from treetune.config.interpolation import escape_texts
from treetune.config.plugins import absolute_spec, environments, load_object
from treetune.config.trust import USER, Origin
from treetune.core.environment import Action, Environment, Step
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.data.rows.formats import FORMATS
from treetune.errors import MissingExtraError, PluginError, StorageError, UnknownNameError, UsageError
from treetune.system.folders import write_atomically
from treetune.tasksets.search import URL_VARIABLE
from treetune.tasksets.text2sql import FOLDER_VARIABLE

_VARIABLES = {"search_url": URL_VARIABLE, "db_path": FOLDER_VARIABLE}
"""Keys of skyrl-gym's configs, with the variables from which Treetune's environments of the same name read them."""

ADAPTER = "treetune.trainers.skyrl.environment:TreetuneTextEnv"
"""The registry entry point of every Treetune environment."""

_theirs: dict[str, Any] = {}
"""skyrl-gym's entries that Treetune's replaced."""


def find_theirs(id: str) -> Any:
    """Return skyrl-gym's own entry for an id, even if Treetune's replaced it; None if it has none."""
    entry = registry().get(id)
    return _theirs.get(id) if entry is not None and is_ours(entry) else entry


def registry() -> dict[str, Any]:
    """skyrl-gym's registry, by id."""
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
    """The class, if given directly and not by name."""

    @classmethod
    def gold(cls, task: Task) -> str | list[str] | None:
        """Return the gold answer of Treetune's environment of the same name."""
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
    """Return the Treetune environment that plays a skyrl-gym class. Any other class is returned unchanged."""
    from skyrl_gym import Env

    if issubclass(gym_class, Environment) or not issubclass(gym_class, Env):
        return gym_class
    name = gym_class.__name__
    return type(name, (SkyRLGymEnvironment,), {"NAME": name, "GYM_CLASS": gym_class, "__doc__": gym_class.__doc__})


@lru_cache(maxsize=256)
def environment_class(name: str, origin: Origin) -> type[SkyRLGymEnvironment]:
    """Return the Treetune environment that plays a skyrl-gym environment."""
    class_of(name, origin)  # raises if the name is wrong
    members = {"NAME": name, "ORIGIN": origin, "__doc__": f"skyrl-gym's {name}."}
    return type(f"skyrl:{name}", (SkyRLGymEnvironment,), members)


def extras_of(task: Task, name: str) -> dict[str, Any]:
    """Return a task's row as SkyRL passes it to its environments."""
    row = FORMATS["skyrl"].row_of(msgspec.structs.replace(task, env_class=name))
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    extras["extra_info"] = {**extras["extra_info"], "uid": task.uid}
    if (turns := task.extra_info.get("max_turns")) is not None:
        extras["max_turns"] = turns
    return extras


def class_of(name: str, origin: Origin) -> tuple[Any, dict[str, Any]]:
    """Return the class that skyrl-gym would create, and the arguments it is registered with."""
    known, spec = registry(), find_theirs(name)
    from skyrl_gym import Env

    if spec is None and ":" not in name:
        raise UnknownNameError.of(
            "skyrl-gym environment",
            name,
            known,
            remedy="an environment that is not registered is named skyrl:module:Class",
        )
    if spec is None:
        found, settings = load_object(parse_reference(name), origin), {}
    else:  # what was registered in this process belongs to the user
        entry, settings = spec.entry_point, copy.deepcopy(spec.kwargs)
        found = entry if callable(entry) else load_object(parse_reference(entry), USER)
    if isinstance(found, type) and not issubclass(found, Env):
        raise PluginError(f"{name} is not a skyrl_gym.Env", remedy="a Treetune environment is named without skyrl:")
    return found, settings


def _make_config(gym_class: Any, given: Mapping[str, Any]) -> Any:
    """Build the config that SkyRL would pass: the dataclass in the annotation of `env_config`, else a mapping whose
    keys are also attributes."""
    from omegaconf import OmegaConf

    for cls in _annotated_types(gym_class):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            fields = {field.name for field in dataclasses.fields(cls)}
            named = {key: os.environ.get(variable) for key, variable in _VARIABLES.items() if key in fields}
            return cls(**{**{key: value for key, value in named.items() if value}, **given})
    return OmegaConf.create(escape_texts(given))  # a row must not read environment variables


def _annotated_types(gym_class: Any) -> tuple[Any, ...]:
    function: Any = getattr(gym_class, "__init__") if isinstance(gym_class, type) else gym_class  # noqa: B009
    try:
        hint = typing.get_type_hints(function)["env_config"]
    except (KeyError, NameError, TypeError):
        return ()
    return typing.get_args(hint) or (hint,)


def register(
    environment: str | type[Environment] | None = None, *, id: str | None = None, replace: bool = False
) -> list[str]:
    """Register Treetune's environments with skyrl-gym in this process; return their ids.

    Without a name, register all that have an id; otherwise the named one: `file.py:Class`, `module:Class`, `skyrl:NAME`
    or a class. If skyrl-gym has an environment with the same id, it is kept unless `replace` is set.
    """
    known = registry()
    if environment is None:
        if id is not None:
            raise UsageError(
                f"{id!r} is not the id of an environment", remedy="register('my_env.py:MyEnv', id='my_env')"
            )
        for name, origin in environments.names().items():
            if replace or name not in known or is_ours(known[name]):
                # The entry may be sent to a worker that does not know this process's ids.
                put_entry(_make_entry(name, environments.resolve(name, USER) if origin == "registered" else name))
        return [name for name in environments.names() if is_ours(known[name])]
    if isinstance(environment, str):
        id, environment = id or environment, absolute_spec(environment, [Path.cwd()])
    # A wrong name must fail now, not when the model is loaded.
    cls = environments.resolve(environment, USER) if isinstance(environment, str) else environment
    id = id or cls.__name__
    if not issubclass(cls, Environment):
        raise PluginError(
            f"{id} is not a Treetune environment",
            remedy="subclass treetune.Environment; register skyrl-gym's own environments with skyrl_gym.register",
        )
    entry = _make_entry(id, environment)
    if not replace and known.get(id, entry) != entry:
        raise UsageError(
            f"skyrl-gym has another environment {id!r} already", remedy="choose another id, or pass replace=True"
        )
    put_entry(entry)
    return [id]


def _make_entry(id: str, named: str | type[Environment]) -> Any:
    from skyrl_gym.envs.registration import EnvSpec

    if isinstance(named, str) and named.startswith("skyrl:"):
        gym_class, settings = class_of(named.removeprefix("skyrl:"), USER)
        return EnvSpec(id=id, entry_point=gym_class, kwargs=settings)
    if isinstance(named, type) and (gym_class := getattr(named, "GYM_CLASS", None)) is not None:
        return EnvSpec(id=id, entry_point=gym_class, kwargs={})
    return EnvSpec(id=id, entry_point=ADAPTER, kwargs={"id": id, "environment": named})


# Registration without a call: a `.pth` file makes every Python of an installation register when it imports skyrl_gym.
# Until then, it adds a fraction of a millisecond to each start of Python.

_MODULE = "_treetune_skyrl"
_SWITCH = "treetune_skyrl.pth"


def install_hook(
    named: Mapping[str, str] | None = None, *, replace: bool = False, folder: str | Path | None = None
) -> Path:
    """Register Treetune's environments, and those of `named` (by id: `file.py:Class` or `module:Class`), with skyrl-gym
    in every Python of this installation, or of the one whose packages are in `folder`. Returns the path of the `.pth`
    file.
    """
    specs = {id: absolute_spec(spec, [Path.cwd()]) for id, spec in (named or {}).items()}
    for spec in specs.values():
        environments.resolve(spec, USER)  # a wrong name must fail now, not in a worker
    place = _place(folder)
    # ASCII, because Python reads a .pth file in the user's encoding.
    call = f"import {_MODULE}; {_MODULE}.register_on_import({specs!a}, {replace})\n"
    module = place / f"{_MODULE}.py"
    _write(module, Path(__file__).with_name("startup.py").read_text())
    py_compile.compile(str(module), quiet=2)  # now, because not every Python may or can compile it later
    _write(place / _SWITCH, call)
    return place / _SWITCH


def remove_hook(*, folder: str | Path | None = None) -> bool:
    """Remove the hook; return whether there was one."""
    place, found = _place(folder), False
    module = place / f"{_MODULE}.py"
    for path in (place / _SWITCH, module, Path(cache_from_source(module))):  # in this order: each needs the next
        try:
            found = found or path.exists()
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {error.strerror}") from error
    return found


def _place(folder: str | Path | None) -> Path:
    return Path(folder).expanduser() if folder is not None else Path(sysconfig.get_path("purelib"))


def _write(path: Path, text: str) -> None:
    """Write in one step: a Python may start at any moment."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}",
            remedy="use a virtual environment of your own, or folder=site.getusersitepackages()",
        ) from error
