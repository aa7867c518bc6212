"""Python files that rows name, kept in the cache by their hash, so that every process that shares it finds them.

    spec = keep_files("/home/me/doubles.py:Doubles")      # "cache://3f…/doubles.py:Doubles", and a copy is in the cache
    locate_files(spec)                                    # "/home/me/doubles.py:Doubles" again, or that of the copy

Rows from elsewhere may name any code. A file runs only where this user's own build kept it, a module only where it is
installed or a build of this user's named it: `locate_files` and `check_module` refuse every other one unless `trust`
says otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import site
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treetune.errors import PluginError, UsageError
from treetune.files import with_imports
from treetune.rows.cache import default_cache_dir, write_atomically

SCHEME = "cache://"

TRUST = "TREETUNE_TRUST"
"""The variable that sets `trust` in processes that take no argument, such as a trainer's workers."""

_LOOK = f"look at that code, then pass --trust (in a trainer's processes: {TRUST}=1)"

_FILE = re.compile(r"(?P<file>.+\.py)(?P<name>:[^:/\\]+)?")
_KEPT = re.compile(rf"{SCHEME}(?P<hash>[0-9a-f]+)/(?P<file>[^/\\:]+\.py)(?P<name>:[^:/\\]+)?")


def spec_of(cls: type, cache_dir: str | Path | None = None) -> str:
    """`module:Name` of a class that other processes can import, else where its file is kept."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if _is_importable(cls.__module__):
        if not _is_installed(cls.__module__):
            _remember(cls.__module__, cache_dir)
        return f"{cls.__module__}:{cls.__qualname__}"
    if file is None or not Path(file).is_file():
        raise PluginError(
            f"{cls.__name__} has no source file, so no other process could score its rows",
            remedy="define the class in a .py file rather than in a notebook or a prompt",
        )
    return f"{keep(Path(file), cache_dir)}:{cls.__qualname__}"


_kept: dict[Path, None] = {}


def pop_kept_files() -> list[Path]:
    """The files that this process kept since it was asked last."""
    files = list(_kept)
    _kept.clear()
    return files


def keep_files(value: Any, cache_dir: str | Path | None = None) -> Any:
    """A value whose files of Python, `file.py` or `file.py:Name`, are kept in the cache and named by their hash."""

    def keep_file(text: str) -> str:
        match = None if text.startswith(SCHEME) else _FILE.fullmatch(text)
        if match is None or not Path(match["file"]).expanduser().is_file():
            return text
        return keep(Path(match["file"]).expanduser(), cache_dir) + (match["name"] or "")

    return _map_texts(value, keep_file)


def locate_files(value: Any, *, trust: bool = False) -> Any:
    """The reverse: where the files are. A file that no build of this user's kept is refused, unless `trust`."""

    def locate_file(text: str) -> str:
        if text.startswith(SCHEME):
            return _locate_kept(text)
        if _FILE.fullmatch(text) and not _trusts(trust):
            raise UsageError(f"a row names code that no build of yours has kept: {text}", remedy=_LOOK)
        return text

    return _map_texts(value, locate_file)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def check_module(module: str, *, trust: bool = False) -> None:
    """Refuses a module that is neither installed nor was named by a build of this user's, unless `trust`."""
    if not (_trusts(trust) or _is_installed(module) or (_folder(None) / "modules" / module).is_file()):
        raise UsageError(f"a row names code that is not installed: {module}", remedy=_LOOK)


def _trusts(trust: bool) -> bool:
    return trust or os.environ.get(TRUST) == "1"


def keep(file: Path, cache_dir: str | Path | None = None) -> str:
    """Copy a file, with what it imports from beside it, into the cache; gives its name there, `cache://HASH/file.py`."""
    file = file.resolve()
    _kept[file] = None
    contents = _read_contents(file)
    name = _hash_contents(contents)
    # Also in the default folder, where processes without another cache folder look.
    for folder in dict.fromkeys((_folder(None) / name, _folder(cache_dir) / name)):
        if (folder / ".origin").is_file():
            continue
        try:
            for path, content in contents.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / path, content)
            write_atomically(folder / ".origin", os.fsencode(file))
        except OSError as error:
            raise UsageError(
                f"cannot write to the cache folder {folder}: {error.strerror}",
                remedy="set TREETUNE_TASK_CACHE_DIR to a folder of your own",
            ) from None
    return f"{SCHEME}{name}/{file.name}"


def _locate_kept(spec: str) -> str:
    match = _KEPT.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} names no code", remedy=f"it is {SCHEME}HASH/file.py:Name")
    folder, file = _folder(None) / match["hash"], match["file"]
    name = match["name"] or ""
    with contextlib.suppress(OSError):
        # Where it was kept from, if it is the same still: it may read other files beside it.
        origin = Path(os.fsdecode((folder / ".origin").read_bytes()))
        if origin.name == file and _hash_contents(_read_contents(origin)) == match["hash"]:
            return f"{origin}{name}"
    with contextlib.suppress(OSError):
        if _hash_contents(_read_contents(folder / file)) == match["hash"]:
            return f"{folder / file}{name}"
    raise UsageError(
        f"the code that scores a row, {file}, is not in the cache of this machine: {folder}",
        remedy="share the cache folder with every node (TREETUNE_TASK_CACHE_DIR), build the rows here, or install the "
        "class as a package",
    )


def _read_contents(file: Path) -> dict[str, bytes]:
    """What a file is made of: itself, and what it imports from beside it, by the names that they have there."""
    files = [path for path in with_imports(file) if path.is_relative_to(file.parent)]
    return {path.relative_to(file.parent).as_posix(): path.read_bytes() for path in files}


def _hash_contents(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return total.hexdigest()[:32]


def _folder(cache_dir: str | Path | None) -> Path:
    return default_cache_dir(cache_dir) / "code"


def _is_importable(module: str) -> bool:
    """Whether other processes may import it by its name: it is installed, or part of a package, which is no single
    file."""
    if module == "__main__" or module.startswith("treetune.files."):
        return False
    return "." in module or _is_installed(module)


def _is_installed(module: str) -> bool:
    """Whether processes of this Python import the module wherever they were started. Runs nothing of it."""
    from importlib.util import find_spec

    top = module.partition(".")[0]
    if top in ("treetune", "treetune_verl"):
        return not module.startswith("treetune.files.")
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        return False
    if found is None:
        return False
    places = list(found.submodule_search_locations or []) or [found.origin or ""]
    return any(Path(place).resolve().parent in _installed_folders() for place in places)


def _remember(module: str, cache_dir: str | Path | None) -> None:
    for folder in dict.fromkeys((_folder(None), _folder(cache_dir))):
        with contextlib.suppress(OSError):
            (folder / "modules").mkdir(parents=True, exist_ok=True)
            (folder / "modules" / module).touch()


def _installed_folders() -> set[Path]:
    places = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = [Path(place) for place in places if place]
    for folder in list(found):
        for listed in folder.glob("*.pth"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += [Path(line) for line in listed.read_text().splitlines() if os.path.isabs(line)]
    return {path.resolve() for path in found}
