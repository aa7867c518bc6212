"""verl's rows: `reward_model {style, ground_truth}`, the environment in `extra_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune.rows.arrow_values import json_value, pruned
from treetune.rows.round_trip import (
    ADDED,
    ROW,
    RULE,
    SHARED,
    parsed,
    parts_of,
    restored,
    spec_of,
    task_from,
    text,
    unseen,
)
from treetune.task import Task

__all__ = ["parsed", "reward_spec", "row_of", "task_of", "task_of_pruned", "task_to_score"]

_OWN = (*SHARED, "reward_model")


def row_of(task: Task, *, text_truth: bool = False, scorer: str | None = None) -> dict[str, Any]:
    """The row of a task. Numbers are stored as text, which is what verl's scorers compare with, and every row has a
    `reward_model`, for verl looks into it."""
    parts = parts_of(task, scorer)
    reward: dict[str, Any] = {"style": "rule", "ground_truth": None}
    spec = {key: value for key, value in task.reward_spec.items() if value is not None}
    if spec:
        truth = spec.pop("ground_truth", None)
        if truth is None or "style" in spec or "" in spec:
            parts.note["reward_spec"] = spec
        if truth is not None:
            stored = text(truth) if isinstance(truth, bool | int | float) else truth
            reward = {"ground_truth": parts.truth(truth, stored, text_truth)}
            reward |= {("style" if key == "method" else key): value for key, value in spec.items() if key}
    row = parts.row(
        task, {"reward_model": reward}, {"env_class": task.env_class} if task.env_class is not None else None
    )
    if parts.scorer not in (None, RULE):
        row["extra_info"][ROW] = unseen(row)
    return row


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a row as a file has it; nulls that only fill up a column are gone, and JSON text is what it was."""
    return task_of_pruned(restored(pruned(row)))


def task_of_pruned(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    return task_from(row, reward_spec(spec_of(row, "reward_model")), _OWN, whole=whole)


def task_to_score(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Task:
    """The task of a row as verl gives it to reward functions: without most of its columns."""
    extra = {key: value for key, value in pruned(extra_info).items() if key not in ADDED}
    row = json_value(extra.pop(ROW, None) or "{}")
    replaced = row.pop("extra_info", {})
    reward = {**row.get("reward_model", {}), "ground_truth": ground_truth}
    row |= {"data_source": data_source, "extra_info": extra, "reward_model": pruned(reward)}
    # What the JSON held was never text.
    row = restored(row, "extra_info.")
    row["extra_info"] |= replaced
    return task_of_pruned(row, whole=False)


def reward_spec(reward_model: Mapping[str, Any] | None) -> dict[str, Any]:
    """verl's `reward_model` as a task's `reward_spec`: its `style` is our `method`."""
    spec = {
        ("method" if key == "style" else key): value for key, value in (reward_model or {}).items() if value is not None
    }
    return {} if spec == {"method": "rule"} else spec  # what a row without a reward is filled up with
