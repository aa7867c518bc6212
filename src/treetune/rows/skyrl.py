"""SkyRL's rows: `env_class` and `reward_spec {method, ground_truth}`, the ground truth as its environment reads it.

    row_of(Task(prompt="1 + 1?", env_class="gsm8k", reward_spec={"ground_truth": 2}))   # stored as "2"

An environment's contract says in what form, in which column, and which further columns there must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from treetune.contract import Contract, contract_of
from treetune.rows.arrow_values import pruned
from treetune.rows.round_trip import COLUMNS, RULE, SCORED, SHARED, parts_of, restored, scorer_of, spec_of, task_from
from treetune.rows.verl import reward_spec
from treetune.task import ForeignTask, Message, Task

_OWN = (*SHARED, "env_class", "reward_spec")

_NEEDS: dict[str, tuple[str, ...]] = {"text2sql": ("db_id", "data")}
"""Columns that SkyRL's own environments read, beside those that a contract names."""

_SQL_DATA = ("spider", "bird", "synsql")
"""What text2sql calls `data`: the collection whose databases are meant."""


def row_of(task: Task, *, text_truth: bool = False, scorer: str | None = None) -> dict[str, Any]:
    parts = parts_of(task, scorer)
    if parts.scorer == scorer_of(task) and task.env_class is not None:
        parts.scorer = None  # the column says it
    contract = _contract(task.env_class)
    spec = {key: value for key, value in task.reward_spec.items() if value is not None}
    if "" in spec:
        parts.note["reward_spec"] = {key: value for key, value in spec.items() if key != "ground_truth"}
        del spec[""]
    if "ground_truth" in spec:
        truth = spec["ground_truth"]
        stored = contract.encode(truth, task) if contract is not None else truth
        spec["ground_truth"] = parts.truth(truth, stored, text_truth)
    columns: dict[str, Any] = {"env_class": _environment_of(task, parts.scorer), "reward_spec": spec or None}
    added = {name: value for name, value in _needed(task, contract).items() if name not in parts.columns}
    if contract is not None and contract.column == "reward_model" and spec:
        added["reward_model"] = {("style" if key == "method" else key): value for key, value in spec.items()}
    if added:
        parts.note["added"] = list(added)
    return parts.row(task, {**columns, **added})


def task_of(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    return task_of_pruned(restored(pruned(row)), whole=whole)


def task_of_pruned(row: Mapping[str, Any], *, whole: bool = True) -> Task:
    if "reward_spec" not in row and "reward_model" in row:  # SkyRL's aime
        return task_from(
            row, reward_spec(spec_of(row, "reward_model")), (*_OWN, "reward_model"), row.get("env_class"), whole=whole
        )
    return task_from(row, spec_of(row, "reward_spec"), _OWN, row.get("env_class"), whole=whole)


def task_to_play(env_class: str, prompt: list[Message], extras: Mapping[str, Any]) -> Task:
    """The task of a row as SkyRL hands it over: without prompt and environment, and with the trainer's `max_turns`.

    Where its taskset scores it, it is of the class that the taskset declares; `scored` is told the scorer.
    """
    from treetune.rows.scorer import taskset_of, with_type

    row = {key: value for key, value in extras.items() if key != "max_turns"}
    task = task_of({**row, "prompt": prompt, "env_class": env_class}, whole=False)
    scorer = (extras.get("extra_info") or {}).get("scorer") or RULE
    if env_class == SCORED:
        return msgspec.structs.replace(task, extra_info={**task.extra_info, "scorer": scorer})
    return with_type(task, taskset_of(scorer)) if isinstance(task, ForeignTask) and scorer[:1] == "{" else task


def _environment_of(task: Task, scorer: str | None) -> str | None:
    """SkyRL plays every row in an environment: one that only asks for an answer, where the task has none."""
    return SCORED if task.env_class is None and scorer is not None else task.env_class


def _needed(task: Task, contract: Contract | None) -> dict[str, Any]:
    """The further columns of a row, out of `extra_info`."""
    names = [*_NEEDS.get(task.env_class or "", ()), *(contract.needs if contract is not None else ())]
    found = {name: task.extra_info.get(name) for name in names if "." not in name and name not in COLUMNS}
    if "data" in found and found["data"] is None and task.data_source in _SQL_DATA:
        found["data"] = task.data_source
    return {name: value for name, value in found.items() if value is not None}


def _contract(env_class: str | None) -> Contract | None:
    from treetune.plugins import environments

    # Asked each time: an environment may be registered between two rows.
    if not isinstance(env_class, str) or env_class not in environments.names():
        return None
    return _known(env_class)


_known = lru_cache(maxsize=256)(contract_of)
