"""Python files that rows name, kept in the cache by their hash, so that every process that shares it finds them.

    spec = portable("/home/me/doubles.py:Doubles")      # "cache://3f…/doubles.py:Doubles", and a copy is in the cache
    located(spec)                                       # "/home/me/doubles.py:Doubles" again, or that of the copy

Rows from elsewhere may name any code. A file runs only where this user's own build kept it: `located` refuses every
other one unless `trust` says otherwise. Installed modules are named `module:Name`, and are trusted as what they are.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treetune.errors import PluginError, UsageError

SCHEME = "cache://"

TRUST = "TREETUNE_TRUST"
"""The variable that says `trust` to processes that nobody calls with it, such as a trainer's workers."""

_FILE = re.compile(r"(?P<file>.+\.py)(?P<name>:[^:/\\]+)?")
_KEPT = re.compile(rf"{SCHEME}(?P<hash>[0-9a-f]+)/(?P<file>[^/\\:]+\.py)(?P<name>:[^:/\\]+)?")


def spec_of(cls: type, cache_dir: str | Path | None = None) -> str:
    """`module:Name` of a class that other processes can import, else where its file is kept."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if _is_installed(cls.__module__, file):
        return f"{cls.__module__}:{cls.__qualname__}"
    if file is None or not Path(file).is_file():
        raise PluginError(
            f"{cls.__name__} has no source file, so no other process could score its rows",
            remedy="define the class in a .py file rather than in a notebook or a prompt",
        )
    return f"{keep(Path(file), cache_dir)}:{cls.__qualname__}"


def portable(value: Any, cache_dir: str | Path | None = None) -> Any:
    """A value whose files of Python, `file.py` or `file.py:Name`, are kept in the cache and named by their hash."""
    if isinstance(value, Mapping):
        return {key: portable(item, cache_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item, cache_dir) for item in value]
    match = _FILE.fullmatch(value) if isinstance(value, str) and not value.startswith(SCHEME) else None
    if match is None or not Path(match["file"]).expanduser().is_file():
        return value
    return keep(Path(match["file"]).expanduser(), cache_dir) + (match["name"] or "")


def located(value: Any, *, trust: bool = False) -> Any:
    """The reverse: where the files are. A file that no build of this user's kept is refused, unless `trust`."""
    if isinstance(value, Mapping):
        return {key: located(item, trust=trust) for key, item in value.items()}
    if isinstance(value, list):
        return [located(item, trust=trust) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(SCHEME):
        return _found(value)
    if _FILE.fullmatch(value) and not (trust or os.environ.get(TRUST) == "1"):
        raise UsageError(
            f"a row names code that no build of yours has kept: {value}",
            remedy=f"look at the file, then pass --trust (in a trainer's processes: {TRUST}=1)",
        )
    return value


def keep(file: Path, cache_dir: str | Path | None = None) -> str:
    """Copy a file, with what it imports from beside it, into the cache; gives its name there, `cache://HASH/file.py`."""
    from treetune.datasets.content import write_atomically

    file = file.resolve()
    contents = {path.name: path.read_bytes() for path in (file, *imported_siblings(file))}
    name = _hash(contents)
    # Also where other processes look that are not told of another cache folder.
    for folder in dict.fromkeys((_folder(None) / name, _folder(cache_dir) / name)):
        if (folder / ".origin").is_file():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, content in contents.items():
                write_atomically(folder / path, content)
            write_atomically(folder / ".origin", os.fsencode(file))
        except OSError as error:
            raise UsageError(
                f"cannot write to the cache folder {folder}: {error.strerror}",
                remedy="set TREETUNE_TASK_CACHE_DIR to a folder of your own",
            ) from None
    return f"{SCHEME}{name}/{file.name}"


def imported_siblings(file: Path) -> list[Path]:
    """The files beside a file that it imports, directly or not."""
    beside = {path.stem: path for path in file.parent.glob("*.py")}
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for name in _imports(waiting.pop()):
            if name in beside and name != file.stem and name not in found:
                found[name] = beside[name]
                waiting.append(beside[name])
    return [found[name] for name in sorted(found)]


def _imports(file: Path) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, ValueError):  # whoever runs the file says it better
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


def _found(spec: str) -> str:
    match = _KEPT.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} names no code", remedy=f"it is {SCHEME}HASH/file.py:Name")
    folder, file = _folder(None) / match["hash"], match["file"]
    name = match["name"] or ""
    with contextlib.suppress(OSError):
        # Where it was kept from, if it is the same still: it may read other files beside it.
        origin = Path(os.fsdecode((folder / ".origin").read_bytes()))
        if origin.name == file and _hash_of(origin, imported_siblings(origin)) == match["hash"]:
            return f"{origin}{name}"
    copies = [path for path in sorted(folder.glob("*.py")) if path.name != file]
    with contextlib.suppress(OSError):
        if _hash_of(folder / file, copies) == match["hash"]:
            return f"{folder / file}{name}"
    raise UsageError(
        f"the code that scores a row, {file}, is not in the cache of this machine: {folder}",
        remedy="share the cache folder with every node (TREETUNE_TASK_CACHE_DIR), build the rows here, or install the "
        "class as a package",
    )


def _hash_of(file: Path, others: list[Path]) -> str:
    return _hash({path.name: path.read_bytes() for path in (file, *others)})


def _hash(contents: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return total.hexdigest()[:32]


def _folder(cache_dir: str | Path | None) -> Path:
    from treetune.datasets.cache import default_cache_dir

    return default_cache_dir(cache_dir) / "code"


def _is_installed(module: str, file: str | None) -> bool:
    """Whether other processes of this Python import the module too: not because of where this one was started."""
    if module == "__main__" or module.startswith("treetune.files."):
        return False
    if "." in module or file is None:  # part of a package, which is no single file
        return True
    return Path(file).resolve().parent in _installed_folders()


def _installed_folders() -> set[Path]:
    places = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = [Path(place) for place in places if place]
    for folder in list(found):
        for listed in folder.glob("*.pth"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found += [Path(line) for line in listed.read_text().splitlines() if os.path.isabs(line)]
    return {path.resolve() for path in found}
