"""The run folder of a training: its name, its original settings, and where its checkpoints and rollouts are.

    run = TrainRun.of(Beginning(trainer="verl", target="letters.py:Letters", model="Qwen/Qwen3-0.6B"))
    run.name, run.folder           # letters-qwen3-0.6b-1f3a9c2e, runs/train-letters-qwen3-0.6b-1f3a9c2e
    run.check("checkpoints/*")     # refuses a folder that another training uses, and --resume of another plan

The name ends with a hash of everything that defines the training: the tasks and their code, the model, the trainer and
its keys. So another task gets another folder, and never finds this one's checkpoints. Only the number of steps may grow
when a training is resumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from treetune.core.fingerprint import Fingerprint, config_differences
from treetune.errors import ResumeError, UsageError, plural
from treetune.system.digest import digest
from treetune.system.folders import write_atomically

RUN = "TREETUNE_RUN"
"""The variable with the run folder, for the processes of a training that `treetune train` started."""
PLAN = "plan.json"
"""The original settings of a training, in its run folder."""
CHECKPOINTS, ROLLOUTS, VALIDATION = "checkpoints", "rollouts", "validation"
"""The folders in a run folder."""
PARTS = 10
"""How many checkpoints and validations a training has at least."""
_NAMED = 3
"""The maximum number of other trainings that a message names."""


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that defines a training."""

    trainer: str
    target: str
    model: str
    tasks: list[Fingerprint] = []
    """The tasksets to train on and to validate with; none for a task server."""
    num_tasks: int | None = None
    val: int = 0
    taskset: dict[str, str] = {}
    keys: list[str] = []
    """The trainer's own keys."""

    def differences(self, now: Beginning) -> list[str]:
        plain = [{**msgspec.to_builtins(each), "tasks": len(each.tasks)} for each in (self, now)]
        pairs = zip(self.tasks, now.tasks, strict=False)
        return config_differences(*plain) + [change for one, other in pairs for change in one.differences(other)]


class TrainRun(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    folder: Path
    beginning: Beginning
    resume: bool = False
    """Whether to continue from the newest checkpoint in the folder."""

    @classmethod
    def of(cls, beginning: Beginning, output: Path | None = None, *, resume: bool = False) -> Self:
        """`output` is the run folder, if the user named one."""
        name = f"{_slug(beginning.target)}-{_slug(beginning.model)}-{digest(beginning, 4)}"
        folder = (output or Path("runs") / f"train-{name}").expanduser().absolute()
        return cls(name=name, folder=folder, beginning=beginning, resume=resume)

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def rollouts(self) -> Path:
        return self.folder / ROLLOUTS

    @property
    def validation(self) -> Path:
        return self.folder / VALIDATION

    def environment(self, log: Sequence[str] = ()) -> dict[str, str]:
        """The variables for the trainer's processes."""
        board = {"TENSORBOARD_DIR": str(self.folder / "tensorboard")} if "tensorboard" in log else {}
        return {RUN: str(self.folder)} | board

    @property
    def used(self) -> bool:
        """Whether a training has left rollouts or checkpoints."""
        return any(any(place.iterdir()) for place in (self.checkpoints, self.rollouts) if place.is_dir())

    def check(self, newest: str) -> None:
        """Refuse to overwrite a training, and to resume a different one. `newest` is the pattern of the trainer's
        checkpoints in the folder."""
        plan = self.folder / PLAN
        if not self.resume:
            if self.used:
                raise UsageError(
                    f"{self.folder} already holds a training", remedy="pass --resume to continue it, or another -o"
                )
            return
        if not plan.exists():
            others = "".join(f"\n  {line}" for line in self._describe_others())
            remedy = "leave out --resume, or run it with its original settings"
            raise ResumeError(f"{self.folder} holds no training to resume{others}", remedy=remedy)
        if changes := _read(plan).differences(self.beginning):
            problem = "\n  ".join([f"{self.folder} holds another training:", *changes])
            raise ResumeError(problem, remedy="run it with its original settings, or start a new one with another -o")
        if not next(self.folder.glob(newest), None):
            remedy = f"remove {self.folder} and leave out --resume: it ended before its first checkpoint"
            raise ResumeError(f"{self.folder} has no checkpoint", remedy=remedy)

    def check_origin(self, checkpoint: Path) -> None:
        """Refuse a checkpoint in the run folder of another task or model. Other checkpoints do not record their tasks
        and model."""
        place = next((folder for folder in checkpoint.absolute().parents if (folder / PLAN).exists()), None)
        if place is None:
            return
        began = _read(place / PLAN)
        changed = msgspec.structs.replace(self.beginning, keys=began.keys, val=began.val, num_tasks=began.num_tasks)
        if changes := began.differences(changed):
            problem = "\n  ".join([f"{checkpoint} belongs to another training:", *changes])
            raise ResumeError(
                problem, remedy="pass a checkpoint of the same tasks and model as -m to begin with its weights"
            )

    def begin(self) -> None:
        """Make the folder, and write the original settings of the training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / PLAN, msgspec.json.encode(self.beginning))

    def _describe_others(self) -> list[str]:
        """Describe trainings of the same tasks and model, and how they differ."""
        found = []
        for place in sorted(self.folder.parent.glob(f"{self.folder.name.rpartition('-')[0]}-*/{PLAN}")):
            changes = _read(place).differences(self.beginning)
            found.append(f"{place.parent.name} differs: {'; '.join(changes[:_NAMED])}")
        return found[:_NAMED]


def interval(steps: int, *, to_the_end: bool = False) -> int:
    """The number of steps between two checkpoints, or two validations. With `to_the_end`, the nearby interval that
    comes closest to the last step, for trainers that do not add the last step by themselves."""
    tenth = max(1, steps // PARTS)
    return min(range(tenth, tenth // 2, -1), key=lambda each: steps % each) if to_the_end else tenth


def describe_interval(steps: int) -> str:
    return f"a tenth of {plural(steps, 'step')}"


def _read(plan: Path) -> Beginning:
    try:
        return msgspec.json.decode(plan.read_bytes(), type=Beginning)
    except (OSError, msgspec.MsgspecError) as error:
        raise ResumeError(f"{plan} cannot be read: {error}", remedy="start a new training with another -o") from None


def absolute(name: str) -> str:
    """A local path as an absolute one, so that a name means the same from every folder."""
    place, colon, rest = name.partition(":")
    path = Path(place).expanduser()
    return f"{path.absolute()}{colon}{rest}" if path.exists() and place else name


def _slug(name: str) -> str:
    """The readable part of a name, as a part of a file name."""
    place, _, attribute = name.rpartition(":")
    if place and attribute.isidentifier():
        last = attribute
    else:
        last = re.sub(r"^\w+://", "", name).rstrip("/").rpartition("/")[2]
        last = re.sub(r"\.(ya?ml|jsonl?|parquet|py)$", "", last)
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.") or "tasks"
