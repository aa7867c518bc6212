"""Python files as importable modules: `treetune.files.<name>_<path in hex>`.

The name holds the whole path, so any process that imports it, such as one that unpickles an instance, finds the
same file without having been told of it. The folder of the file joins `sys.path`: siblings import as in a script.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from treetune.errors import PluginError

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
        finally:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)


def _refuse_foreign_siblings(file: Path) -> None:
    """Python keeps one module per name: without this check a second `helper.py` would silently be the first."""
    siblings = {path.stem for path in file.parent.glob("*.py")} - {file.stem}
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return  # the import itself says it better
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in (name.partition(".")[0] for name in names):
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if name in siblings and loaded and not _same(Path(loaded).resolve(), file.parent / f"{name}.py"):
                raise PluginError(
                    f"{file} imports its sibling {name!r}, but that name is already loaded from {loaded}",
                    remedy="rename one of the two files",
                )


def _same(loaded: Path, sibling: Path) -> bool:
    """Whether it is the file itself, or a copy of it."""
    return loaded == sibling or (loaded.is_file() and loaded.read_bytes() == sibling.read_bytes())


if not any(isinstance(finder, _FileFinder) for finder in sys.meta_path):
    sys.meta_path.append(_FileFinder())
