"""The way that needs no call: a `.pth` file, by which every Python of an installation registers on importing skyrl_gym.

    install_hook({"my_env": "my_env.py:MyEnv"})     # once; remove_hook() takes it away

So Ray workers, data loaders and notebooks know Treetune's environments. Until skyrl_gym is imported, a start of Python
costs a fraction of a millisecond more.
"""

from __future__ import annotations

import os
import py_compile
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib.util import cache_from_source
from pathlib import Path

from treetune.errors import StorageError
from treetune.plugins import absolute_spec, environments

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
        environments.resolve(spec)  # told now rather than in a worker
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
            path.unlink()
            found = True
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {error.strerror}") from error
    return found


def _place(folder: str | Path | None) -> Path:
    return Path(folder).expanduser() if folder is not None else Path(sysconfig.get_path("purelib"))


def _write(path: Path, text: str) -> None:
    """In one step: some Python may start at any moment."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".treetune-", delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}",
            remedy="use a virtual environment of your own, or folder=site.getusersitepackages()",
        ) from error
