"""Decides which code may run: any code that the user names; of the code that data names, only what is installed or was
kept by a build.

    with names_from(Origin("a row")):
        build_taskset(node)              # all names in the node, at any depth, come from the row

The loader (`config/plugins.py`) checks the origin of a name right before it runs anything. `--trust`, or
TREETUNE_TRUST=1, also runs code that data names.

The config of a run folder decides what code runs, and may come from anyone. An `eval` of this user records a mark in
the cache folder, made from the parts of the config that could do harm. A config without a mark may only name built-in
or installed code, and may not read variables or choose servers to call.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from treetune.config.code_files import is_of_file
from treetune.config.code_reference import FILE_SCHEME, MODULE_SCHEME, CodeKind, CodeReference
from treetune.config.interpolation import texts_of
from treetune.errors import UntrustedCode
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir

TRUST = "TREETUNE_TRUST"
"""The variable that sets `trust` in processes without arguments, such as a trainer's workers."""

LOOK = f"look at that code, then pass --trust (in a trainer's processes: {TRUST}=1)"

_OURS = ("treetune", "treetune_verl")

_kept_files: set[Path] = set()
"""Files that a build of this user kept, and whose content was verified in this process."""


class Origin(msgspec.Struct, frozen=True):
    """Where a code name was read."""

    what: str
    """A description for errors, such as `a row`."""
    trusted: bool = False

    @classmethod
    def of_data(cls, what: str, trust: bool = False) -> Origin:
        """The origin of names in rows, run folders and recorded tasks; trusted if the user says so."""
        return cls(what, trusts(trust))

    def check(self, reference: CodeReference) -> None:
        """Raise if this origin may not run the code."""
        if self.trusted:
            return
        if reference.kind is CodeKind.FILE:
            if Path(reference.place).expanduser().resolve() not in _kept_files:
                raise self.refusal(f"names code that you did not build: {reference}")
        elif not (is_installed(reference.place) or _is_own_module(reference.place)):
            raise self.refusal(f"names code that is not installed: {reference.place}")

    def check_found(self, reference: CodeReference, count: int) -> None:
        """Like `check`, for the first `count` parts of the name of an installed module, where Python finds them now."""
        parts = reference.place.split(".")
        if not self.trusted and parts[0] not in _OURS and is_installed(reference.place):
            found = _places_of(".".join(parts[:count]))
            if not all(_is_below_installed(Path(place), count) for place in found):
                raise self.refusal(f"names code that is not installed: {reference.place}")

    def refuse(self, what: str) -> None:
        """Raise for something else that only the user may choose."""
        if not self.trusted:
            raise self.refusal(what)

    def refusal(self, what: str) -> UntrustedCode:
        return UntrustedCode(f"{self.what} {what}", remedy=LOOK)


USER = Origin("you", trusted=True)
"""The origin of names on the command line, in Python, and in YAML files that the user names."""

_current: ContextVar[Origin] = ContextVar("origin of names", default=USER)


def current_origin() -> Origin:
    return _current.get()


class names_from:
    """`with names_from(origin):` gives this origin to names that are read inside. Within data, no name is trusted more
    than the data. This is a class because every episode enters it, and a generator takes four times as long."""

    __slots__ = ("_origin", "_token")

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        before = _current.get()
        self._token = _current.set(self._origin if before.trusted else before)

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


@contextlib.contextmanager
def running_code() -> Iterator[None]:
    """Run code as the user: it was checked before its import, and names in it are its own, not those of the data."""
    token = _current.set(USER)
    try:
        yield
    finally:
        _current.reset(token)


def trusts(trust: bool = False) -> bool:
    return trust or os.environ.get(TRUST) == "1"


def code_folders(cache_dir: str | Path | None = None) -> list[Path]:
    """The folders that keep code. The default folder is always used, because processes without arguments look there."""
    return [folder / "code" for folder in dict.fromkeys((default_cache_dir(), default_cache_dir(cache_dir)))]


# Records of this user's builds and evaluations


def trust_file(file: Path) -> None:
    """Allow data to name this file, whose content matches a file that a build of this user kept."""
    _kept_files.add(file.resolve())


def remember_module(module: str, file: Path, cache_dir: str | Path | None = None) -> None:
    """Allow rows to name this module, which is not installed, as long as it is this file."""
    for folder in code_folders(cache_dir):
        with contextlib.suppress(OSError):  # without the record, `--trust` is needed
            (folder / "modules").mkdir(parents=True, exist_ok=True)
            (folder / "modules" / module).write_bytes(os.fsencode(file))


def _is_own_module(module: str) -> bool:
    with contextlib.suppress(OSError):
        file = _find_module(module)
        return file is not None and (code_folders()[0] / "modules" / module).read_bytes() == os.fsencode(file)
    return False


def remember_scorer(scorer: str) -> None:
    """Mark a scorer that calls a model or runs code as named by a build of this user."""
    for folder in code_folders():
        _touch(folder / "scorers" / digest(scorer))


def is_own_scorer(scorer: str) -> bool:
    return (code_folders()[0] / "scorers" / digest(scorer)).is_file()


def remember_config(config: dict[str, Any]) -> None:
    """Mark the config of a run folder as written by an `eval` of this user."""
    _touch(_mark_of_config(config))


def is_own_config(config: dict[str, Any]) -> bool:
    return _mark_of_config(config).is_file()


def remember_names(config: dict[str, Any], names: set[str]) -> None:
    """Mark code names as used by tasks of this user, in a run with this config."""
    with contextlib.suppress(OSError), _mark_of_config(config).open("a", encoding="utf-8") as mark:
        mark.writelines(f"{name}\n" for name in names if name.isprintable())


def own_names(config: dict[str, Any]) -> set[str]:
    with contextlib.suppress(OSError):
        return set(_mark_of_config(config).read_text(encoding="utf-8").splitlines())
    return set()


def _mark_of_config(config: dict[str, Any]) -> Path:
    """A hash of the parts that could do harm. It does not depend on where the folder is."""
    parts = [config.get(key) for key in ("taskset", "model", "endpoint")]
    agent = [config["agent"]] if config.get("agent") else []
    return code_folders()[0] / "runs" / digest(parts + agent)


def _touch(mark: Path) -> None:
    with contextlib.suppress(OSError):  # without the record, `--trust` is needed
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


# Installed code


def is_installed(module: str) -> bool:
    """Whether processes of this Python can import the module wherever they are started. Does not run its code."""
    top, *parts = module.split(".")
    if "__main__" in parts:  # a program, which would run on import
        return False
    if top in _OURS:
        return not is_of_file(module)
    # Check all places: a folder of the user may add modules to a package without an __init__.py.
    places = _places_of(top)
    return bool(places) and all(_is_below_installed(Path(place), 1) for place in places)


def is_installed_folder(folder: Path) -> bool:
    return folder.resolve() in _installed_folders()


def _is_below_installed(place: Path, count: int) -> bool:
    """Whether the file or folder of a module, whose name has `count` parts, is in a folder of installed modules."""
    parents = place.resolve().parents
    return len(parents) >= count and parents[count - 1] in _installed_folders()


def _places_of(module: str) -> list[str]:
    """Where Python finds a module, including in the current folder: its file, or the folders of a package."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        found = find_spec(module)
        if "." not in module and (found is None or found.origin is None):  # not found, or a namespace package
            found = PathFinder.find_spec(module, [*sys.path, str(Path.cwd())]) or found
    except (ImportError, ValueError):
        return []
    if found is None or module == "__main__":
        return []
    return list(found.submodule_search_locations or []) or ([str(found.origin)] if found.has_location else [])


def _find_module(module: str) -> Path | None:
    """The file of a module in a package, found without running the package."""
    top, *parts = module.split(".")
    for place in _places_of(top):
        stem = Path(place, *parts) if parts else Path(place).with_suffix("")
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file.resolve()
    return None


def _installed_folders() -> set[Path]:
    named = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    found = [Path(place) for place in (*site.getsitepackages(), site.getusersitepackages(), *named)]
    for folder in list(found):
        for listed in folder.glob("*.pth"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += [Path(line) for line in listed.read_text().splitlines() if os.path.isabs(line)]
    return {path.resolve() for path in found}


# Run folders

CONFIG, FINGERPRINT, SUMMARY = "config.yaml", "fingerprint.json", "summary.json"
TRACE_LINES, CHECK_LINES = "traces.jsonl", "results.jsonl"
"""The files of a run folder. Those next to the config distinguish it from a YAML file that the user wrote."""
_LOOK = "check its config.yaml and the code that it names, then pass --trust"


def is_run_config(path: str | Path) -> bool:
    file = Path(path).expanduser()
    return (
        file.name == CONFIG
        and file.is_file()
        and any((file.parent / name).exists() for name in (FINGERPRINT, SUMMARY, TRACE_LINES, CHECK_LINES))
    )


def origin_of(path: str | Path, data: dict[str, Any], trust: bool = False) -> Origin:
    """The origin of the names in a YAML file: the user, or a run folder of someone else."""
    if not is_run_config(path) or is_own_config(data) or trusts(trust):
        return USER
    return Origin(f"{Path(path).parent} was not made by your `eval`: its config")


def refuse_foreign(run: Path, data: Mapping[str, Any]) -> None:
    """Raise if the config of another user's run would do more than play tasks. The code that it names is checked when
    it is loaded."""
    if any("${" in text for text in texts_of(data)):
        raise refusal(run, "reads variables of your environment")
    for text in texts_of(data.get("taskset")):
        if "://" in text and not text.startswith((FILE_SCHEME, MODULE_SCHEME)):  # it would receive the user's token
            raise refusal(run, f"would call a server: {text}")
    for node in nodes_of(data.get("taskset")):
        if node.get("trust"):
            raise refusal(run, "would run the code that its rows name")
        for entry in [node["tools"]] if isinstance(node.get("tools"), Mapping) else node.get("tools") or []:
            if not isinstance(entry, str):  # its settings may contain a command
                raise refusal(run, f"has tools of its own: {entry!r:.80}")


def refusal(run: Path, what: str) -> UntrustedCode:
    return UntrustedCode(f"{run} was not made by your `eval`, and {what}", remedy=_LOOK)


def nodes_of(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a taskset's node and the nodes of the sources that it mixes."""
    if isinstance(node, str):
        node = {"id": node}
    if isinstance(node, Mapping):
        yield node
        for source in node.get("sources") or []:
            yield from nodes_of(source)
