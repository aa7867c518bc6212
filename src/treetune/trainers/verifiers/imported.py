"""Environments of verifiers as TARGETs: `verifiers:ID`, where ID is verifiers' name for an installed environment.

    treetune eval verifiers:my-env -n 20 -m MODEL --taskset.level 2
    treetune build verifiers:my-env --format verl

A v1 taskset whose rewards need only the answer is scored here. All others, and every v0 environment, are played by
verifiers itself, with the policy as its model: their rewards need a runtime, tools or several turns.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Self

import msgspec

from treetune.config.code_reference import CodeKind, CodeReference
from treetune.config.plugins import load_module, see_current_folder
from treetune.config.structs import convert
from treetune.config.trust import USER, Origin
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import MissingExtraError, PluginError, UsageError, format_error


class VerifiersTask(Task, frozen=True, kw_only=True):
    data: dict[str, Any] = {}
    """The task's data in verifiers' form."""


class VerifiersConfig(TasksetConfig, frozen=True, kw_only=True):
    args: dict[str, Any] = {}
    """Arguments of the environment. Arguments whose names are not Treetune keys may also be given directly next to
    it."""
    gold: str | None = None
    """The field of a task's data that holds a right answer, if there is one."""


class VerifiersTaskset(Taskset[VerifiersTask, VerifiersConfig]):
    """An environment of verifiers."""

    ENV: ClassVar[str] = ""
    FOREIGN: ClassVar[str] = ""
    """Its TARGET: `verifiers:ENV`."""
    ARGUMENTS: ClassVar[frozenset[str]] = frozenset()
    """Those of its arguments that are keys of its config."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.name = self.ENV

    @classmethod
    def for_environment(
        cls, env: str, name: str, config: type[VerifiersConfig], arguments: Mapping[str, Any], doc: str, **members: Any
    ) -> type[Self]:
        """Create the class for one environment. Its config has a key for each argument whose name is free, with the
        given values as defaults."""
        taken = config.__struct_fields__
        free = [key for key in arguments if key not in taken and key.isidentifier() and key[0] != "_"]
        plain = {key: value if isinstance(value := arguments[key], str | int | float) else None for key in free}
        fields = [(key, Any, default) for key, default in plain.items()]
        made = msgspec.defstruct(config.__name__, fields, bases=(config,), frozen=True, kw_only=True)
        members |= {"ENV": env, "FOREIGN": f"verifiers:{env}", "ARGUMENTS": frozenset(free), "config_type": made}
        return type(name, (cls,), {**members, "__doc__": doc})

    def arguments(self) -> dict[str, Any]:
        """The arguments that the environment is created with."""
        given = {name: getattr(self.config, name) for name in self.ARGUMENTS}
        return {**{name: value for name, value in given.items() if value is not None}, **self.config.args}

    def gold(self, task: VerifiersTask) -> str | None:
        value = task.data.get(self.config.gold) if self.config.gold is not None else None
        if self.config.gold is not None and value is None:
            raise UsageError(f"the data of task {task.idx} has no {self.config.gold!r}", remedy="correct taskset.gold")
        return None if value is None else str(value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Each process creates the class from its name.
        return _rebuild, (self.ENV, msgspec.to_builtins(self.config), self.name, self._length)


def _rebuild(env: str, config: dict[str, Any], name: str, length: int | None) -> VerifiersTaskset:
    cls = taskset_class(env, USER)  # the process that pickled it has loaded it
    taskset = cls.from_config(convert(config, cls.config_type))
    taskset.name, taskset._length = name, length
    return taskset


@lru_cache(maxsize=256)
def taskset_class(env: str, origin: Origin) -> type[VerifiersTaskset]:
    """Return the taskset for `verifiers:ENV`."""
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise MissingExtraError.of("verifiers", "verifiers") from error
    if not env:
        raise UsageError("verifiers: does not name an environment", remedy="write verifiers:ID, with an installed ID")
    module = _import(env, origin)
    if hasattr(module, "load_environment"):
        if not hasattr(verifiers, "load_environment"):
            raise PluginError(
                f"{env} is an environment of verifiers v0 (load_environment), which verifiers "
                f"{verifiers.__version__} has not",
                remedy="pip install 'verifiers==0.1.14', in its own environment",
            )
        return _bridge("v0", verifiers.__version__).V0Taskset.named(env, module)  # type: ignore[no-any-return]
    if not hasattr(module, "__all__"):
        raise PluginError(
            f"{module.__name__} is not an environment of verifiers: it exports no Taskset, and has no load_environment",
            remedy="name an installed environment",
        )
    return _bridge("v1", verifiers.__version__).V1Taskset.named(env, module)  # type: ignore[no-any-return]


def _bridge(name: str, installed: str) -> Any:
    """Return the module for one of verifiers' two kinds of environments."""
    try:
        return importlib.import_module(f"treetune.trainers.verifiers.{name}")
    except ImportError as error:
        tried = {"v0": "0.1.14", "v1": "0.4.0"}[name]
        raise PluginError(
            f"verifiers {installed} has a {name} that is not known here: {error}",
            remedy=f"pip install 'verifiers=={tried}', the version it was tested with",
        ) from error


def _import(env: str, origin: Origin) -> Any:
    """Import the module of an environment as verifiers finds it: its own modules first."""
    name = env.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if not name.isidentifier():  # a dotted name would run its parent before the check
        raise PluginError(
            f"verifiers:{env!r:.100} does not name an environment", remedy="write verifiers:ID, with an installed ID"
        )
    if name != env.replace("-", "_"):  # verifiers parses such a name itself, and may read it differently
        origin.refuse(f"names an environment of verifiers by more than its plain id: {env:.100}")
    if origin.trusted:
        see_current_folder()
    try:
        for place in (f"verifiers.v1.tasksets.{name}", name):
            if importlib.util.find_spec(place.rpartition(".")[0] or place) and importlib.util.find_spec(place):
                return load_module(CodeReference(CodeKind.MODULE, place), origin)
    except (ImportError, ValueError) as error:
        raise PluginError(f"verifiers:{env} could not be imported: {format_error(error)}") from error
    raise PluginError(
        f"verifiers:{env}: there is no module {name!r}", remedy=f"install the environment: pip install {env}"
    )


def first_line(*documented: Any) -> str:
    """Return the first line of the first docstring among them."""
    docs = (inspect.getdoc(each) for each in documented if vars(each).get("__doc__"))
    return next((doc.partition("\n")[0] for doc in docs if doc), "An environment of verifiers.")
