"""Decides what can be exported to verifiers, and collects a package's files: the user's code and data that it names.

    check_playable(taskset, tasks)
    packing = Packing()
    node = packing.pack(taskset, node)          # names inside the package: `package:code/tasks.py:Mine`
    packing.files, packing.dependencies
    open_taskset(folder / "taskset.yaml", {})   # the taskset, where the package is installed

verifiers runs each rollout alone, in the client's order.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, get_type_hints

from treetune.chat.message import begins_answer
from treetune.config import plugins
from treetune.config.code_files import source_of, with_imports
from treetune.config.code_reference import find_file
from treetune.config.interpolation import with_overrides
from treetune.config.structs import FileName, load_yaml, map_declared
from treetune.config.trust import is_installed
from treetune.core.contract import SCORED_ALONE
from treetune.core.from_config import build_taskset
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import UsageError


def check_playable(taskset: Taskset[Any, Any], tasks: Iterable[Task] = ()) -> None:
    """Refuse what verifiers could not play."""
    if taskset.learning() is not None:
        raise UsageError(
            f"rewards move the order of {taskset.name}, and verifiers draws tasks in an order of its own",
            remedy="leave out profile.online; prime-rl has difficulty pools of its own",
        )
    if taskset.scores_groups:
        raise _refuse_group(taskset)
    for task in tasks:
        check_task(taskset, task)


def check_task(taskset: Taskset[Any, Any], task: Task) -> None:
    if taskset.scores_group_of(task):
        raise _refuse_group(taskset)
    if begins_answer(task.messages):
        raise UsageError(
            f"task {task.idx} of {taskset.name} begins the answer, and a model behind verifiers cannot go on with it",
            remedy="leave out the assistant's message at the end of the prompt",
        )


def _refuse_group(taskset: Taskset[Any, Any]) -> UsageError:
    return UsageError(
        f"{taskset.name} scores the rollouts of a task together, and in verifiers {SCORED_ALONE}",
        remedy="serve it (`treetune serve`), where `run_group` scores them; or give it a reward of its own",
    )


SCHEME, SCRIPTED = "package:", "scripted:"
_LOADERS = {"json", "csv", "parquet", "arrow", "text", "imagefolder", "webdataset", "xml", "sql", "pandas"}
"""Names for `load_dataset` that are not files, whatever the folder contains."""
MOST_BYTES = 256 * 2**20
"""The maximum size of a package's data, in bytes."""


def open_taskset(config: Path, overrides: dict[str, str]) -> Taskset[Any, Any]:
    """Return the taskset of an exported package."""
    node = _unpack(load_yaml(config)["taskset"], config.parent)
    data = with_overrides({"taskset": node}, overrides, source=str(config))
    return build_taskset(data["taskset"], raw=overrides, source=str(config))


def _unpack(value: Any, folder: Path) -> Any:
    """Return a node with the package's file names replaced by paths."""

    def locate(text: str) -> str:
        prefix, scheme, name = text.partition(SCHEME)
        return f"{prefix}{folder / name}" if scheme and prefix in ("", SCRIPTED) else text

    return _map_texts(value, locate)


class Packing:
    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        """The package's content, by the place in the package."""
        self.dependencies: list[str] = []
        """The distributions that its code needs, and Treetune's extras."""
        self._folders: dict[Path, str] = {}
        self._bytes = 0

    def pack(self, taskset: Taskset[Any, Any], node: Mapping[str, Any]) -> dict[str, Any]:
        """Return a taskset's node, as `describe` gives it, with its files in the package."""
        packed = dict(node)
        self._require(type(taskset), str(node.get("id", "")))
        hints = get_type_hints(taskset.config_type, include_extras=True)
        for key, value in node.items():
            if key == "sources":
                sources: Iterable[Taskset[Any, Any]] = getattr(taskset, "sources", [])
                packed[key] = [self.pack(source, each) for source, each in zip(sources, value, strict=True)]
            elif key == "loading_params":
                packed[key] = self._pack_loading(value)
            else:
                packed[key] = map_declared(value, hints.get(key, Any), self._pack_declared)
        beside = [*plugins.folders_of(type(taskset)), Path.cwd()]
        if "tools" in packed:  # their settings are their own, and also name files
            packed["tools"] = _map_texts(packed["tools"], partial(self._pack_setting, beside))
        code = partial(self._pack_code, beside)
        return {key: value if key == "sources" else _map_texts(value, code) for key, value in packed.items()}

    def add_named_by(self, taskset: Taskset[Any, Any], tasks: Iterable[Task]) -> None:
        """Add the files of environments and tools that tasks name. They stay next to the file of their taskset."""
        beside = list(plugins.folders_of(type(taskset)))
        for name in {name for task in tasks for name in (task.env_class, *task.tools) if name}:
            self._pack_code(beside, name)

    def _pack_declared(self, kind: Any, name: str) -> str:
        return self._pack_data(name) if kind is FileName else name

    def _pack_setting(self, beside: list[Path], text: str) -> str:
        place = plugins.absolute_path(text, beside)
        return self._pack_data(place) if Path(place).is_file() and find_file(text) is None else text

    def _pack_loading(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Pack the arguments of `load_dataset`: the first argument, and three others, may be files."""
        args, kwargs = list(params.get("args") or []), dict(params.get("kwargs") or {})
        if args and args[0] not in _LOADERS:
            args[0] = _map_texts(args[0], self._pack_data)
        for key in ("path", "data_files", "data_dir"):
            if key in kwargs and kwargs[key] not in _LOADERS:
                kwargs[key] = _map_texts(kwargs[key], self._pack_data)
        return {**params, "args": args, "kwargs": kwargs}

    def _require(self, cls: type[Taskset[Any, Any]], id: str) -> None:
        """Record what must be installed for a class."""
        if (extra := getattr(cls, "EXTRA", None)) is not None:
            self._depend(f"treetune[{extra}]")
        for base in cls.__mro__:
            module = base.__module__
            top = module.partition(".")[0]
            if base is Taskset:
                return
            if top.startswith("treetune"):  # including those of files
                continue
            if not is_installed(module):
                raise UsageError(
                    f"{id or base.__name__} is in the module {module}, which is not installed: others could not import "
                    "it",
                    remedy=f"name its file instead, {source_of(base)}:{base.__name__}, or install it as a package",
                )
            for distribution in packages_distributions().get(top, [])[:1]:
                self._depend(distribution)

    def _depend(self, requirement: str) -> None:
        if requirement not in self.dependencies:
            self.dependencies.append(requirement)

    def _pack_code(self, beside: list[Path], text: str) -> str:
        """Pack `file.py:Name`, `scripted:file.py:Name` or `file.py`, with everything that the file imports."""
        prefix = SCRIPTED if text.startswith(SCRIPTED) else ""
        named = find_file(text.removeprefix(prefix))
        if named is None:
            return text
        file = Path(plugins.absolute_path(named.place, beside)).expanduser().resolve()
        if not file.is_file():
            return text
        folder = self._folder(file.parent, "code")
        for part in with_imports(file):
            if not part.is_relative_to(file.parent):
                raise UsageError(
                    f"{file} imports {part}, which lies outside of its folder: a package cannot carry both",
                    remedy="install what it imports as a package, or put it beside the file",
                )
            self.files[f"{folder}/{part.relative_to(file.parent).as_posix()}"] = part
        packed = f"{prefix}{SCHEME}{folder}/{file.name}"
        return packed if named.attribute is None else f"{packed}:{named.attribute}"

    def _pack_data(self, text: str) -> str:
        """Pack a file, a folder or a file pattern. A hub name is returned unchanged."""
        place = Path(text).expanduser()
        if text.startswith(SCHEME) or "://" in text or not text.strip("./"):
            return text
        name, colon, split = text.rpartition(":")
        if colon and not place.exists() and name and Path(name).expanduser().is_dir():
            return f"{self._pack_data(name)}:{split}"
        if place.is_dir():
            folder = self._folder(place.resolve(), "data")
            for file in sorted(path for path in place.rglob("*") if path.is_file()):
                self._add_data(f"{folder}/{file.relative_to(place).as_posix()}", file)
            return f"{SCHEME}{folder}"
        if glob.has_magic(text) and not glob.has_magic(str(place.parent)):
            matches = sorted(Path(found) for found in glob.glob(str(place)))
        else:
            matches = [place] if place.is_file() else []
        if not matches:
            return text
        folder = self._folder(place.parent.resolve(), "data")
        for file in matches:
            self._add_data(f"{folder}/{file.name}", file)
        return f"{SCHEME}{folder}/{place.name}"

    def _add_data(self, name: str, file: Path) -> None:
        if name not in self.files:
            self._bytes += file.stat().st_size
            self.files[name] = file
        if self._bytes > MOST_BYTES:
            raise UsageError(
                f"{file} makes the data of the package more than {MOST_BYTES >> 20} MB",
                remedy="put the data on the hub and name it there, or serve the tasks (`treetune serve`)",
            )

    def _folder(self, source: Path, kind: str) -> str:
        """Return where the files of a folder go. Each folder has its own place, so that names cannot clash."""
        if source not in self._folders:
            number = sum(name.startswith(kind) for name in self._folders.values())
            self._folders[source] = f"{kind}_{number + 1}" if number else kind
        return self._folders[source]


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        # A tool is a key before its settings.
        return {change(key) if ".py:" in str(key) else key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
