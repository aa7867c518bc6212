"""Plans the start of a trainer on any tasks: its config, its data, and its command.

    launch = plan("verl", TrainRequest(target="sums.yaml", model="Qwen/Qwen3-0.6B", build=build))
    launch.command         # python -m verl.trainer.main_ppo data.train_files=[...] ...

`train_run.py` has what applies to every trainer, such as names and folders. Each trainer has a function that translates
that into the trainer's own keys. It does not import the trainer, so plans work on any machine.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from treetune.config.interpolation import escape_text, override_values
from treetune.config.structs import convert, load_yaml
from treetune.core.contract import Contract, Credit
from treetune.core.fingerprint import taskset_fingerprint
from treetune.core.from_config import build_taskset
from treetune.core.mixture import parts_of
from treetune.core.taskset import Taskset
from treetune.data.rows.agent_column import refuse_agents
from treetune.data.rows.scorer import refuse_groups
from treetune.errors import TreetuneError, UnknownNameError, UsageError, did_you_mean, plural
from treetune.gateway import read_agent
from treetune.tasksets.target import is_server, locate, read_target
from treetune.trainers.episodes import EpisodeSettings
from treetune.trainers.held_out import NONE, HeldOut, hold_out, hold_out_rows
from treetune.trainers.lengths import Lengths
from treetune.trainers.train_run import Beginning, TrainRun, absolute

TRAINERS = {
    "areal": "treetune.trainers.areal.launch:plan",
    "skyrl": "treetune.trainers.skyrl.launch:plan",
    "slime": "treetune.trainers.slime.launch:plan",
    "trl": "treetune.trainers.trl.launch:plan",
    "verl": "treetune.trainers.verl.launch:plan",
}
"""The planning function of each trainer. Documented in docs/trainers.md and docs/trainers/."""

_OTHERWISE = {
    "prime-rl": "prime-rl loads a package: treetune export verifiers TARGET --to my-env",
    "verifiers": "verifiers loads a package: treetune export verifiers TARGET --to my-env",
    "openenv": "trainers that speak OpenEnv play on a server: treetune serve TARGET --openenv :8000",
    "nemo-gym": "NeMo Gym reads JSON lines: treetune convert ROWS tasks.jsonl --to nemo-gym",
}
"""Trainers that `treetune train` does not start, and how they get their tasks."""

_RESUMED = ("trainer.resume_from_path", "trainer.resume_path", "resume_from_checkpoint", "load")
"""Keys of the trainers that name a checkpoint to continue from."""
AS_SET = "as you set it"
OWN = ("max_turns", "turn_discount", "agent")
"""Keys of ours that every trainer's command takes besides its own."""
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
    """The trainer's own keys, as `KEY=VALUE`, which override the plan, and those of `OWN`."""
    val: int = 64
    """How many tasks to hold out for validation, if the target declares none."""
    log: Sequence[str] = ()
    """Where to log in addition: `wandb`, `mlflow`, `tensorboard`."""
    output: Path | None = None
    """The run folder; by default one that is named after the training."""
    resume: bool = False
    trust: bool = False
    cache_dir: Path | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The turn limit, the discount and the agent that the user sets, if any."""
        pairs = map(split_override, self.overrides)
        own = override_values({}, {key: value for key, value in pairs if key in OWN})
        convert(own, EpisodeSettings, source="the command line")  # raises if they are invalid
        return {key: absolute(value) if key == "agent" else value for key, value in own.items() if value is not None}

    @property
    def theirs(self) -> list[str]:
        """The trainer's own keys."""
        return [word for word in self.overrides if word.partition("=")[0] not in OWN]

    def count_epochs(self, key: str, default: int, per_epoch: int) -> int:
        """Return the number of epochs, by default as many as `steps` takes."""
        return self.given(key, max(default, -(-(self.steps or 1) // max(1, per_epoch))))

    def log_to(self, *known: str, most: int = 3) -> list[str]:
        """Return where to log; refuse loggers that the trainer does not know, and more loggers than it supports."""
        for name in self.log:
            if name not in known:
                raise UsageError(f"this trainer does not log to {name}", remedy=f"use one of {', '.join(known)}")
        if len(self.log) > most:
            raise UsageError("this trainer logs to one place only", remedy="pass --log once")
        return list(self.log)

    def given(self, key: str, default: int) -> int:
        """The number that the user gave the trainer for a key, or else the default."""
        values = [value for name, value in map(split_override, self.overrides) if name.lstrip("+") == key]
        return int(values[-1]) if values and values[-1].isdecimal() else default


class TargetTasks(NamedTuple):
    """The tasks of a target; None for those of a task server."""

    train: Taskset[Any, Any] | None
    declared: Taskset[Any, Any] | None = None
    """The `val_tasks` of a YAML file."""

    def hold_out(self, request: TrainRequest) -> HeldOut:
        assert self.train is not None
        return hold_out(self.train, request.val, request.num_tasks, self.declared)

    def contracts(self) -> list[Contract]:
        """The contracts of the tasks. The first task of each source stands for the others."""
        parts = parts_of(self.train) if self.train is not None else ()
        return [part.contract_of(task) for part in parts for task in part.draw(1)]

    def credits(self) -> set[tuple[Credit, float]]:
        """The credits that the tasks declare, with their discounts."""
        return {contract.turn_credit for contract in self.contracts()}

    def check_groups(self) -> None:
        """For trainers that score each episode alone: refuse tasks that are only scored in groups, and warn of a
        `score_group` that is not called. The first task of each source stands for the others."""
        for taskset in filter(None, (self.train, self.declared)):
            for part in parts_of(taskset):
                for task in part.draw(1) if part.scores_groups and not hasattr(part, "sources") else ():
                    if (lost := refuse_groups(part, task)) is not None:
                        warnings.warn(lost, stacklevel=3)

    def check_agent(self, agent: str, *, on_server: bool = False) -> None:
        """Refuse an agent that cannot be started, and tasks that agents cannot play."""
        read_agent(agent)
        for part in (part for taskset in filter(None, self) for part in parts_of(taskset)):
            for task in part.draw(1):
                refuse_agents(part, task, on_server=on_server)


class Setting(NamedTuple):
    """A key of a trainer that the plan sets."""

    value: Any
    """None leaves the trainer's default."""
    why: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A training that is ready to start."""

    trainer: str
    package: str
    """What must be installed, and how to install it."""
    install: str
    data: dict[str, Any]
    config: dict[str, str]
    """The trainer's keys that the plan sets; all others keep the trainer's defaults."""
    command: list[str]
    environment: dict[str, str] = {}
    """Environment variables that the command needs in addition to the existing ones."""
    run: TrainRun
    checkpoints: str
    """The pattern, in the run folder, of the file that names the newest checkpoint."""
    saved: str
    """The pattern of the checkpoint after a step, with `{step}`, or `{before}` for trainers that count from 0."""
    watched: bool = True
    """Whether the rollouts are written to the run folder."""
    reasons: dict[str, str] = {}
    """Why the plan sets a key."""

    @property
    def installed(self) -> str | None:
        """The version of the trainer that is installed in this Python."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def find_checkpoint(self, step: int) -> Path | None:
        pattern = self.saved.format(step=step, before=step - 1)
        return next(self.run.folder.glob(pattern), None) if step else None

    def read_defaults(self) -> dict[str, Any]:
        """Return the trainer's own value of each key, read in another process; empty if it cannot be read."""
        module = TRAINERS[self.trainer].partition(":")[0]
        asked = [sys.executable, "-c", _READ_DEFAULTS, module, json.dumps(self.config)]
        done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, **self.environment})
        last = done.stdout.splitlines()[-1:]
        return dict(json.loads(last[0])) if done.returncode == 0 and last else {}

    def refuse_unknown(self, defaults: Mapping[str, Any]) -> None:
        """Refuse keys that the installed trainer does not have. If a key has no value, any key may be added below
        it."""
        known = {".".join(key.split(".")[:count]) for key in defaults for count in range(1, key.count(".") + 2)}
        for key in filter(re.compile(r"\w[\w.\-]*").fullmatch, self.config):
            above = [key.rpartition(".")[0]]
            while above[-1]:
                above.append(above[-1].rpartition(".")[0])
            if key not in known and not any(place in defaults and not defaults[place] for place in above):
                near = did_you_mean(key, known)
                raise UsageError(f"{self.trainer} {self.installed} has no {key}{near}", remedy="see its own docs")


_READ_DEFAULTS = """
import importlib, json, sys
from treetune.trainers.launch import flatten
read_defaults = getattr(importlib.import_module(sys.argv[1]), "read_defaults", lambda _: {})
print("\\n" + json.dumps(flatten(read_defaults(json.loads(sys.argv[2]))), default=str))
"""


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested values under dotted keys. Empty mappings stay."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        found |= flatten(value, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return found


def plan(trainer: str, request: TrainRequest) -> Launch:
    if trainer not in TRAINERS:
        other = trainer.lower().replace("_", "-")
        other = next((name for name in _OTHERWISE if name.replace("-", "") == other.replace("-", "")), other)
        if other in _OTHERWISE:
            raise UsageError(f"{other} cannot be started by `treetune train`", remedy=_OTHERWISE[other])
        raise UnknownNameError.of("trainer", trainer, TRAINERS)
    module, _, function = TRAINERS[trainer].partition(":")
    tasks = load_tasks(request)
    beginning = Beginning(
        trainer=trainer,
        target=absolute(request.target),
        model=absolute(request.model),
        tasks=[taskset_fingerprint(taskset) for taskset in tasks if taskset is not None],
        num_tasks=request.num_tasks,
        val=request.val,
        taskset=dict(request.taskset),
        keys=list(request.overrides),
    )
    run = TrainRun.of(beginning, request.output, resume=request.resume)
    launch: Launch = getattr(importlib.import_module(module), function)(request, run, tasks)
    needs_number = "num_tasks" in launch.data and launch.data["num_tasks"] is None and "num_tasks" not in launch.config
    if needs_number and tasks.train is not None and tasks.train.endless:
        raise UsageError(
            f"{tasks.train.name} is endless: how many tasks should it train on?", remedy="pass --num-tasks (-n)"
        )
    own = request.own
    if (agent := own.pop("agent", None)) is not None:
        tasks.check_agent(agent, on_server=trainer == "areal" or is_server(request.target))
        launch.data["agent"] = agent
    if own:
        set_here = ", ".join(f"{key}={value}" for key, value in own.items())
        launch.data["contract"] = f"{set_here}, {AS_SET}; a lower turn limit of the tasks stays"
    for key in _RESUMED:
        if key in launch.config and key in launch.reasons and launch.reasons[key] == AS_SET:
            run.check_origin(Path(launch.config[key]))
    return launch


def load_tasks(request: TrainRequest) -> TargetTasks:
    if is_server(request.target):
        return TargetTasks(None)
    declared = load_split(request, "val") if declares_lists(request.target, "val_tasks") else None
    return TargetTasks(load_split(request, "train"), declared)


def load_split(request: TrainRequest, split: str) -> Taskset[Any, Any]:
    overrides = keys_of_split(request, split)
    if request.trust and not declares_lists(request.target):
        overrides["taskset.trust"] = "true"
    return build_taskset(read_target(request.target, overrides, split)["taskset"], raw=overrides, source=request.target)


def keys_of_split(request: TrainRequest, split: str) -> dict[str, str]:
    """The target's own keys, without those of the other list."""
    other = "val_tasks" if split == "train" else "train_tasks"
    return {key: value for key, value in request.taskset.items() if not key.startswith(other)}


def declares_lists(target: str, *names: str) -> bool:
    """Whether a target is a YAML file with `train_tasks` or `val_tasks`, or with the named list."""
    path = locate(target)
    found = load_yaml(path) if Path(path).suffix in (".yaml", ".yml") else {}
    return any(found.get(name) for name in names or ("train_tasks", "val_tasks"))


def run_command(run: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None) -> None:
    """Run the command `python -m treetune.trainers.NAME`; a `TreetuneError` ends the process with its message."""
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except TreetuneError as error:
        sys.exit(f"error: {error}")


def merge(planned: Mapping[str, Setting], overrides: Sequence[str]) -> dict[str, str]:
    """Merge the keys. The user's keys replace planned ones and come last. A key keeps its prefix (hydra's `+`)."""
    given = [split_override(override) for override in overrides]
    bare = {key.lstrip("+~") for key, _ in given}
    ours = {key: as_text(setting.value) for key, setting in planned.items() if setting.value is not None}
    return {key: value for key, value in ours.items() if key.lstrip("+") not in bare} | dict(given)


def reasons(planned: Mapping[str, Setting], config: Mapping[str, str]) -> dict[str, str]:
    """Give the reason for each key of a merged config."""
    own = {key: setting.why for key, setting in planned.items() if config.get(key) == as_text(setting.value)}
    return {key: own.get(key, AS_SET) for key in config}


def split_override(override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    if not equals and key.startswith("~"):  # hydra's way to delete a key
        return key, ""
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w.@/\-\[\]]+", key):
        raise UsageError(f"{override!r} is not an override", remedy="a trainer's own keys are set as KEY=VALUE")
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
    """Quote text so that hydra does not read a key, a comma or `${...}` in it."""
    escaped = escape_text(text).replace("'", "\\'")
    return f"'{escaped}'"


def with_validation(request: TrainRequest, files: Files, tasks: TargetTasks, format: str) -> tuple[Files, str]:
    """Add the files to validate with to those that were built, unless the target declares some; return a description of
    them."""
    if files.get("val"):
        return files, f"{plural(count_rows(files, 'val'), 'row')} of val_tasks"
    if not request.val:
        return files, f"{NONE}--val 0"
    from treetune.data.datasets.build import build_rows

    if request.num_tasks is not None and tasks.train is not None and len(files["train"]) == 1:
        held = tasks.hold_out(request)
        if isinstance(held.train, range):  # the rows to train on stay as they were built
            if not held.val:
                return files, held.what
            sidecar, path = build_rows(held.select(tasks.train), format, None, request.cache_dir)
            return {**files, "val": [BuiltFile(str(path), sidecar.rows)]}, held.what
    parts, what = hold_out_rows([Path(file.path) for file in files["train"]], request.val, request.cache_dir)
    if not parts:
        return files, what
    return {split: [BuiltFile(str(path), rows) for path, rows in part] for split, part in parts.items()}, what


def paths(files: Files, split: str) -> list[str]:
    return [file.path for file in files.get(split, ())]


def describe_files(files: Files, validation: str) -> dict[str, Any]:
    """Describe the files of each split for the plan, with size and shares for a file that a mixture drew."""
    drawn = {
        f"{split}_mixture": f"{file.rows:,} rows: "
        + ", ".join(f"{name} {count:,} ({count / file.rows:.1%})" for name, count in file.shares.items())
        for split, found in files.items()
        for file in found
        if file.shares
    }
    return {split: paths(files, split) for split in files} | drawn | {"validation": validation}


def describe_lengths(lengths: Lengths, longer: int) -> dict[str, str]:
    """Describe the prompts for the plan, with the number of prompts that exceed the limit."""
    return {"lengths": lengths.what + (f"; {plural(longer, 'prompt')} too long, left out" if longer else "")}


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
