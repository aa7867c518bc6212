"""Rows that `treetune build --format trl` made: the reward function that scores one answer to each.

GRPOTrainer("MODEL", train_dataset=load_dataset("parquet", data_files="PATH"), reward_funcs=score_rows)
"""

from __future__ import annotations

from typing import Any

from treetune.data.rows.formats import FORMATS
from treetune.trainers.single_turn import play_rows, scorer_in
from treetune.trainers.trl.completions import text_of_completion

_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What reward functions are given beside the dataset's columns."""


def score_rows(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """The reward of each completion; a reward function of a `GRPOTrainer`."""
    named = {name: values for name, values in columns.items() if name not in _OF_TRL}
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: values[number] for name, values in named.items()}
        row["prompt"] = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        scorer = scorer_in(row.get("extra_info"), row.get("data_source"))
        rows.append((scorer, FORMATS["trl"].task_of(row, whole=False), text_of_completion(completion)))
    return [result.reward for result in play_rows(rows)]
