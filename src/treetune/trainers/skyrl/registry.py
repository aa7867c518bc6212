"""Treetune's environments in skyrl-gym's registry.

    register()                                     # all that have an id
    register("my_env.py:MyEnv", id="my_env")       # one of your own

A registry belongs to a process: call it where SkyRL makes environments, which is inside its entry-point task.
"""

from __future__ import annotations

import py_compile
import sysconfig
from collections.abc import Mapping
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from treetune.config.plugins import absolute_spec, environments
from treetune.config.trust import USER
from treetune.core.environment import Environment
from treetune.data.rows.cache import write_atomically
from treetune.errors import PluginError, StorageError, UsageError
from treetune.trainers.skyrl.gym import ADAPTER, class_of, is_ours, put_entry, registry


def register(
    environment: str | type[Environment] | None = None, *, id: str | None = None, replace: bool = False
) -> list[str]:
    """Make Treetune's environments known to skyrl-gym in this process; gives their ids.

    All that have an id, or the one that is named: `file.py:Class`, `module:Class`, `skyrl:NAME` or a class. Where
    skyrl-gym has an environment of that id already, its own is kept, unless `replace`.
    """
    known = registry()
    if environment is None:
        if id is not None:
            raise UsageError(f"{id!r} is the id of nothing", remedy="register('my_env.py:MyEnv', id='my_env')")
        for name, origin in environments.names().items():
            if replace or name not in known or is_ours(known[name]):
                # An id that only this process knows would mean nothing in a worker that the entry is sent to.
                put_entry(_make_entry(name, environments.resolve(name, USER) if origin == "registered" else name))
        return [name for name in environments.names() if is_ours(known[name])]
    if isinstance(environment, str):
        id, environment = id or environment, absolute_spec(environment, [Path.cwd()])
    # A wrong name is told now, not when the model is loaded.
    cls = environments.resolve(environment, USER) if isinstance(environment, str) else environment
    id = id or cls.__name__
    if not issubclass(cls, Environment):
        raise PluginError(
            f"{id} is no Treetune environment",
            remedy="subclass treetune.Environment; one of skyrl-gym's own is registered with skyrl_gym.register",
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


# The way that needs no call: a `.pth` file, by which every Python of an installation registers on importing skyrl_gym.
# Until then, a start of Python costs a fraction of a millisecond more.

_MODULE = "_treetune_skyrl"
_SWITCH = "treetune_skyrl.pth"


def install_hook(
    named: Mapping[str, str] | None = None, *, replace: bool = False, folder: str | Path | None = None
) -> Path:
    """Have skyrl-gym know Treetune's environments, and those of `named` (by id: `file.py:Class` or `module:Class`), in
    every Python of this installation, or of the one whose packages are in `folder`. Gives the path of the `.pth` file.
    """
    specs = {id: absolute_spec(spec, [Path.cwd()]) for id, spec in (named or {}).items()}
    for spec in specs.values():
        environments.resolve(spec, USER)  # a wrong name is an error now, not in a worker
    place = _place(folder)
    # ASCII, because a .pth file is read in the encoding of whoever starts Python.
    call = f"import {_MODULE}; {_MODULE}.register_on_import({specs!a}, {replace})\n"
    module = place / f"{_MODULE}.py"
    _write(module, Path(__file__).with_name("startup.py").read_text())
    py_compile.compile(str(module), quiet=2)  # now, for not every Python may or can
    _write(place / _SWITCH, call)
    return place / _SWITCH


def remove_hook(*, folder: str | Path | None = None) -> bool:
    """Take the hook away; whether there was one."""
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
    """In one step: some Python may start at any moment."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}",
            remedy="use a virtual environment of your own, or folder=site.getusersitepackages()",
        ) from error
