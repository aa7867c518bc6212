"""verl's rows as tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from treetune.task import Task

PROMPT = "prompt_json"
"""The key of `extra_info` with the prompt as JSON, for rows whose scorer may want it: verl passes no prompt on."""

_OWN = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def task_of(row: Mapping[str, Any], json_fields: Sequence[str] = ()) -> Task:
    """The task of a row; nulls that only fill up a column are gone, and JSON text is what it was."""
    row = _parsed(_without_nulls(row), json_fields)
    extra = dict(row.get("extra_info") or {})
    env_class = extra.pop("env_class", None)
    for key in ("uid", "scorer", PROMPT):
        extra.pop(key, None)
    extra.update({key: value for key, value in row.items() if key not in _OWN})
    return Task(
        prompt=row["prompt"],
        data_source=str(row.get("data_source", "unknown")),
        env_class=env_class,
        reward_spec=reward_spec(row.get("reward_model")),
        ability=row.get("ability"),
        extra_info=extra,
    )


def reward_spec(reward_model: Mapping[str, Any] | None) -> dict[str, Any]:
    """verl's `reward_model` as a task's `reward_spec`: its `style` is our `method`."""
    if not reward_model or reward_model.get("ground_truth") is None:
        return {}
    spec = {("method" if key == "style" else key): value for key, value in reward_model.items()}
    return {key: value for key, value in spec.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(row: dict[str, Any], json_fields: Sequence[str]) -> dict[str, Any]:
    for path in json_fields:
        name, _, key = path.partition(".")
        place, last = (row.get(name), key) if key else (row, name)
        if isinstance(place, dict) and isinstance(place.get(last), str):
            place[last] = msgspec.json.decode(place[last])
    return row
