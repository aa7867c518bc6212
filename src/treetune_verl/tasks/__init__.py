"""Dataset tasks for verl.

    from treetune_verl.tasks import run_with_tasks

`Task` is Treetune's `DatasetTaskset`.
"""

from typing import Any

from treetune.datasets.resolve import get_dataset_paths, resolve_tasks_into_config
from treetune.datasets.taskset import DatasetTaskset as Task

__all__ = ["Task", "get_dataset_paths", "resolve_tasks_into_config", "run_with_tasks"]


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config and start verl's own training with it."""
    from treetune.trainers.verl import run_with_tasks as run

    return run(config)
