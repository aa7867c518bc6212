"""Datasets of Harbor tasks from where they are published, by git; each is downloaded once.

    download("terminal-bench@2.0", REGISTRY)                  # a name in Harbor's registry
    download("https://github.com/org/tasks.git@main", "")     # a git address

gives a folder with a task in each of its folders, kept in `~/.cache/treetune/harbor`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path

import msgspec

from treetune.errors import StorageError, TasksetError, UnknownNameError

REGISTRY = "https://raw.githubusercontent.com/laude-institute/harbor/main/registry.json"
GIT_ADDRESS = re.compile(r"(?P<address>(?:\w+://|\w+@[\w.-]+:|/|\.).*?)(?:@(?P<branch>[^@/:]+))?")
SECONDS = 60


class RegistryTask(msgspec.Struct):
    path: str
    git_url: str
    git_commit_id: str | None = None


class RegistryDataset(msgspec.Struct):
    name: str
    version: str = ""
    tasks: list[RegistryTask] = []


def download(dataset: str, registry: str) -> Path:
    place = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "treetune" / "harbor"
    folder = place / re.sub(r"[^\w.@-]+", "_", dataset)
    if folder.is_dir():
        return folder
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".download-") as temporary:
            made = Path(temporary) / "tasks"
            if found := GIT_ADDRESS.fullmatch(dataset):
                _clone(found["address"], found["branch"] or "HEAD", made)
                shutil.rmtree(made / ".git")
            else:
                _collect(_find_dataset(dataset, registry), Path(temporary), made)
            made.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process was faster
            raise StorageError(f"{dataset} cannot be kept in {place}: {error}", remedy="set XDG_CACHE_HOME") from error
    return folder


def _find_dataset(dataset: str, registry: str) -> RegistryDataset:
    """By its name, the last version unless one is named."""
    try:
        if "://" in registry:
            with urllib.request.urlopen(registry, timeout=SECONDS) as answer:
                content = answer.read()
        else:
            content = Path(registry).expanduser().read_bytes()
        datasets = msgspec.json.decode(content, type=list[RegistryDataset])
    except (OSError, msgspec.MsgspecError) as error:
        raise TasksetError(
            f"the registry at {registry} cannot be read: {error}",
            remedy="is there a network? a folder of tasks can always be named with --taskset.folder",
        ) from error
    name, _, version = dataset.partition("@")
    found = [entry for entry in datasets if entry.name == name and version in ("", entry.version)]
    if not found:
        raise UnknownNameError.of("dataset", dataset, [f"{entry.name}@{entry.version}" for entry in datasets])
    return found[-1]


def _collect(dataset: RegistryDataset, temporary: Path, made: Path) -> None:
    sources: dict[tuple[str, str], list[str]] = defaultdict(list)
    for task in dataset.tasks:
        sources[task.git_url, task.git_commit_id or "HEAD"].append(task.path)
    made.mkdir()
    for number, ((address, commit), paths) in enumerate(sources.items()):
        clone = temporary / f"source{number}"
        _clone(address, commit, clone)
        for path in paths:
            task_folder = (clone / path).resolve()
            if not task_folder.is_relative_to(clone.resolve()) or not task_folder.is_dir():
                raise TasksetError(f"{address} has no folder {path} at {commit}", remedy="look at the registry")
            task_folder.rename(made / task_folder.name)


def _clone(address: str, commit: str, folder: Path) -> None:
    """One commit or branch, without what was before it."""
    _git("init", "--quiet", str(folder))
    _git("-C", str(folder), "fetch", "--quiet", "--depth", "1", "--", address, commit)
    _git("-C", str(folder), "checkout", "--quiet", "FETCH_HEAD")


def _git(*arguments: str) -> None:
    try:
        subprocess.run(
            ["git", *arguments],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"},
        )
    except FileNotFoundError:
        raise TasksetError("git is not installed: it downloads datasets", remedy="apt-get install git") from None
    except subprocess.CalledProcessError as error:
        raise TasksetError(
            f"git cannot get the dataset: {error.stderr.strip()[-500:]}",
            remedy="look at the address; is there a network? a folder can always be named with --taskset.folder",
        ) from error
