"""Dataset tasks for verl.

    from treetune_verl.tasks import run_with_tasks

`Task` is Treetune's `DatasetTaskset`. The functions are loaded when they are called: a cached path needs none of them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treetune.datasets.taskset import DatasetTaskset as Task

__all__ = ["Task", "get_dataset_paths", "resolve_tasks_into_config", "run_with_tasks", "score_by_tasks", "start"]


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """The parquet path of each task, built where it is not cached; refused where the files could not be joined."""
    from treetune.trainers.verl import get_dataset_paths as paths

    return paths(task_configs, cache_dir)


def resolve_tasks_into_config(config: Any) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; nothing else is touched."""
    from treetune.trainers.verl import resolve_tasks_into_config as resolve

    return resolve(config)


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config and start verl's own training with it."""
    from treetune.trainers.verl import run_with_tasks as run

    return run(config)


def score_by_tasks(config: Any) -> Any:
    """Name our reward function in a verl config that names no other way of scoring; nothing else is touched."""
    from treetune.trainers.verl import score_by_tasks as score

    return score(config)


def start(config: Any) -> Any:
    """Start the training of the verl that is installed: what `run_ppo(config)` was before verl 0.9."""
    from treetune.trainers.verl import start as begin

    return begin(config)
