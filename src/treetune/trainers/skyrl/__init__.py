"""SkyRL: its skyrl-gym knows Treetune's environments, and its config gets the tasks.

    register()                               # inside the entry-point task, before training begins
    run_with_tasks(config, "tasks.yaml")     # builds the tasks, sets data.train_data and data.val_data, runs SkyRL

Or from a shell, with SkyRL's own overrides after it:

    python -m treetune.trainers.skyrl tasks=tasks.yaml trainer.policy.model.path=MODEL
    python -m treetune.trainers.skyrl tasks=train.parquet val_tasks=val.parquet --env spell=spell.py:Spell ...

`skyrl:NAME` is the other way round: a skyrl-gym environment in Treetune (see `gym.py`). SkyRL is never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treetune.errors import MissingExtraError, TreetuneError, UsageError
from treetune.trainers.skyrl.registry import install_hook, register, remove_hook
from treetune.trainers.skyrl.tasks import (
    PYTHON,
    cli_overrides,
    refuse_old_python,
    resolve_tasks_into_config,
    run_with_tasks,
    shell_words,
)

if TYPE_CHECKING:
    from treetune.trainers.skyrl.prompt_dataset import PromptDataset

__all__ = [
    "PromptDataset",
    "cli_overrides",
    "install_hook",
    "main",
    "register",
    "remove_hook",
    "resolve_tasks_into_config",
    "run_with_tasks",
    "shell_words",
]


def main(arguments: Sequence[str] | None = None) -> None:
    """`tasks=FILE.yaml`, or `tasks=` and `val_tasks=` with files of rows (repeatable), `--env [ID=]file.py:Class`, and
    SkyRL's own overrides. SkyRL's `trainer.override_entrypoint` may name this module."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        environments, given = _take_environments(given)
        tasks, val_tasks = (_values(given, key) for key in ("tasks", "val_tasks"))
        if not tasks:
            raise UsageError(
                "tasks=FILE is missing", remedy="a YAML file with train_tasks and val_tasks, or files of SkyRL's rows"
            )
        own = ("tasks", "val_tasks", "trainer.override_entrypoint")
        rest = [part for part in given if part.partition("=")[0] not in own]
        refuse_old_python()
        try:
            from skyrl.train.config import SkyRLTrainConfig
        except ImportError as error:
            raise MissingExtraError(
                f"SkyRL cannot be imported: {error}", remedy=f"install skyrl, on Python {'.'.join(map(str, PYTHON))}"
            ) from error
        config = SkyRLTrainConfig.from_cli_overrides(rest)
        if not any(part.startswith("data.val_data=") for part in rest):
            config.data.val_data = []  # unless there are val_tasks; SkyRL's default is a file of its own
        named = tasks[0] if len(tasks) == 1 else tasks
        run_with_tasks(config, named, val_tasks=val_tasks, environments=environments)
    except TreetuneError as error:
        sys.exit(f"error: {error}")


def _values(given: Sequence[str], key: str) -> list[str]:
    return [value for name, _, value in (part.partition("=") for part in given) if name == key and value]


def _take_environments(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The environments of `--env`, by the id that rows have, and the other arguments."""
    found: dict[str, str] = {}
    rest: list[str] = []
    parts = iter(given)
    for part in parts:
        if part != "--env" and not part.startswith("--env="):
            rest.append(part)
            continue
        value = next(parts, "") if part == "--env" else part.removeprefix("--env=")
        id, _, spec = value.rpartition("=")
        if not spec or spec.startswith("-"):
            raise UsageError("--env names no environment", remedy="--env file.py:Class, or --env ID=file.py:Class")
        found[id or spec] = spec
    return found, rest


def __getattr__(name: str) -> Any:
    """PromptDataset is loaded when it is first used: registering environments needs no Arrow."""
    if name != "PromptDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.prompt_dataset"), name)
