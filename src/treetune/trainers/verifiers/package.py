"""Writes a TARGET as a package that verifiers loads: `treetune export verifiers TARGET --to my-env/`.

    my-env/
      pyproject.toml  README.md
      my_env/__init__.py          # taskset, harness and environment: subclasses of `plugin.py`
      my_env/taskset.yaml         # what is played
      my_env/code/  my_env/data/  # the user's files that it names

verifiers knows a plugin by its module name, so the folder name becomes the module name. `.treetune-export.json` lists
what was written: an unchanged folder is overwritten, an edited one only with `force`.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import os
import re
import sys
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from treetune.config.structs import dump_yaml
from treetune.core.from_config import build_taskset, describe
from treetune.errors import StorageError, UsageError, plural
from treetune.tasksets.target import read_target, refuse_server
from treetune.trainers.verifiers.packing import Packing, check_playable

ALREADY_THERE = "is an environment of verifiers already"
"""The message of `export` for a TARGET that is one."""
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
    taskset = build_taskset(data["taskset"], raw=overrides or {}, source=target)
    tasks = list(islice(taskset.draw(_LOOKED_AT), _LOOKED_AT))
    check_playable(taskset, tasks)
    packing = Packing()
    node = packing.pack(taskset, describe(taskset, data["taskset"]))
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
    """Return the id and the module of a package. Refused if verifiers or Python would find another one under that
    name."""
    module = re.sub(r"[ ._-]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        remedy = "use letters from a to z, digits and dashes, a letter first; --name gives another name"
        raise UsageError(f"{name!r} makes no name of a Python module", remedy=remedy)
    if module in RESERVED or module in sys.stdlib_module_names:
        raise UsageError(f"verifiers would not find a package called {module!r}: there is one", remedy="choose --name")
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
            raise UsageError(f"{folder} is no folder", remedy="name another one with --to")
        return hashes
    if not mark:
        raise UsageError(f"{folder} exists already, and no export wrote it", remedy=remedy)
    if {key: mark.get(key) for key in export} != export:
        raise UsageError(f"{folder} is the export of {mark.get('target')} as {mark.get('id')}", remedy=remedy)
    for place, hash in hashes.items():
        file = folder / place
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != hash:
            raise UsageError(f"{file} was changed since it was exported", remedy=remedy)
    return hashes
