"""Plans the start of a trainer on any tasks: its config, its data, and its command.

    launch = plan("verl", TrainRequest(target="sums.yaml", model="Qwen/Qwen3-0.6B", build=build))
    launch.command         # python -m verl.trainer.main_ppo data.train_files=[...] ...

Each trainer has a function that plans. It does not import the trainer, so plans work on any machine.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from treetune.config.interpolation import escape_text
from treetune.errors import TreetuneError, UnknownNameError, UsageError

TRAINERS = {
    "areal": "treetune.trainers.areal.launch:plan",
    "skyrl": "treetune.trainers.skyrl.launch:plan",
    "slime": "treetune.trainers.slime.launch:plan",
    "trl": "treetune.trainers.trl.launch:plan",
    "verl": "treetune.trainers.verl.launch:plan",
}
"""The planning function of each trainer. Documented in docs/trainers.md."""

_OTHERWISE = {
    "prime-rl": "prime-rl loads a package: treetune export verifiers TARGET --to my-env",
    "verifiers": "verifiers loads a package: treetune export verifiers TARGET --to my-env",
    "openenv": "trainers that speak OpenEnv play on a server: treetune serve TARGET --openenv :8000",
    "nemo-gym": "NeMo Gym reads JSON lines: treetune convert ROWS tasks.jsonl --to nemo-gym",
}
"""Trainers that `treetune train` does not start, and how they get their tasks."""

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


class BuiltFile(msgspec.Struct, frozen=True):
    """A file of rows for a trainer."""

    path: str
    rows: int
    shares: Mapping[str, int] = {}
    """How many rows come from each task, if a mixture drew them."""


Files = Mapping[str, Sequence[BuiltFile]]
"""By split: `train`, and `val` if there are validation tasks."""


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request for a training."""

    target: str
    build: Callable[[str], Files]
    """Builds the target's rows in a trainer's format, or takes them from the cache."""
    model: str = DEFAULT_MODEL
    steps: int | None = None
    """Number of steps; None means the trainer's default."""
    num_tasks: int | None = None
    taskset: Mapping[str, str] = {}
    """Dotted overrides of the target's own keys."""
    overrides: Sequence[str] = ()
    """The trainer's own keys, as `KEY=VALUE`; they override the plan."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A training that is ready to start."""

    trainer: str
    package: str
    """What must be installed, and how."""
    install: str
    data: dict[str, Any]
    config: dict[str, str]
    """The trainer's keys that the plan sets; all others keep the trainer's defaults."""
    command: list[str]
    environment: dict[str, str] = {}
    """Environment variables that the command needs in addition to the existing ones."""

    @property
    def installed(self) -> str | None:
        """The version of the trainer that is installed in this Python."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def plan(trainer: str, request: TrainRequest) -> Launch:
    if trainer not in TRAINERS:
        other = trainer.lower().replace("_", "-")
        other = next((name for name in _OTHERWISE if name.replace("-", "") == other.replace("-", "")), other)
        if other in _OTHERWISE:
            raise UsageError(f"{other} is not started by `treetune train`", remedy=_OTHERWISE[other])
        raise UnknownNameError.of("trainer", trainer, TRAINERS)
    module, _, function = TRAINERS[trainer].partition(":")
    launch: Launch = getattr(importlib.import_module(module), function)(request)
    return launch


def run_command(run: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None) -> None:
    """Run the command `python -m treetune.trainers.NAME`; a `TreetuneError` ends the process with its message."""
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except TreetuneError as error:
        sys.exit(f"error: {error}")


def merge(planned: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Merge the keys. The user's keys replace planned ones and come last. A key keeps its prefix (hydra's `+`)."""
    given = [split_override(override) for override in overrides]
    bare = {key.lstrip("+~") for key, _ in given}
    ours = {key: as_text(value) for key, value in planned.items() if value is not None}
    return {key: value for key, value in ours.items() if key.lstrip("+") not in bare} | dict(given)


def split_override(override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    if not equals and key.startswith("~"):  # hydra's way to delete a key
        return key, ""
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w.@/\-\[\]]+", key):
        raise UsageError(f"{override!r} is no override", remedy="a trainer's own keys are set as KEY=VALUE")
    return key, value


def words(config: Mapping[str, str]) -> list[str]:
    """Return the keys as command-line arguments."""
    return [key if key.startswith("~") and not value else f"{key}={value}" for key, value in config.items()]


def as_text(value: Any) -> str:
    """Return a value as text that hydra and YAML read."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_text, value))}]"
    return quote(value) if isinstance(value, str) and not re.fullmatch(r"[\w./:@\-]+", value) else str(value)


def quote(text: str) -> str:
    """Quote text so that hydra sees no key, comma or `${...}` in it."""
    escaped = escape_text(text).replace("'", "\\'")
    return f"'{escaped}'"


def paths(files: Files, split: str) -> list[str]:
    return [file.path for file in files.get(split, ())]


def describe_files(files: Files) -> dict[str, Any]:
    """Describe the files of each split for the plan, with size and shares for a file that a mixture drew."""
    drawn = {
        f"{split}_mixture": f"{file.rows:,} rows: "
        + ", ".join(f"{name} {count:,} ({count / file.rows:.1%})" for name, count in file.shares.items())
        for split, found in files.items()
        for file in found
        if file.shares
    }
    return {split: paths(files, split) for split in files} | drawn


def count_rows(files: Files, split: str = "train") -> int:
    return sum(file.rows for file in files.get(split, ()))


def batch_size(files: Files, wanted: int = 64) -> int:
    """Return at most the number of rows: trainers drop an incomplete batch."""
    return max(1, min(wanted, count_rows(files)))


def count_gpus() -> int:
    """Return the driver's GPU count; 1 if there is no driver, so that a plan can be read anywhere."""
    if shutil.which("nvidia-smi") is None:
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    return max(1, sum(line.startswith("GPU ") for line in listed.splitlines()))
