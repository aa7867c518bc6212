"""Python files as importable modules: `treetune.config.code_files.<name>_<path in hex>`.

The name contains the whole path, so that every process that imports it finds the same file, for example to unpickle an
instance.

Modules and packages next to a file are loaded in the same way: when a file is compiled, its imports of them are
rewritten to these names. So two files in two folders each import their own `utils`, at load time and inside functions.
`importlib.import_module` bypasses this, so the folder is also the last entry of `sys.path`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from treetune.system.folders import FOLDER

T = TypeVar("T")

__path__: list[str] = []  # makes this module a package; the finder below supplies its children


executed: dict[str, bytes] = {}
"""The source of each file when it was run. The file may have changed since."""

_appended: set[str] = set()


def is_of_file(module: str) -> bool:
    """Whether this is the name of a module loaded from a file."""
    return f"{module}.".startswith(f"{__name__}.")


def module_name(place: Path) -> str:
    """The module name of a file, or of a folder as a package."""
    place = place.parent if place.name == "__init__.py" else place
    stem = "".join(character if character.isalnum() else "_" for character in place.stem)
    return f"{__name__}.{stem}_{os.fsencode(place).hex()}"


def _locate(fullname: str) -> tuple[Path, list[Path]] | None:
    """The path of a module below this one, and the folders whose modules it imports by their plain names."""
    top, *parts = fullname.removeprefix(f"{__name__}.").split(".")
    try:
        start = Path(os.fsdecode(bytes.fromhex(top.rpartition("_")[2])))
    except ValueError:
        return None
    folders = [start.parent] if parts or start.is_dir() else _folders_of(start)
    place: Path | None = start
    for part in parts:
        place = _find_in(place, part) if place is not None else None
    return (place, folders) if place is not None else None


def _folders_of(file: Path) -> list[Path]:
    """The folders that a file imports from: its own and, in a package, the folder that contains the package."""
    root = file.parent
    while (root / "__init__.py").exists():
        root = root.parent
    return list(dict.fromkeys([file.parent, root]))


def _find_in(folder: Path, name: str) -> Path | None:
    """The file or package of this name in a folder, in Python's order of precedence."""
    package, module = folder / name, folder / f"{name}.py"
    if (package / "__init__.py").is_file():
        return package
    return module if module.is_file() else package if package.is_dir() else None


class _FileFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or (found := _locate(fullname)) is None:
            return None
        place = found[0]
        file = place / "__init__.py" if place.is_dir() else place
        if file.is_file():
            return spec_from_file_location(fullname, file, loader=_FileLoader(fullname, str(file)))
        if not place.is_dir():
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


class _FileLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Compile from source, never from bytecode, which is matched by date and size and may be of an older file.
        executed[os.path.realpath(self.path)] = source = self.get_data(self.path)
        found = _locate(fullname)
        return parse_again(partial(_compile, source, Path(self.path), fullname, found[1] if found else []))

    def exec_module(self, module: ModuleType) -> None:
        if os.path.realpath(self.path) not in executed:  # otherwise the importing file has recorded them
            for part in with_imports(Path(self.path)):
                executed.setdefault(os.path.realpath(part), part.read_bytes())
        found = _locate(module.__name__)
        if found is not None and (folder := str(found[1][0])) not in sys.path:
            _appended.add(folder)
            sys.path.append(folder)
        try:
            super().exec_module(module)
        except ImportError as error:
            error.msg = re.sub(rf"{re.escape(__name__)}\.(\w+?)_[0-9a-f]{{8,}}", r"\1", str(error.msg))
            raise


def _compile(source: bytes, file: Path, fullname: str, folders: list[Path]) -> CodeType:
    """Compile a file, with imports of neighbouring files renamed to their module names here."""
    tree = ast.parse(source, str(file))
    has_package = fullname.count(".") > __name__.count(".") + 1 or file.name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            node.names = [changed for alias in node.names for changed in _rename(alias, file, folders)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            top, dot, rest = node.module.partition(".")
            node.module = f"{_name_beside(top, file, folders) or top}{dot}{rest}"
        elif isinstance(node, ast.ImportFrom) and not has_package and 0 < node.level < len(file.parents):
            package = _name_package(file.parents[node.level - 1])
            node.module, node.level = f"{package}.{node.module}" if node.module else package, 0
    return compile(tree, str(file), "exec", dont_inherit=True)


def _name_package(folder: Path) -> str:
    """The module name of a folder, as part of the outermost package that contains it."""
    root = _folders_of(folder)[-1]
    top, *parts = folder.relative_to(root).parts
    return ".".join([module_name(root / top), *parts])


def _rename(alias: ast.alias, file: Path, folders: list[Path]) -> Iterator[ast.alias]:
    """`import a.b` binds a, so it becomes two: the first loads a.b, the second binds a."""
    top, dot, rest = alias.name.partition(".")
    if (name := _name_beside(top, file, folders)) is None:
        yield alias
        return
    yield ast.copy_location(ast.alias(f"{name}{dot}{rest}", alias.asname or top), alias)
    if dot and alias.asname is None:
        yield ast.copy_location(ast.alias(name, top), alias)


def _name_beside(top: str, file: Path, folders: list[Path]) -> str | None:
    """The module name of a neighbouring module or package that a file imports; None for any other import."""
    place = next((place for folder in folders if (place := _find_in(folder, top)) is not None), None)
    if place is None or place == file:
        return None
    source = place / "__init__.py" if place.is_dir() else place
    origin = _find_origin(top)
    if origin is not None and (not source.is_file() or Path(origin).resolve() == source.resolve()):
        # Python finds the same file; or it finds a library, and this is a folder without __init__.py, perhaps data.
        return None
    return module_name(place)


def _find_origin(top: str) -> str | None:
    """The file that Python would import under this name without the folders that this module added to `sys.path`."""
    if (loaded := sys.modules.get(top)) is not None:
        return getattr(loaded, "__file__", None) or getattr(getattr(loaded, "__spec__", None), "origin", None)
    for finder in sys.meta_path:
        path = [entry for entry in sys.path if entry not in _appended] if finder is PathFinder else None
        if (spec := finder.find_spec(top, path)) is not None:
            return spec.origin
    return None


def source_of(cls: type) -> Path | None:
    """The file that defines a class."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).resolve() if file is not None else None


def own_files(cls: type) -> list[Path]:
    """The files of a class and its bases, without libraries, and the neighbouring files that they import."""
    files = [file for file in map(source_of, cls.__mro__) if file is not None and not _is_library(file)]
    return list(dict.fromkeys(part for file in files for part in with_imports(file)))


def code_hash(classes: Iterable[type]) -> str | None:
    """A hash of the files that define classes; None if one has no file."""
    try:
        return hash_files(source_of(cls) or Path() for cls in classes)
    except OSError:
        return None


def hash_files(files: Iterable[Path]) -> str:
    """A hash of the contents of files and of the neighbouring files that they import, as this process runs them. Module
    names, which differ between processes, are not included."""
    parts = [part for file in files for part in with_imports(file)]
    contents = dict.fromkeys(executed.get(str(part.resolve())) or part.read_bytes() for part in parts)
    return hashlib.sha256(b"\x00".join(contents)).hexdigest()[:32]


def with_imports(file: Path) -> list[Path]:
    """A file and the neighbouring files that it imports, directly or indirectly, without libraries."""
    found, folders = [file], _folders_of(file)
    for here in found:
        found += [path for path in _imported_beside(here, folders) if path not in found]
    return found


def _imported_beside(file: Path, folders: list[Path]) -> list[Path]:
    if _is_library(file):
        return []
    found: dict[Path, None] = {}
    for level, names in _imports(file):
        places = [file.parents[level - 1]] if level else folders
        for place in places if level <= len(file.parents) else ():
            if level and (place / "__init__.py").is_file():
                found[(place / "__init__.py").resolve()] = None
            for end in range(1, len(names) + 1):
                stem = place.joinpath(*names[:end])
                for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                    if path.is_file() and path != file:
                        found[path.resolve()] = None
    return list(found)


def _imports(file: Path) -> list[tuple[int, list[str]]]:
    """The modules that a file imports: how many folders up a relative import starts, and the parts of the name."""
    try:
        tree = parse_again(partial(ast.parse, file.read_bytes()))
    except (SyntaxError, ValueError, OSError):
        return []  # the import will report it
    found: list[tuple[int, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            found += [(node.level, [*module, alias.name]) for alias in node.names]
    return found


def parse_again(parse: Callable[[], T]) -> T:
    """Call `parse`, and retry to work around a bug of Python 3.11 (issue 106905): a parse of Python code that begins
    inside another one makes the outer one raise SystemError. Printing a traceback, in another thread or in the garbage
    collector, parses code too, and so does `inspect.getsource` of a class."""
    for _ in range(10):
        with suppress(SystemError):
            return parse()
    return parse()


def _is_library(file: Path) -> bool:
    """Whether a file is installed or part of Python or Treetune, and so identified by its version."""
    return (
        "site-packages" in file.parts
        or "dist-packages" in file.parts
        or file.is_relative_to(Path(os.__file__).parent)
        or file.is_relative_to(FOLDER)
    )


if not any(isinstance(finder, _FileFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _FileFinder())  # Python could find submodules itself, but not their neighbours
