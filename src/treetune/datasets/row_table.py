"""Rows that a map function made, as a table of canonical columns: checked, completed, each with its uid and scorer.

    table, uids = table_of_rows(taskset, [{"prompt": [...], "extra_info": {...}}], indices=[0])

Column by column: putting each row together and taking it apart again would cost as much as making it. A key whose
values are of mixed types becomes JSON, and the table says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from treetune.datasets.map_function import NO_PROMPT, NO_TRUTH, Row, is_silent, store_truth
from treetune.datasets.taskset import DatasetTaskset
from treetune.errors import TasksetError
from treetune.rows.arrow_values import with_json_fields
from treetune.rows.formats import FORMATS
from treetune.rows.parquet import constant_column, infer_column, infer_mapping, keys_of, messages_column
from treetune.rows.round_trip import MARK, ROW, encode_unseen
from treetune.rows.rule import RULE
from treetune.task import uid_of

RESERVED = ("index", "scorer", "env_class", ROW, MARK)
"""Keys of `extra_info` that Treetune itself fills in."""

_COMPLETED = ("data_source", "prompt", "reward_model", "extra_info", "env_class")
"""Columns whose values are checked or completed; any other is stored as the map function gave it."""

_PLAIN = frozenset((str, int, float, bool, type(None), list, dict))


def table_of_rows(taskset: DatasetTaskset, rows: list[Row], indices: list[int]) -> tuple[pa.Table, list[str]]:
    """Made rows with everything that a canonical row has; and the uid of each row's task."""
    config, mixed = taskset.config, list[str]()
    names = keys_of(rows)
    columns: dict[str, Any] = {
        name: infer_column([row.get(name) for row in rows], name, mixed) for name in names if name not in _COMPLETED
    }
    columns["prompt"] = messages_column([row["prompt"] for row in rows])
    columns["data_source"] = pa.array(
        [str(config.data_source if (own := row.get("data_source")) is None else own) for row in rows], pa.string()
    )
    specs: list[dict[str, Any]] = [{}] * len(rows)
    rewards: list[dict[str, Any] | None] = [None] * len(rows)
    if "reward_model" in names:
        rewards = [_complete_reward(row.get("reward_model"), config.reward_method) for row in rows]
        specs = [_reward_spec(reward) for reward in rewards]
        columns["reward_model"] = infer_mapping(rewards, "reward_model", mixed)
    given = [row.get("extra_info") or {} for row in rows]
    keys = keys_of(given)
    environments = [config.env_class] * len(rows)
    if "env_class" in names or "env_class" in keys:
        environments = [
            _env_class(row.get("env_class") or info.get("env_class") or config.env_class, index)
            for row, info, index in zip(rows, given, indices, strict=True)
        ]
    uids = [
        uid_of({"prompt": row["prompt"], "env_class": env_class, "reward_spec": spec})
        for row, env_class, spec in zip(rows, environments, specs, strict=True)
    ]
    own = taskset.scorer
    scorers = [
        taskset.scorer_of_environment(env_class)
        if env_class is not None
        else None
        if own == RULE and "ground_truth" not in spec
        else own
        for env_class, spec in zip(environments, specs, strict=True)
    ]
    row_json = None
    if any(scorer not in (None, RULE) for scorer in scorers):
        hidden = ("data_source", "extra_info", "env_class")
        row_json = [
            encode_unseen(
                {
                    **{key: plain(value) for key, value in row.items() if key not in hidden},
                    "reward_model": reward,
                    "extra_info": info,
                }
            )
            for row, reward, info in zip(rows, rewards, given, strict=True)
        ]
    if "index" in keys:
        indices = [_index(info.get("index", index), index) for info, index in zip(given, indices, strict=True)]
    fields = {
        key: infer_column([plain(info.get(key)) for info in given], f"extra_info.{key}", mixed)
        for key in keys
        if key not in RESERVED
    }
    columns["extra_info"] = extra_info(indices, uids, scorers, environments, row_json, fields, mixed)
    ordered = dict.fromkeys(["data_source", "prompt", *names, "extra_info"])
    table = pa.table({name: columns[name] for name in ordered if name in columns})
    return with_json_fields(table, mixed), uids


def extra_info(
    indices: list[int],
    uids: list[str],
    scorers: list[str | None],
    environments: list[str | None],
    row_json: list[str] | None,
    fields: Mapping[str, pa.Array],
    mixed: list[str],
) -> pa.StructArray:
    """The column of what Treetune adds to rows, and of the user's own fields. A uid of the user's own stays."""
    extra: dict[str, pa.Array] = {
        "index": pa.array(indices, pa.int64()),
        "uid": pa.array(uids, pa.string()),
        "scorer": _texts(scorers),
    }
    if any(environments):
        extra["env_class"] = _texts(environments)
    if row_json is not None:
        extra[ROW] = pa.array(row_json, pa.string())
    extra |= fields
    if "uid" in fields and fields["uid"].null_count:
        own = zip(fields["uid"].to_pylist(), uids, strict=True)
        extra["uid"] = infer_column([uid if mine is None else mine for mine, uid in own], "extra_info.uid", mixed)
    return pa.StructArray.from_arrays(list(extra.values()), list(extra))


def _texts(values: list[str | None]) -> pa.Array:
    """Mostly all are the same, and long."""
    same = values.count(values[0]) == len(values)
    return constant_column(values[0], len(values)) if same else pa.array(values, pa.string())


def find_fault(made: Any) -> str | None:
    """What keeps a made row from being one."""
    if type(made) is not dict:
        return f"is a {type(made).__name__}, not a dict"
    prompt = made.get("prompt")
    if type(prompt) is not list or not prompt:
        return "has no prompt (a list of messages)"
    for message in prompt:
        if type(message) is dict and type(message.get("role")) is type(message.get("content")) is str:
            continue  # what nearly every message is
        if type(message) is not dict or (role := message.get("role")) is None:
            return "has a message without a role"
        if type(role) is not str:
            return f"has a message whose role is a {type(role).__name__}"
        if isinstance(content := message.get("content"), bytes | bool | int | float):
            return f"has a message whose content is a {type(content).__name__}"
    if type(reward := made.get("reward_model")) is not dict and reward is not None:
        return "has a reward_model that is no dict"
    if type(extra := made.get("extra_info")) is not dict and extra is not None:
        return "has a extra_info that is no dict"
    return None


def find_lack(made: Row) -> str | None:
    """What a made row lacks to be one that can be trained on."""
    reward = made.get("reward_model")
    if reward and "ground_truth" in reward:
        truth = reward["ground_truth"]
        if not truth if type(truth) is str else store_truth(plain(truth)) is None:
            return NO_TRUTH
    last = made["prompt"][-1].get("content")  # which mostly says something
    return NO_PROMPT if not (last and type(last) is str and not last.isspace()) and is_silent(made["prompt"]) else None


def plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's."""
    return value if type(value) in _PLAIN or not hasattr(value, "tolist") else value.tolist()


def _complete_reward(reward: dict[str, Any] | None, method: str) -> dict[str, Any] | None:
    if not reward or "ground_truth" not in reward:
        return reward or None
    if type(reward["ground_truth"]) is str and reward["ground_truth"] and "style" in reward:
        return dict(reward)
    return {"style": method, **reward, "ground_truth": store_truth(plain(reward["ground_truth"]))}


def _reward_spec(reward: dict[str, Any] | None) -> dict[str, Any]:
    """What the format reads, faster for what nearly every row has."""
    if reward is not None and len(reward) == 2 and type(reward.get("ground_truth")) is str and "style" in reward:
        return {"ground_truth": reward["ground_truth"], "method": reward["style"]}
    return FORMATS["verl"].read_reward({"reward_model": reward})


def _env_class(value: Any, index: int) -> str | None:
    if type(value) is not str and value is not None:
        raise TasksetError(f"row {index} has the env_class {value!r}, which is no name")
    return value


def _index(value: Any, position: int) -> int:
    try:
        return value if type(value) is int else int(value)
    except (TypeError, ValueError):
        raise TasksetError(f"row {position} has the index {value!r}, which is no whole number") from None
