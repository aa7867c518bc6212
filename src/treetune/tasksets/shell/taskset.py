"""OS interaction: AgentBench's samples on a machine in the sandbox. Multi-turn.

    treetune validate os-interaction --taskset.data AgentBench/data/os_interaction/data
    treetune eval os-interaction --taskset.data ... --taskset.split dev -m scripted:gold

The host's system replaces AgentBench's images, unless `rootfs` or `sandbox` says otherwise. A sample that needs
something else is refused, and the error names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from treetune.chat.message import Message
from treetune.core.score import VALID, Verdict, invalid
from treetune.core.taskset import Taskset
from treetune.errors import ConfigError
from treetune.sandbox.machines import MachineConfig
from treetune.system.digest import digest
from treetune.tasksets.shell import SETUP_SECONDS, Unservable
from treetune.tasksets.shell.environment import (
    COMMAND_SECONDS,
    MEMORY_MB,
    SHOWN_CHARS,
    OSInteractionEnvironment,
    OSTask,
)
from treetune.tasksets.shell.sample import OSSample, SampleEvaluation, read_sample
from treetune.tasksets.turns import Positive

Split = Literal["std", "dev", "env_train"]
TRAINING, TRAINING_SCRIPTS = "train_0317/training.json", "7"
"""For `env_train`: where AgentBench keeps its samples and the scripts that they name."""


class OSInteractionConfig(MachineConfig, frozen=True, kw_only=True):
    root: str | None = None
    """A checkout of AgentBench; its samples and scripts are used unless the next two keys name others."""
    data: str | None = None
    """AgentBench's `data/os_interaction/data` folder, one JSON file of samples, or a folder with such files."""
    split: Split = "std"
    """The samples to take from a folder: those in its folders, in `dev.json`, or in `train_0317/training.json` next to
    it."""
    scripts_root: str | None = None
    """AgentBench's `data/os_interaction/scripts` folder."""
    unsupported: Literal["refuse", "skip"] = "refuse"
    """What to do with samples that cannot be served here: `refuse` fails each one when it runs, `skip` leaves them
    out."""
    max_turns: Positive = OSInteractionEnvironment.CONTRACT.turns
    """The maximum number of actions in an episode."""
    command_seconds: Annotated[float, msgspec.Meta(gt=0)] = COMMAND_SECONDS
    """Timeout of one script, in seconds."""
    setup_seconds: Annotated[float, msgspec.Meta(gt=0)] = SETUP_SECONDS
    """Timeout of each of the sample's own scripts (`init`, `start`, `example`, `check`), in seconds."""
    output_chars: Positive = SHOWN_CHARS
    """How many characters of a script's output are shown."""
    memory_mb: Annotated[int, msgspec.Meta(ge=64)] = MEMORY_MB
    """Memory in MB for all processes of an episode together."""
    image: str = "local-os/default"
    """The image for samples that name none, with `docker`."""


class OSInteraction(Taskset[OSTask, OSInteractionConfig]):
    NEEDS_CONTAINER = True

    def __init__(self, config: OSInteractionConfig | None = None) -> None:
        super().__init__(config)
        self.config = self.config.resolve()
        place = {name: getattr(self.config, name) for name in ("data", "scripts_root")}
        if self.config.root is not None:
            checkout = Path(self.config.root).expanduser() / "data" / "os_interaction"
            place["data"] = place["data"] or checkout / "data"
            if (checkout / "scripts").is_dir():
                place["scripts_root"] = place["scripts_root"] or checkout / "scripts"
        if place["data"] is None:
            raise ConfigError([("taskset.data", "is required: samples (or taskset.root: a checkout of AgentBench)")])
        # Absolute, so that runs can be resumed from another folder.
        fixed = {key: str(Path(path).expanduser().resolve()) for key, path in place.items() if path is not None}
        self.config = msgspec.structs.replace(self.config, **fixed)
        faults = [(f"taskset.{key}", f"there is no {path}") for key, path in fixed.items() if not Path(path).exists()]
        if faults:
            raise ConfigError(faults)
        self._samples = list(self._read_samples())
        if not self._samples:
            files = self._find_files(Path(fixed["data"]))
            what = "samples that can be served here" if files else "JSON file of samples, directly or in a folder"
            raise ConfigError([("taskset.data", f"{self.config.data} has no {what}")])

    def count(self) -> int:
        return len(self._samples)

    def task_at(self, index: int) -> OSTask:
        name, sample = self._samples[index]
        config = self.config
        limits = {key: getattr(config, key) for key in ("max_turns", "command_seconds", "output_chars", "memory_mb")}
        if config.setup_seconds != SETUP_SECONDS:
            limits["setup_seconds"] = config.setup_seconds
        return OSTask(
            prompt=write_prompt(sample, config.max_turns, config.command_seconds),
            env_class="os-interaction",
            ability="shell",
            extra_info={"name": name, **limits, **config.describe_machine(sample.image or config.image)},
            sample=sample,
        )

    async def gold(self, task: OSTask) -> list[str] | None:
        """Return what the sample's example prints and does, run on a new machine."""
        evaluation = task.sample.evaluation
        if evaluation.match is not None:
            return [f"Act: answer({evaluation.match})"]
        if task.sample.refusal is not None or evaluation.example is None:
            return None
        environment = OSInteractionEnvironment(task)
        try:
            await environment.start()
            said = environment.reference
            if not evaluation.has_reference:
                said = (await environment.run_example(environment.shell)).text
        finally:
            await environment.close()
        answer = [f"Act: answer({said.strip()})"]
        if evaluation.has_reference or evaluation.example.language != "bash":
            return answer
        return [f"Act: bash\n\n````bash\n{evaluation.example.code}\n````", *answer]

    def validate(self, task: OSTask) -> Verdict:
        return invalid(task.sample.refusal) if task.sample.refusal is not None else VALID

    def source(self) -> str:
        return digest([(name, msgspec.to_builtins(sample)) for name, sample in self._samples])

    def _read_samples(self) -> Iterator[tuple[str, OSSample]]:
        data, root = Path(self.config.data or ""), self.config.scripts_root
        for path in self._find_files(data):
            try:
                content = msgspec.json.decode(path.read_bytes())
            except (msgspec.DecodeError, OSError) as error:
                raise ConfigError([("taskset.data", f"{path} cannot be read: {error}")]) from error
            # AgentBench keeps scripts/7/init/x.sh for a sample of data/7, and scripts/dev for dev.json.
            folder = TRAINING_SCRIPTS if self.config.split == "env_train" else path.parent.name
            scripts = [Path(root, name) for name in (folder, path.stem, "")] if root else []
            name = str(path.relative_to(data)) if path.is_relative_to(data) and path != data else path.name
            for number, row in enumerate(content if isinstance(content, list) else [content]):
                if not isinstance(row, dict) or "description" not in row:
                    raise ConfigError([("taskset.data", f"{path}: sample {number} has no description")])
                try:
                    sample = read_sample(row, scripts, containers=self.config.has_images)
                except Unservable as error:
                    if self.config.unsupported == "skip":
                        warnings.warn(f"os-interaction: a sample is left out: {error}", stacklevel=4)
                        continue
                    description = str(row["description"])
                    sample = OSSample(description=description, evaluation=SampleEvaluation(), refusal=str(error))
                yield f"{name}:{number}", sample

    def _find_files(self, data: Path) -> list[Path]:
        if data.is_file():
            return [data]
        if self.config.split != "std":
            return [data / "dev.json" if self.config.split == "dev" else data.parent / TRAINING]
        # AgentBench's own folder has its samples in subfolders, next to files that are not samples.
        found = list(data.glob("*/*.json")) or list(data.glob("*.json"))
        return sorted(found, key=lambda path: (len(path.parent.name), path))


def write_prompt(sample: OSSample, max_turns: int, command_seconds: float) -> list[Message]:
    rules = (
        "You are an assistant that acts on a Linux machine as a person at its shell would. You are asked a question "
        "about it, or to do something on it. In each turn think, then do exactly one of three things.\n\n"
        "Run a script; you are shown what it prints:\n\nThink: I should look around.\n\nAct: bash\n\n"
        "```bash\nls -la\n```\n\nGive the answer, and nothing but the answer, in the parentheses:\n\n"
        "Think: I have found it.\n\nAct: answer(42)\n\n"
        "Or, where nothing was asked but to do something, say that it is done:\n\nThink: It is done.\n\nAct: finish\n\n"
        "The shell lives on from turn to turn. It reads nothing from you while a script runs, and a script may take "
        f"{command_seconds:g} seconds. You have {max_turns} turns."
    )
    return [{"role": "system", "content": rules}, {"role": "user", "content": sample.description}]
