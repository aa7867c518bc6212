"""Python files as importable modules: `treetune.files.<name>_<path in hex>`.

The name holds the whole path, so any process that imports it, such as one that unpickles an instance, finds the
same file without having been told of it. The folder of the file joins `sys.path`: siblings import as in a script.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from treetune.errors import PluginError

T = TypeVar("T")

__path__: list[str] = []  # makes this module a package, whose children the finder below supplies


executed: dict[str, bytes] = {}
"""The source of each file as it was run: what a class of it is, whatever has become of the file since."""


def module_name(file: Path) -> str:
    stem = "".join(character if character.isalnum() else "_" for character in file.stem)
    return f"{__name__}.{stem}_{os.fsencode(file).hex()}"


class _FileFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        file = Path(os.fsdecode(bytes.fromhex(fullname.rpartition("_")[2])))
        if not file.is_file():
            return None
        return spec_from_file_location(fullname, file, loader=_FileLoader(fullname, str(file)))


class _FileLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # From the source, never from compiled bytes: those are known by date and size, and may be of an older file.
        executed[self.path] = source = self.get_data(self.path)
        return self.source_to_code(source, self.path)

    def exec_module(self, module: ModuleType) -> None:
        file = Path(self.path)
        _refuse_foreign_siblings(file)
        folder = str(file.parent)
        # First while the file runs, as for a script; afterwards last, so that it shadows nothing for others.
        sys.path.insert(0, folder)
        try:
            super().exec_module(module)
            for beside in with_imports(file)[1:]:
                executed.setdefault(str(beside), beside.read_bytes())
        finally:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)


def source_of(cls: type) -> Path | None:
    """The file that defines a class."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).resolve() if file is not None else None


def own_files(cls: type) -> list[Path]:
    """The files of a class and its bases that are no library's, and what they import from beside them."""
    files = [file for file in map(source_of, cls.__mro__) if file is not None and not _is_library(file)]
    return list(dict.fromkeys(part for file in files for part in with_imports(file)))


def code_hash(classes: Iterable[type]) -> str | None:
    """Over the files that define classes; None where one has no file."""
    try:
        return hash_files(source_of(cls) or Path() for cls in classes)
    except OSError:
        return None


def hash_files(files: Iterable[Path]) -> str:
    """Over the bytes of files and of what they import from beside them, as this process runs them; names differ between
    processes."""
    parts = [part for file in files for part in with_imports(file)]
    contents = dict.fromkeys(executed.get(str(part.resolve())) or part.read_bytes() for part in parts)
    return hashlib.sha256(b"\x00".join(contents)).hexdigest()[:32]


def with_imports(file: Path) -> list[Path]:
    """A file, and the files beside it that it imports, and those that they import. Libraries are left out."""
    found = [file]
    for here in found:
        found += [path for path in _imported_beside(here) if path not in found]
    return found


def _imported_beside(file: Path) -> list[Path]:
    """Of a file in a package, the modules of the same package too."""
    if _is_library(file):
        return []
    root = file.parent
    while (root / "__init__.py").exists():
        root = root.parent
    found: dict[Path, None] = {}
    for level, names in _imports(file):
        places = [file.parents[level - 1]] if level else list(dict.fromkeys([file.parent, root]))
        for place in places if level <= len(file.parents) else ():
            for end in range(1, len(names) + 1):
                stem = place.joinpath(*names[:end])
                for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                    if path.is_file() and path != file:
                        found[path.resolve()] = None
    return list(found)


def _imports(file: Path) -> list[tuple[int, list[str]]]:
    """The modules that a file names: how many folders up a relative name begins, and the parts of the name."""
    try:
        tree = parse_again(partial(ast.parse, file.read_bytes()))
    except (SyntaxError, ValueError, OSError):
        return []  # the import itself says it better
    found: list[tuple[int, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            found += [(node.level, [*module, alias.name]) for alias in node.names]
    return found


def parse_again(parse: Callable[[], T]) -> T:
    """What `parse` gives, tried again where it fails in Python 3.11: there, one parse of Python code that begins within
    another makes that one a SystemError (issue 106905), and a traceback that is printed by another thread or by the
    garbage collector parses code too. `inspect.getsource` of a class is such a parse."""
    for _ in range(10):
        with suppress(SystemError):
            return parse()
    return parse()


def _is_library(file: Path) -> bool:
    """Installed, or Python's or Treetune's own: known by its version."""
    return (
        "site-packages" in file.parts
        or "dist-packages" in file.parts
        or file.is_relative_to(Path(os.__file__).parent)
        or file.is_relative_to(Path(__file__).parent)
    )


def _refuse_foreign_siblings(file: Path) -> None:
    """Python keeps one module per name: without this check a second `helper.py` would silently be the first."""
    siblings = {path.stem for path in file.parent.glob("*.py")} - {file.stem}
    for name in (names[0] for level, names in _imports(file) if not level):
        loaded, sibling = getattr(sys.modules.get(name), "__file__", None), file.parent / f"{name}.py"
        if name not in siblings or not loaded or Path(loaded).resolve() == sibling:
            continue
        if not Path(loaded).is_file() or Path(loaded).read_bytes() != sibling.read_bytes():  # it is no copy either
            raise PluginError(
                f"{file} imports its sibling {name!r}, but that name is already loaded from {loaded}",
                remedy="rename one of the two files",
            )


if not any(isinstance(finder, _FileFinder) for finder in sys.meta_path):
    sys.meta_path.append(_FileFinder())
