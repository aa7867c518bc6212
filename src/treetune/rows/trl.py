"""TRL's rows: `ground_truth` as a column of its own, which TRL hands to reward functions by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune.rows.arrow_values import pruned
from treetune.rows.round_trip import SHARED, parts_of, restored, task_from
from treetune.task import Task

_OWN = (*SHARED, "ground_truth")
_USUAL = {"method": "rule"}
"""What a reward specification says beside its ground truth, unless a row says otherwise."""


def row_of(task: Task, *, text_truth: bool = False, scorer: str | None = None) -> dict[str, Any]:
    parts = parts_of(task, scorer)
    spec = {key: value for key, value in task.reward_spec.items() if value is not None}
    truth = spec.pop("ground_truth", None)
    if truth is not None:
        if spec != _USUAL:
            parts.note["reward_spec"] = spec
        truth = parts.truth(truth, truth, text_truth)
    elif spec:
        parts.note["reward_spec"] = spec
    further = {"env_class": task.env_class} if task.env_class is not None else {}
    return parts.row(task, {"ground_truth": truth}, further)


def task_of(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    return task_of_pruned(restored(pruned(row)), whole=whole)


def task_of_pruned(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    spec = {**_USUAL, "ground_truth": row["ground_truth"]} if "ground_truth" in row else {}
    return task_from(row, spec, _OWN, whole=whole)
