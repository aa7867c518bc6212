"""SkyRL: its skyrl-gym knows Treetune's environments, and its config gets the tasks.

    register()                               # inside the entry-point task, before training begins
    run_with_tasks(config, "tasks.yaml")     # builds the tasks, sets data.train_data and data.val_data, runs SkyRL

Or from a shell, with SkyRL's own overrides after it:

    python -m treetune.trainers.skyrl tasks=tasks.yaml trainer.policy.model.path=MODEL

`skyrl:NAME` is the other way round: a skyrl-gym environment in Treetune (see `skyrl_gym`). SkyRL is never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from treetune.errors import MissingExtraError, TreetuneError, UsageError
from treetune.trainers.skyrl_hook import install_hook, remove_hook
from treetune.trainers.skyrl_registry import register
from treetune.trainers.skyrl_tasks import resolve_tasks_into_config, run_with_tasks

__all__ = ["install_hook", "main", "register", "remove_hook", "resolve_tasks_into_config", "run_with_tasks"]


def main(arguments: Sequence[str] | None = None) -> None:
    """`tasks=FILE.yaml` and SkyRL's own overrides. SkyRL's `trainer.override_entrypoint` may name this module."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = dict(
        part.partition("=")[::2] for part in given if part.startswith(("tasks=", "trainer.override_entrypoint="))
    )
    rest = [part for part in given if part.partition("=")[0] not in own]
    try:
        if not own.get("tasks"):
            raise UsageError("tasks=FILE.yaml is missing", remedy="the file with train_tasks and val_tasks")
        try:
            from skyrl.train.config import SkyRLTrainConfig
        except ImportError as error:
            raise MissingExtraError(f"SkyRL cannot be imported: {error}", remedy="install skyrl") from error
        config = SkyRLTrainConfig.from_cli_overrides(rest)
        if not any(part.startswith("data.val_data=") for part in rest):
            config.data.val_data = []  # unless there are val_tasks; SkyRL's default is a file of its own
        run_with_tasks(config, own["tasks"])
    except TreetuneError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
