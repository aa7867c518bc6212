"""Writes a TARGET as a package that verifiers loads: `treetune export verifiers TARGET --to my-env/`.

    my-env/
      pyproject.toml  README.md
      my_env/__init__.py          # taskset, harness and environment: subclasses of `plugin.py`
      my_env/taskset.yaml         # what is played
      my_env/code/  my_env/data/  # the user's files that it names

verifiers knows a plugin by its module name, so the folder name becomes the module name. `.treetune-export.json` lists
what was written: an unchanged folder is overwritten, an edited one only with `force`.

`Packing` finds the code and data that a taskset names, and `open_taskset` opens the taskset where the package is
installed. verifiers runs each rollout alone, in the client's order.
"""

from __future__ import annotations

import glob
import hashlib
import json
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import resources
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, get_type_hints

from treetune.chat.message import begins_answer
from treetune.config import plugins
from treetune.config.code_files import source_of, with_imports
from treetune.config.code_reference import find_file
from treetune.config.interpolation import with_overrides
from treetune.config.structs import FileName, dump_yaml, load_yaml, map_declared
from treetune.config.trust import is_installed
from treetune.core.agent import OWN_HARNESSES
from treetune.core.contract import SCORED_ALONE
from treetune.core.from_config import build_taskset, node_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import CreditError, StorageError, UsageError, plural
from treetune.tasksets.target import read_target, refuse_server

ALREADY_THERE = "is an environment of verifiers already"
"""The message of `export` for a TARGET that is already an environment of verifiers."""
ONE_ADVANTAGE = "prime-rl gives an episode one advantage"
"""Why turns cannot be credited there."""
MARK = ".treetune-export.json"
RESERVED = {
    "harbor", "nemo_gym", "openenv", "textarena", "bash", "browser_use", "claude_code", "codex", "hermes_agent",
    "kimi_code", "mini_swe_agent", "node", "null", "openclaw", "pi", "prime_agent", "rlm", "terminus_2", "utils",
    "single_agent", "best_of_n", "agentic_judge", "isolated_verifier", "verifiers", "treetune",
}  # fmt: skip
"""Names that verifiers looks up among its own plugins first."""
_LOOKED_AT = 100
_TEMPLATES = resources.files("treetune.trainers.verifiers").joinpath("templates")


class ExportedPackage(NamedTuple):
    folder: Path
    id: str
    """The id by which verifiers knows it."""
    infinite: bool
    num_tasks: int | None
    files: list[str]


def export_package(
    target: str,
    folder: Path,
    overrides: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
    force: bool = False,
) -> ExportedPackage:
    """Write the package into `folder`. The folder's name becomes the package's, unless `name` is given."""
    refuse_server(target, "export")
    if target.startswith("verifiers:"):
        raise UsageError(f"{target} {ALREADY_THERE}", remedy="use it there as it is")
    folder = folder.expanduser().absolute()
    id, module = package_name(name or folder.name, folder)
    data = read_target(target, overrides, split, usual="train")
    if data.get("agent") is not None:
        raise UsageError(
            f"agent: {OWN_HARNESSES}", remedy="leave the key out, and name a harness where verifiers plays"
        )
    taskset = build_taskset(data["taskset"], raw=overrides or {}, source=target)
    tasks = list(islice(taskset.draw(_LOOKED_AT), _LOOKED_AT))
    check_playable(taskset, tasks)
    packing = Packing()
    node = packing.pack(taskset, node_of(taskset, data["taskset"]))
    packing.add_named_by(taskset, tasks)
    count = None if taskset.endless else taskset._size()
    values = {
        "id": id,
        "module": module,
        "cls": "".join(part.capitalize() for part in module.split("_")),
        "title": taskset.name,
        "target": target,
        "infinite": str(taskset.endless),
        "count": "tasks without end" if count is None else plural(count, "task"),
        "dependencies": json.dumps(_dependencies(packing.dependencies)),
    }
    files: dict[str, bytes | Path] = {
        "pyproject.toml": _fill("pyproject.toml", values),
        "README.md": _fill("README.md", values),
        f"{module}/__init__.py": _fill("module.py", values),
        f"{module}/taskset.yaml": dump_yaml({"taskset": node}).encode(),
        **{f"{module}/{place}": source for place, source in packing.files.items()},
    }
    _write(folder, files, {"target": target, "id": id}, force)
    return ExportedPackage(folder, id, taskset.endless, count, sorted(files))


def package_name(name: str, folder: Path) -> tuple[str, str]:
    """Return the id and the module of a package. Refused if verifiers or Python would find another module under that
    name."""
    module = re.sub(r"[ ._-]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        remedy = "use letters from a to z, digits and dashes, a letter first; --name gives another name"
        raise UsageError(f"{name!r} cannot be turned into the name of a Python module", remedy=remedy)
    if module in RESERVED or module in sys.stdlib_module_names:
        raise UsageError(
            f"verifiers would not find a package called {module!r}, because it has a module of that name",
            remedy="choose --name",
        )
    spec = find_spec(module)
    if spec is not None and spec.origin is not None and not Path(spec.origin).resolve().is_relative_to(folder):
        origin = Path(spec.origin).resolve()
        # An earlier export that was installed, not only linked, is replaced by installing the new one.
        if not (origin.parent / "taskset.yaml").is_file():
            raise UsageError(f"{module!r} would hide {origin}, which is importable here", remedy="choose --name")
    return module.replace("_", "-"), module


def _dependencies(found: list[str]) -> list[str]:
    extras = [each for each in found if each.startswith("treetune[")]
    names = ",".join(each.removeprefix("treetune[").removesuffix("]") for each in extras)
    ours = f"treetune[{names}]" if names else "treetune"
    return [ours, "verifiers>=0.3", *(each for each in found if each not in extras)]


def _fill(name: str, values: Mapping[str, str]) -> bytes:
    return Template(_TEMPLATES.joinpath(f"{name}.template").read_text()).substitute(values).encode()


def _write(folder: Path, files: Mapping[str, bytes | Path], export: dict[str, str], force: bool) -> None:
    before = _check_folder(folder, export, force)
    try:
        hashes = {}
        for place, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(data)
            hashes[place] = hashlib.sha256(data).hexdigest()
        for place in before.keys() - hashes.keys():  # written by an earlier export but not by this one
            (folder / place).unlink(missing_ok=True)
        (folder / MARK).write_text(json.dumps({**export, "files": hashes}, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error.strerror or error}") from error


def _check_folder(folder: Path, export: dict[str, str], force: bool) -> dict[str, str]:
    """Return the files of an earlier export with their hashes. Refuses a folder that Treetune did not write."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    remedy = "name another folder with --to, or write over it with --force"
    mark: dict[str, Any] = {}
    if (folder / MARK).is_file():
        mark = json.loads((folder / MARK).read_text())
    hashes: dict[str, str] = mark.get("files", {})
    if force:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", remedy="name another one with --to")
        return hashes
    if not mark:
        raise UsageError(f"{folder} exists already, and was not written by an export", remedy=remedy)
    if {key: mark.get(key) for key in export} != export:
        raise UsageError(f"{folder} is the export of {mark.get('target')} as {mark.get('id')}", remedy=remedy)
    for place, hash in hashes.items():
        file = folder / place
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != hash:
            raise UsageError(f"{file} was changed since it was exported", remedy=remedy)
    return hashes


def check_playable(taskset: Taskset[Any, Any], tasks: Iterable[Task] = ()) -> None:
    """Refuse tasks that verifiers could not play."""
    if taskset.learning() is not None:
        raise UsageError(
            f"rewards change the order of {taskset.name}, but verifiers draws tasks in its own order",
            remedy="leave out profile.online; prime-rl has its own difficulty pools",
        )
    if taskset.scores_groups:
        raise _refuse_group(taskset)
    for task in tasks:
        check_task(taskset, task)


def check_task(taskset: Taskset[Any, Any], task: Task) -> None:
    if taskset.scores_group_of(task):
        raise _refuse_group(taskset)
    if taskset.contract_of(task).turn_credit[0] == "turn":
        remedy = "declare credit: outcome, or train with verl, SkyRL, TRL, slime or AReaL"
        raise CreditError(f"{taskset.name} declares credit: turn, but {ONE_ADVANTAGE}", remedy=remedy)
    if begins_answer(task.messages):
        raise UsageError(
            f"task {task.idx} of {taskset.name} begins the answer, but a model behind verifiers cannot continue it",
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
        """Return a taskset's node, as `node_of` gives it, with its files in the package."""
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
                    f"{file} imports {part}, which is outside of its folder: a package cannot contain both",
                    remedy="install what it imports as a package, or put it next to the file",
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
