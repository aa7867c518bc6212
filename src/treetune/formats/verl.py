"""verl's rows: `reward_model {style, ground_truth}`, the environment in `extra_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treetune.formats.note import PROMPT, SHARED, parts_of, scorer_of, spec_of, task_from, text
from treetune.formats.values import json_text, json_value, pruned
from treetune.task import Task

__all__ = ["PROMPT", "parsed", "reward_spec", "row_of", "task_of", "task_of_pruned"]

_OWN = (*SHARED, "reward_model")


def row_of(task: Task, *, text_truth: bool = False) -> dict[str, Any]:
    """The row of a task. Numbers are stored as text, which is what verl's scorers compare with, and every row has a
    `reward_model`, for verl looks into it."""
    parts = parts_of(task)
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
    scorer = parts.extra.get("scorer") or scorer_of(task)
    prompt = json_text(task.messages) if scorer not in (None, "rule") else None
    further = {"env_class": task.env_class, "scorer": scorer, PROMPT: prompt}
    return parts.row(
        task, {"reward_model": reward}, {key: value for key, value in further.items() if value is not None}
    )


def task_of(row: Mapping[str, Any], json_fields: Sequence[str] = ()) -> Task:
    """The task of a row; nulls that only fill up a column are gone, and JSON text is what it was."""
    return task_of_pruned(parsed(pruned(row), json_fields), whole=False)


def task_of_pruned(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    return task_from(row, reward_spec(spec_of(row, "reward_model")), _OWN, whole=whole)


def reward_spec(reward_model: Mapping[str, Any] | None) -> dict[str, Any]:
    """verl's `reward_model` as a task's `reward_spec`: its `style` is our `method`."""
    if not reward_model or reward_model.get("ground_truth") is None:
        return {}
    spec = {("method" if key == "style" else key): value for key, value in reward_model.items()}
    return {key: value for key, value in spec.items() if value is not None}


def parsed(row: dict[str, Any], json_fields: Sequence[str]) -> dict[str, Any]:
    """`row` with the values at these dotted paths parsed: they are JSON text."""
    for path in json_fields:
        name, _, key = path.partition(".")
        place, last = (row.get(name), key) if key else (row, name)
        if isinstance(place, dict) and isinstance(place.get(last), str):
            place[last] = pruned(json_value(place[last]))
    return row
