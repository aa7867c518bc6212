"""Which code that data names may run: rows and run folders may come from anybody.

    check_spec("evil:Taskset", tasksets)     # refused: not installed, and no command of this user's has named it

A module runs where it is installed or a build of this user's named it; a file where such a build kept it. `--trust`, or
TREETUNE_TRUST=1, runs the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import site
from pathlib import Path

from treetune.errors import UsageError
from treetune.plugins import Registry
from treetune.rows.cache import default_cache_dir
from treetune.task import digest

FILE = re.compile(r"(?P<file>.+\.py)(?P<name>:[^:/\\]+)?")
"""How data names a file of Python."""
TRUST = "TREETUNE_TRUST"
"""The variable that sets `trust` in processes that take no argument, such as a trainer's workers."""

LOOK = f"look at that code, then pass --trust (in a trainer's processes: {TRUST}=1)"


def check_spec(spec: str, registry: Registry, trust: bool = False, what: str = "a row") -> None:
    """A module that a name stands for must be trusted; files are checked where they are located."""
    place, _, _ = spec.rpartition(":")
    if place and not place.endswith(".py") and spec not in registry.names() and place not in registry.foreign:
        check_module(place, trust, what)


def check_module(module: str, trust: bool = False, what: str = "a row") -> None:
    """Refuses a module that is neither installed nor was named by a build of this user's, unless `trust`."""
    if not (trusts(trust) or is_installed(module) or (code_folders()[0] / "modules" / module).is_file()):
        raise UsageError(f"{what} names code that is not installed: {module}", remedy=LOOK)


def remember_scorer(scorer: str) -> None:
    """Marks a scorer that calls a model or runs code as one that a build of this user's has named."""
    for folder in code_folders():
        with contextlib.suppress(OSError):  # `--trust` is needed then
            (folder / "scorers").mkdir(parents=True, exist_ok=True)
            (folder / "scorers" / digest(scorer)).touch()


def is_own_scorer(scorer: str) -> bool:
    return (code_folders()[0] / "scorers" / digest(scorer)).is_file()


def trusts(trust: bool = False) -> bool:
    return trust or os.environ.get(TRUST) == "1"


def code_folders(cache_dir: str | Path | None = None) -> list[Path]:
    """Where code is kept: always in the default folder, where processes without another cache folder look."""
    return [folder / "code" for folder in dict.fromkeys((default_cache_dir(), default_cache_dir(cache_dir)))]


def is_installed(module: str) -> bool:
    """Whether processes of this Python import the module wherever they were started. Runs nothing of it."""
    from importlib.util import find_spec

    top = module.partition(".")[0]
    if top in ("treetune", "treetune_verl"):
        return not module.startswith("treetune.files.")
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        return False
    if found is None or module == "__main__":
        return False
    places = list(found.submodule_search_locations or []) or [found.origin or ""]
    return any(Path(place).resolve().parent in _installed_folders() for place in places)


def _installed_folders() -> set[Path]:
    places = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = [Path(place) for place in places if place]
    for folder in list(found):
        for listed in folder.glob("*.pth"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += [Path(line) for line in listed.read_text().splitlines() if os.path.isabs(line)]
    return {path.resolve() for path in found}
