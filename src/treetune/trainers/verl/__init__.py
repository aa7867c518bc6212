"""verl: puts tasks into its config, rewards its rows, and plays them in an agent loop. verl itself is never modified.

run_with_tasks(config)                # train_tasks and val_tasks become parquet, then verl runs
resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files
score_by_tasks(config)                # from now on each row is scored by its own task
play_by_tasks(config)                 # from now on each row is played by its own task, over several turns
"""

from treetune.trainers.verl.config import (
    DEFAULT_LOOP,
    LOOPS,
    get_dataset_paths,
    name_agents,
    play_by_tasks,
    resolve_tasks_into_config,
    run_with_tasks,
    start,
    write_loops,
)
from treetune.trainers.verl.reward import compute_score, score_by_tasks, warn_of_unscored

__all__ = [
    "DEFAULT_LOOP",
    "LOOPS",
    "compute_score",
    "get_dataset_paths",
    "name_agents",
    "play_by_tasks",
    "resolve_tasks_into_config",
    "run_with_tasks",
    "score_by_tasks",
    "start",
    "warn_of_unscored",
    "write_loops",
]
