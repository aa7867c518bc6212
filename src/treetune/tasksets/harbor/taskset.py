"""Harbor: a folder or a dataset of Harbor tasks, parsed as they are drawn; commands and tests run in the sandbox.

    treetune validate harbor --taskset.folder tasks
    treetune eval harbor --taskset.dataset terminal-bench@2.0 --taskset.sandbox docker -m MODEL
    treetune eval harbor --taskset.dataset https://github.com/org/repository.git@main#tasks -m scripted:gold

Without Docker, the host's system replaces a task's image. Tasks that need another image are refused, and the error
names it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from treetune.chat.message import Message
from treetune.config.structs import FileName
from treetune.core.score import VALID, Verdict, invalid
from treetune.core.taskset import Taskset
from treetune.errors import ConfigError, StorageError, TasksetError, UnknownNameError
from treetune.sandbox.machines import MachineConfig
from treetune.system.digest import digest
from treetune.system.http_body import BodyTooLarge, read_blocking
from treetune.tasksets.harbor import HarborFolder
from treetune.tasksets.harbor.environment import COMMAND_SECONDS, DISK_MB, HarborEnvironment, HarborTask, folder_of
from treetune.tasksets.turns import Positive

REGISTRY = "https://raw.githubusercontent.com/laude-institute/harbor/main/registry.json"
GIT_ADDRESS = re.compile(
    r"(?P<address>(?:\w+://|\w+@[\w.-]+:|/|\.).*?)(?:@(?P<branch>[^@/:#]+))?(?:#(?P<folder>[^#]+))?"
)
"""An address, optionally a branch or commit, and optionally the folder of the repository with the tasks."""
REGISTRY_SECONDS = 60
NO_NETWORK = "is there a network? without one, name a folder of tasks with --taskset.folder"


class HarborConfig(MachineConfig, frozen=True, kw_only=True):
    folder: FileName = ""
    """A folder with one subfolder per task, or a single task."""
    dataset: str = ""
    """Instead of a folder: `name` or `name@version` in the registry, or a git address, with `@branch` and `#folder`
    (the folder in the repository with the tasks) if needed. It is downloaded once."""
    registry: str = REGISTRY
    """Where datasets are looked up: the URL or path of a `registry.json`."""
    tasks: list[str] = []
    """Select tasks by the names of their folders or patterns such as `sql-*`; empty selects all."""
    unsupported: Literal["refuse", "skip"] = "refuse"
    """What to do with tasks that cannot be served here: `refuse` fails each one when it runs, `skip` leaves them
    out."""
    max_turns: Positive = HarborEnvironment.CONTRACT.turns
    """The maximum number of answers in an episode; then the tests run."""
    command_seconds: Annotated[float, msgspec.Meta(gt=0)] = COMMAND_SECONDS
    """Timeout of one command in seconds; a task's `agent.timeout_sec` limits all commands together."""
    disk_mb: Positive = DISK_MB
    """Space in MB for the files of an episode. They are kept in memory."""


class Harbor(Taskset[HarborTask, HarborConfig]):
    NEEDS_CONTAINER = True
    RUNS_CODE = True

    def __init__(self, config: HarborConfig | None = None) -> None:
        super().__init__(config)
        self.config = self.config.resolve()
        if bool(self.config.folder) == bool(self.config.dataset):
            raise ConfigError([("taskset.folder", "name either a folder of tasks or a dataset")])
        if self.config.dataset:
            self._origin.refuse(f"would download a dataset: {self.config.dataset}")
            root = download(self.config.dataset, self.config.registry)
        else:
            # Absolute, so that tasks and runs can be resumed from another folder.
            root = Path(self.config.folder).expanduser().resolve()
            self.config = msgspec.structs.replace(self.config, folder=str(root))
        if not root.is_dir():
            raise ConfigError([("taskset.folder", f"no such folder: {root}")])
        self._folders = self._find_tasks(root)
        if self.config.unsupported == "skip":
            self._skip()
        self._warned = self.config.has_images or self.config.rootfs is not None

    def count(self) -> int:
        return len(self._folders)

    def task_at(self, index: int) -> HarborTask:
        folder = self._open(self._folders[index])
        config = self.config
        if folder.refusal is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name}: the host's system replaces the tasks' images (of {folder.name}: {folder.recipe.base}), "
                "without a network; `treetune validate` lists the solutions that work here",
                stacklevel=2,
            )
        return HarborTask(
            prompt=write_prompt(folder, config.max_turns, config.command_seconds),
            env_class="harbor",
            ability="shell",
            extra_info={
                "folder": str(folder.path),
                **{key: getattr(config, key) for key in ("max_turns", "command_seconds", "disk_mb")},
                **config.describe_machine(),
            },
            name=folder.name,
            digest=folder.digest(),
        )

    def validate(self, task: HarborTask) -> Verdict:
        folder = folder_of(task)
        if folder.refusal is not None:
            return invalid(folder.refusal_text)
        return VALID if "/tests/test.sh" in dict(folder.walk("tests")) else invalid("there is no tests/test.sh")

    def source(self) -> str:
        return digest([(path.name, self._open(path).digest(whole_bytes=0)) for path in self._folders])

    def _find_tasks(self, root: Path) -> list[Path]:
        if (root / "task.toml").is_file():
            return [root]
        wanted, found = self.config.tasks, sorted(file.parent for file in root.glob("*/task.toml"))
        if not found:
            key, named, mark = "folder", self.config.folder, "/"
            if self.config.dataset:
                key, named, mark = "dataset", self.config.dataset, "#" if "#" not in self.config.dataset else "/"
            inside = sorted({str(file.parents[1].relative_to(root)) for file in root.glob("*/**/task.toml")})
            remedy = f"write taskset.{key}: {named}{mark}{inside[0]}" if inside else "each task is a folder with one"
            raise ConfigError([(f"taskset.{key}", f"{named} has no folder with a task.toml in it")], remedy=remedy)
        chosen = [path for path in found if not wanted or any(map(path.match, wanted))]
        if not chosen:
            names = ", ".join(path.name for path in found[:5]) + (", ..." if len(found) > 5 else "")
            raise ConfigError(
                [("taskset.tasks", f"none of the {len(found)} tasks has such a name; the tasks are: {names}")]
            )
        return chosen

    def _open(self, path: Path) -> HarborFolder:
        return HarborFolder(path, engine=self.config.has_images)

    def _skip(self) -> None:
        left_out = {path: refusal for path in self._folders if (refusal := self._open(path).refusal)}
        if left_out:
            path, refusal = next(iter(left_out.items()))
            warnings.warn(
                f"harbor: {len(left_out)} of {len(self._folders)} tasks need a container engine and are left out, "
                f"such as {path.name} ({refusal})",
                stacklevel=3,
            )
        self._folders = [path for path in self._folders if path not in left_out]


def write_prompt(folder: HarborFolder, max_turns: int, command_seconds: float) -> list[Message]:
    place = "" if folder.refusal else f" in {folder.workdir}"
    rules = (
        "You work on a Linux machine by running commands. In each turn answer with one command or script in a block:"
        f"\n\n```bash\nls\n```\n\nIt is run by bash{place}, and you are shown what it prints. Files stay from one turn "
        "to the next, and programs in the background run on; variables and the current folder do not stay. There is "
        f"no network. A turn may take {command_seconds:g} seconds, and you have {max_turns} turns. When the task is "
        "done, answer DONE."
    )
    instruction = folder.read("instruction.md").decode(errors="replace").strip()
    return [{"role": "system", "content": rules}, {"role": "user", "content": instruction}]


class RegistryTask(msgspec.Struct):
    path: str
    git_url: str
    git_commit_id: str | None = None


class RegistryDataset(msgspec.Struct):
    name: str
    version: str = ""
    tasks: list[RegistryTask] = []


def download(dataset: str, registry: str) -> Path:
    """Return a dataset as a folder with one subfolder per task; it is downloaded once."""
    place = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "treetune" / "harbor"
    address = GIT_ADDRESS.fullmatch(dataset)
    # Other addresses may look the same without their punctuation.
    folder = place / (re.sub(r"[^\w.@-]+", "_", dataset) + (f"-{digest(dataset, 4)}" if address else ""))
    inside = Path((address and address["folder"]) or ".")
    if folder.is_dir():
        return folder / inside
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".download-") as temporary:
            made = Path(temporary) / "tasks"
            if address is not None:
                _clone(address["address"], address["branch"] or "HEAD", made)
                shutil.rmtree(made / ".git")
                _find_folder(made, str(inside), dataset)
            else:
                _collect(_find_dataset(dataset, registry), Path(temporary), made)
            made.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process was faster
            raise StorageError(f"{dataset} cannot be kept in {place}: {error}", remedy="set XDG_CACHE_HOME") from error
    return folder / inside


def _find_dataset(dataset: str, registry: str) -> RegistryDataset:
    """Return the dataset with this name; without a version, the last one."""
    try:
        if "://" in registry:
            with urllib.request.urlopen(registry, timeout=REGISTRY_SECONDS) as answer:
                content = read_blocking(answer, REGISTRY_SECONDS)
        else:
            content = Path(registry).expanduser().read_bytes()
        datasets = msgspec.json.decode(content, type=list[RegistryDataset])
    except (OSError, msgspec.MsgspecError, RecursionError, BodyTooLarge) as error:
        raise TasksetError(f"the registry at {registry} cannot be read: {error}", remedy=NO_NETWORK) from error
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
            task_folder = _find_folder(clone, path, f"{address} at {commit}")
            task_folder.rename(made / task_folder.name)


def _find_folder(clone: Path, path: str, named: str) -> Path:
    """Return a folder of a repository. Raises if it leads out of the repository."""
    folder = (clone / path).resolve()
    if not folder.is_relative_to(clone.resolve()) or not folder.is_dir():
        has = ", ".join(sorted(one.name for one in clone.iterdir() if one.is_dir() and one.name != ".git")[:12])
        raise TasksetError(f"{named} has no folder {path}", remedy=f"it has: {has or 'no folder'}")
    return folder


def _clone(address: str, commit: str, folder: Path) -> None:
    """Clone one commit or branch, without its history."""
    folder.mkdir()
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        for arguments in (["init"], ["fetch", "--depth", "1", "--", address, commit], ["checkout", "FETCH_HEAD"]):
            subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise TasksetError("git is not installed: it downloads datasets", remedy="apt-get install git") from None
    except subprocess.CalledProcessError as error:
        raise TasksetError(
            f"git could not download the dataset: {error.stderr.strip()[-500:]}", remedy=NO_NETWORK
        ) from error
