"""Dataset tasks for verl.

    from treetune_verl.tasks import run_with_tasks

`Task` is Treetune's `DatasetTaskset`; the functions are those of `treetune.trainers.verl`, loaded when they are first
used: a cached path needs none of them.
"""

from typing import TYPE_CHECKING, Any

from treetune.data.datasets.taskset import DatasetTaskset as Task

if TYPE_CHECKING:
    from treetune.trainers.verl import (
        get_dataset_paths,
        play_by_tasks,
        resolve_tasks_into_config,
        run_with_tasks,
        score_by_tasks,
        start,
    )

__all__ = [
    "Task",
    "get_dataset_paths",
    "play_by_tasks",
    "resolve_tasks_into_config",
    "run_with_tasks",
    "score_by_tasks",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treetune.trainers import verl

    return getattr(verl, name)
