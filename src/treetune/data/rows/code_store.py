"""Keeps the Python files that rows name: in the cache, by hash, for every process that shares the cache.

    keep_files("tasks/doubles.py:Doubles")              # "cache://3f…/doubles.py:Doubles"
    locate_files("cache://3f…/doubles.py:Doubles")      # where the file is, on this machine

Rows from other sources may name any code: `config/trust.py` decides what runs when the code is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treetune.config.code_files import is_of_file, source_of, with_imports
from treetune.config.code_reference import find_file
from treetune.config.trust import code_folders, is_installed, remember_module, trust_file
from treetune.errors import PluginError, UsageError
from treetune.system.folders import write_atomically

SCHEME = "cache://"

_KEPT = re.compile(rf"{SCHEME}(?P<hash>[0-9a-f]+)/(?P<file>[^/\\:]+\.py)(?P<name>:[^:/\\]+)?")

_kept: dict[Path, None] = {}


def pop_kept_files() -> list[Path]:
    """Return the files that this process has kept since the last call."""
    files = list(_kept)
    _kept.clear()
    return files


def keep_class(cls: type, cache_dir: str | Path | None) -> str:
    """Return `pkg://module` for a class that other processes can import, else the place where its file is kept."""
    module, installed = cls.__module__, is_installed(cls.__module__)
    # A module of a package cannot be kept as a single file.
    if installed or ("." in module and not is_of_file(module)):
        if not installed and (file := source_of(cls)) is not None:
            remember_module(module, file, cache_dir)
        return f"pkg://{module}"
    if (file := source_of(cls)) is None or not file.is_file():
        raise PluginError(
            f"{cls.__name__} has no source file, so no other process could score its rows",
            remedy="define the class in a .py file rather than in a notebook or a prompt",
        )
    return _keep(file, cache_dir)


def keep_files(value: Any, cache_dir: str | Path | None = None) -> Any:
    """Replace Python files in a value, `file.py` or `file.py:Name`, by their names in the cache, after storing them
    there."""

    def keep_file(text: str) -> str:
        named = None if text.startswith(SCHEME) else find_file(text)
        if named is None or not Path(named.place).expanduser().is_file():
            return text
        kept = _keep(Path(named.place).expanduser(), cache_dir)
        return kept if named.attribute is None else f"{kept}:{named.attribute}"

    return _map_texts(value, keep_file)


def locate_files(value: Any) -> Any:
    """The reverse: return the paths of files that a build of this user stored. Data may name these files."""
    return _map_texts(value, lambda text: _locate_kept(text) if text.startswith(SCHEME) else text)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _keep(file: Path, cache_dir: str | Path | None) -> str:
    """Copy a file, and what it imports from its folder, into the cache. Returns its name there,
    `cache://HASH/file.py`."""
    file = file.resolve()
    _kept[file] = None
    contents = _read_contents(file)
    name = _hash_contents(contents)
    for folder in (code / name for code in code_folders(cache_dir)):
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
        raise UsageError(f"{spec!r} does not name code", remedy=f"it is {SCHEME}HASH/file.py:Name")
    folder, file = code_folders()[0] / match["hash"], match["file"]
    places = [folder / file]
    with contextlib.suppress(OSError):
        # If the original is unchanged, it comes first: it may read other files in its folder.
        places.insert(0, Path(os.fsdecode((folder / ".origin").read_bytes())))
    for place in places:
        with contextlib.suppress(OSError):
            if place.name == file and _hash_contents(_read_contents(place)) == match["hash"]:
                trust_file(place)
                return f"{place}{match['name'] or ''}"
    raise UsageError(
        f"the code that scores a row, {file}, is not in the cache of this machine: {folder}",
        remedy="share the cache folder with every node (TREETUNE_TASK_CACHE_DIR), build the rows here, or install the "
        "class as a package",
    )


def _read_contents(file: Path) -> dict[str, bytes]:
    """Return the content of a file and of everything it imports from its folder, by relative name."""
    files = [path for path in with_imports(file) if path.is_relative_to(file.parent)]
    return {path.relative_to(file.parent).as_posix(): path.read_bytes() for path in files}


def _hash_contents(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return total.hexdigest()[:32]
