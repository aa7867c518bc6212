"""SkyRL: its skyrl-gym knows Treetune's environments, and its config gets the tasks.

    register()                               # inside the entry-point task, before training begins
    run_with_tasks(config, "tasks.yaml")     # builds the tasks, sets data.train_data and data.val_data, runs SkyRL

From a shell: `python -m treetune.trainers.skyrl tasks=tasks.yaml`, with SkyRL's own overrides after it. `skyrl:NAME` is
the other way round: a skyrl-gym environment in Treetune (see `gym.py`). SkyRL is never changed.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from treetune.errors import TreetuneError, UsageError
from treetune.trainers.skyrl.prompt_dataset import PromptDataset
from treetune.trainers.skyrl.registry import install_hook, register, remove_hook
from treetune.trainers.skyrl.tasks import (
    cli_overrides,
    missing_skyrl,
    refuse_old_python,
    resolve_tasks_into_config,
    run_with_tasks,
    shell_words,
)

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
    try:
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--env", action="append", default=[], metavar="[ID=]file.py:Class")
        options, given = parser.parse_known_args(arguments)
        environments = {(id or spec): spec for id, _, spec in (value.rpartition("=") for value in options.env)}
        pairs = [(part, *part.partition("=")[::2]) for part in given]
        tasks, val_tasks = (
            [value for _, name, value in pairs if name == key and value] for key in ("tasks", "val_tasks")
        )
        own = ("tasks", "val_tasks", "trainer.override_entrypoint")
        rest = [part for part, name, _ in pairs if name not in own]
        if not tasks:
            raise UsageError(
                "tasks=FILE is missing", remedy="a YAML file with train_tasks and val_tasks, or files of SkyRL's rows"
            )
        refuse_old_python()
        try:
            from skyrl.train.config import SkyRLTrainConfig
        except ImportError as error:
            raise missing_skyrl(error) from error
        config = SkyRLTrainConfig.from_cli_overrides(rest)
        if not any(part.startswith("data.val_data=") for part in rest):
            config.data.val_data = []  # unless there are val_tasks; SkyRL's default is a file of its own
        named = tasks[0] if len(tasks) == 1 else tasks
        run_with_tasks(config, named, val_tasks=val_tasks, environments=environments)
    except TreetuneError as error:
        sys.exit(f"error: {error}")
