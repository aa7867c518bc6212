"""TRL: tasks as the dataset, reward function and rollouts of a `GRPOTrainer` or an `AsyncGRPOTrainer`.

    tasks = TrlTasks("http://127.0.0.1:5000")          # a task server, several of them, or a taskset in this process
    GRPOTrainer("MODEL", args=args, **tasks.trainer_arguments(512))
    AsyncGRPOTrainer("MODEL", args=args, **tasks.async_trainer_arguments("MODEL", args, 512))

A failure of the task server gives no reward (None), never zero.
"""

from treetune.trainers.trl.columns import score_rows
from treetune.trainers.trl.rollouts import Generate, longest_prompt, pad_to_longest_batch, sample_by_trainer
from treetune.trainers.trl.tasks import TrlTasks

__all__ = [
    "Generate",
    "TrlTasks",
    "longest_prompt",
    "pad_to_longest_batch",
    "sample_by_trainer",
    "score_rows",
]
