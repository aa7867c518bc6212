"""Finds classes by name: registered ids, installed packages, `module:Name`, `file.py:Name`, `skyrl:NAME`.

    load_object(parse_reference("my_tasks/colours.py:Colours"), USER)
    tasksets.resolve("arithmetic", USER)

A file is imported as a normal module named after its path (`code_files.py`). So its classes can be pickled into other
processes, know their source, and are loaded only once, however often the file is named.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.config import tables
from treetune.config.code_files import module_name, source_of
from treetune.config.code_reference import CodeKind, CodeReference, find_reference, parse_reference
from treetune.config.trust import USER, Origin, is_installed, is_installed_folder, running_code
from treetune.errors import PluginError, UnknownNameError, did_you_mean, format_error, suggest_file
from treetune.system.folders import FOLDER

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def load_object(reference: CodeReference, origin: Origin) -> Any:
    """Load the class or function that a reference names."""
    module, name = load_module(reference, origin), str(reference.attribute)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise PluginError(f"{reference.place} has no {name!r}{did_you_mean(name, public)}") from None


def load_module(reference: CodeReference, origin: Origin) -> Any:
    """Import the module of a reference, once. This is the only place that runs users' code by name. Names from data are
    checked here, before any of their code runs."""
    origin.check(reference)
    if reference.kind is CodeKind.FILE:
        return _import_file(reference.place)
    if not is_installed(reference.place):
        see_current_folder()
    parts = [] if origin.trusted else reference.place.split(".")
    for end in range(1, len(parts)):
        # A package's code can redirect where its modules are found, so each module is checked after its package ran.
        _import(".".join(parts[:end]), reference.place)
        origin.check_found(reference, end + 1)
    return _import(reference.place, reference.place)


def see_current_folder() -> None:
    """Make modules in the current folder importable, like `python -m`. Call this only if a module there may run,
    because later imports, for example of a library that is not installed, may find modules there too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _import_file(path: str) -> Any:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"no such file: {path}{suggest_file(path)}", remedy=f"paths are taken from {Path.cwd()}")
    for name, module in list(sys.modules.items()):
        # sys.modules may contain anything, including None.
        if name != "__main__" and getattr(module, "__file__", None) == str(file):
            # Use the import system, which waits if another thread is still running the file.
            return _import(name, path)
    return _import(module_name(file), path)


def absolute_path(path: str, folders: Iterable[Path]) -> str:
    """Resolve a relative path against the first folder that has it; otherwise return it unchanged, relative to the
    current folder. For `folder:split`, the folder is resolved."""
    if not Path(path).expanduser().is_absolute():
        place, _, split = path.rpartition(":")
        for folder in folders:
            if (folder / path).exists():
                return str((folder / path).resolve())
            if place and (folder / place).is_dir():
                return f"{(folder / place).resolve()}:{split}"
    return path


def absolute_spec(spec: str, folders: Iterable[Path]) -> str:
    """Make the path in `file.py:Name` absolute; any other name is returned unchanged."""
    named = find_reference(spec)
    if named is None or named.kind is not CodeKind.FILE:
        return spec
    return f"{absolute_path(named.place, folders)}:{named.attribute}"


def file_of(spec: str) -> Path | None:
    """The file of `file.py:Name`; None for any other name."""
    named = find_reference(spec)
    return Path(named.place).expanduser() if named is not None and named.kind is CodeKind.FILE else None


def folders_of(cls: type) -> Iterator[Path]:
    """The folders of the files of a class and its bases."""
    return (file.parent for file in map(source_of, cls.__mro__) if file is not None)


def _import(name: str, shown: str) -> Any:
    return _load(partial(importlib.import_module, name), shown)


def _load(load: Callable[[], Any], shown: str, remedy: str | None = None) -> Any:
    """Load code that someone else wrote. Wraps the author's error with file and line."""
    try:
        with running_code():
            return load()
    except PluginError:
        raise
    except ModuleNotFoundError as error:
        remedy = remedy or "install what it needs, or correct the name"
        raise PluginError(f"{shown} could not be imported: {error}{_place(error)}", remedy=remedy) from error
    except (Exception, SystemExit) as error:
        problem = f"it calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else format_error(error)
        raise PluginError(f"{shown} could not be imported: {problem}{_place(error)}", remedy=remedy) from error


def _place(error: BaseException) -> str:
    """` (tasks.py, line 3)`: the last line in the loaded code, not in a library that it calls."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours, importing = str(FOLDER), str(Path(importlib.__file__).parent)
    others = [place for place in frames if not place[0].startswith((ours, importing, "<"))]
    if not others or isinstance(error, SyntaxError):  # a SyntaxError states its own place
        return ""
    first = Path(others[0][0])
    root = first.parent if (first.parent / "__init__.py").exists() else first
    file, line = [place for place in others if Path(place[0]).is_relative_to(root)][-1]
    shown = Path(file).relative_to(Path.cwd()) if Path(file).is_relative_to(Path.cwd()) else file
    return f" ({shown}, line {line})"


def load_builtin(name: str) -> Any:
    """Load an entry of the catalog that is a single name, such as `DECLARED_NODE`."""
    return load_object(parse_reference(tables[name]), USER)


class Registry:
    """Named classes of one kind: built in, registered at run time, or provided by an installed package."""

    def __init__(self, kind: str, group: str, table: str, *, classes: bool = True) -> None:
        """With `classes` only classes are accepted, otherwise any callable."""
        self.kind = kind
        self._classes = classes
        self._group = group
        self._table = table
        self._registered: dict[str, str | type] = {}
        self._resolved: dict[tuple[str, bool], type] = {}

    def register(self, id: str, entry_point: str | type) -> None:
        """`entry_point` is the class, or `module:Class` or `file.py:Class`, which any process can resolve."""
        if self._registered.get(id, entry_point) != entry_point:
            raise PluginError(f"{self.kind} {id!r} is registered already, as {self._registered[id]}")
        self._registered[id] = entry_point
        self._resolved.clear()

    def resolve(self, name: str, origin: Origin) -> type:
        """The class or function of a name. The `origin` of the name decides whether its code may run."""
        found = self._resolved.get((name, origin.trusted))
        if found is None:
            found = self._find(name, origin)
            if ".py:" not in name or Path(name).is_absolute():  # a relative path depends on the current folder
                self._resolved[name, origin.trusted] = found
        return found

    def _find(self, name: str, origin: Origin) -> type:
        found: Any = self._registered.get(name) or tables[self._table].get(name)
        if isinstance(found, str):
            found = self._load(found, USER)
        elif found is None and ":" in name:
            found = self._load(name, origin)
        elif found is None and name in self._installed:
            found = self._load_installed(name, origin)
        if isinstance(found, type) or (found is not None and not self._classes):
            return self._adapt(found) if isinstance(found, type) else found
        if found is not None:
            raise PluginError(f"{name} is a {type(found).__name__}, not a class")
        if name.endswith(".py") and (classes := _classes_in(Path(name))):
            raise PluginError(f"{name} is a file", remedy=f"name the class too: {' or '.join(classes)}")
        remedy = "`treetune list` shows all names; your own class is file.py:Name or module:Name"
        known = [*self.names(), *(ready_names() if self is tasksets else ())]
        raise UnknownNameError.of(self.kind, name, known, remedy=remedy)

    def _load(self, name: str, origin: Origin) -> Any:
        prefix, _, rest = name.partition(":")
        if prefix in self.foreign:
            return load_object(parse_reference(self.foreign[prefix]), USER)(rest, origin)
        return load_object(parse_reference(name), origin)

    def _adapt(self, cls: type) -> type:
        """Wrap an environment class of another library; any other class is returned unchanged."""
        adapters = tables["ADAPTED_ENVIRONMENTS"] if self is environments else {}
        library = next((name for base in cls.__mro__ if (name := base.__module__.partition(".")[0]) in adapters), None)
        adapted: type = cls if library is None else load_object(parse_reference(adapters[library]), USER)(cls)
        return adapted

    def _load_installed(self, name: str, origin: Origin) -> Any:
        entry = self._installed[name]
        package = entry.dist.name if entry.dist else entry.value
        if entry.dist is None or not is_installed_folder(Path(str(entry.dist.locate_file("")))):
            origin.refuse(f"names code that is not installed: {name}, of {package}")
        remedy = (
            f"the fault is not in Treetune: please report it to the author of {package}, or `pip uninstall {package}`"
        )
        return _load(entry.load, f"the {self.kind} {name!r} of the package {package}", remedy)

    def has(self, name: str) -> bool:
        """Whether an id is built in or registered. Such an id takes precedence over a ready-made set."""
        return name in self._registered or name in tables[self._table]

    def names(self) -> dict[str, str]:
        """All known ids, with their origin."""
        return {
            **{name: entry.dist.name if entry.dist else "installed" for name, entry in self._installed.items()},
            **dict.fromkeys(tables[self._table], "built in"),
            **dict.fromkeys(self._registered, "registered"),
        }

    @property
    def foreign(self) -> dict[str, str]:
        """Name prefixes of other libraries, each with a function that returns a class from the rest of a name and its
        origin."""
        return dict(tables.get(f"FOREIGN_{self._table}", {}))

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # takes 40 ms, so only imported for unknown ids

        return {entry.name: entry for entry in entry_points(group=self._group)}


def installed_by(file: str) -> str | None:
    """The installed package that registers classes and contains this file; None for any other file."""
    for registry in (tasksets, environments, tools):
        for entry in registry._installed.values():
            module = sys.modules.get(entry.module.partition(".")[0])
            place = str(getattr(module, "__file__", None))
            if file == place or (place.endswith("__init__.py") and Path(file).is_relative_to(Path(place).parent)):
                return entry.dist.name if entry.dist else entry.module
    return None


tasksets = Registry("taskset", "treetune.tasksets", "TASKSETS")
environments = Registry("environment", "treetune.environments", "ENVIRONMENTS")
tools = Registry("tool", "treetune.tools", "TOOLS", classes=False)


def _classes_in(file: Path) -> list[str]:
    """The names of the classes that a file defines; empty if the file cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [f"{file}:{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)]


# Ready-made task sets: YAML files that declare `train_tasks` and `val_tasks` like any config, and state what the set is
# (`about`), where it comes from (`source`), its `licence`, and whose prompt and number of examples it follows
# (`convention`).

READY_FOLDERS = "TREETUNE_READY"
"""The environment variable that lists the user's own folders with such files, separated as in PATH."""


def ready_folders() -> list[Path]:
    """The folders with ready-made sets, in order of precedence: the user's own, then the package's."""
    named = [folder for folder in os.environ.get(READY_FOLDERS, "").split(os.pathsep) if folder]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    places = [*map(Path, named), home / "treetune" / "ready"]
    return [*(place.expanduser() for place in places), Path(tables["READY"])]


def find_ready_file(name: str) -> Path | None:
    """The file of a ready-made set, or None if there is no set of this name."""
    if not name.replace("-", "").replace("_", "").isalnum():  # a path, module or address
        return None
    return next((file for folder in ready_folders() if (file := folder / f"{name}.yaml").is_file()), None)


def ready_names() -> list[str]:
    """The names of all ready-made sets."""
    return sorted({file.stem for folder in ready_folders() for file in folder.glob("*.yaml")})


def find_ready(name: str) -> Path | None:
    """The YAML file of the ready-made set with this name; None for any other name."""
    return None if tasksets.has(name) else find_ready_file(name)
