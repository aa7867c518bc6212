"""A row that a function made, as the canonical layout has it: images, reward, uid, and what Treetune itself fills in.

uid, row = complete_row(taskset, *write_images(made, index, reader), index)
table = table_of(rows)
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from treetune.chat.images import has_images, urls_in
from treetune.chat.message import Message
from treetune.core.task import uid_of
from treetune.data.datasets.images import ImageReader
from treetune.data.datasets.map_function import Row, plain, store_truth
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows import parquet
from treetune.data.rows.arrow_values import MARK, drop_nulls, to_json_text, with_json_fields
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.image_columns import COLUMN as IMAGES
from treetune.data.rows.image_columns import MARK as PLACE
from treetune.data.rows.image_columns import fill_parts, image_column, join_images, note_images, to_marks
from treetune.data.rows.row_codec import KEY, ROW, encode_unseen
from treetune.data.rows.rule import RULE
from treetune.errors import TasksetError

RESERVED = frozenset(("index", "scorer", "env_class", ROW, MARK))
"""Keys of `extra_info` that Treetune itself fills in."""
_SEEN = ("data_source", "extra_info", "env_class")
"""Columns that verl hands to reward functions."""


def write_images(made: Row, index: int, images: ImageReader) -> tuple[Row, list[Message]]:
    """A made row in which images, wherever they stood, are as the canonical layout has them; and the messages of
    its task."""
    messages, given = made["prompt"], made.get(IMAGES)
    if given is None and not has_images(messages):
        return made, messages
    try:
        messages = drop_nulls(messages)
        messages = fill_parts(messages, images.read(urls_in(messages)))
        if given is not None:
            messages = join_images(messages, images.read(given))
        written, urls = to_marks(messages)
    except ValueError as error:
        problem = f"row {index}: {error}"
        raise TasksetError(problem, remedy=f"write {PLACE} where each image goes, or leave the row out") from None
    except TasksetError as error:
        raise TasksetError(f"row {index}: {error.message}", remedy=error.remedy) from None
    note: Row = {}
    note_images(note, messages, written)
    extra = {**(made.get("extra_info") or {}), **({KEY: to_json_text(note)} if note else {})}
    return {**made, "prompt": written, IMAGES: urls, "extra_info": extra}, messages


def complete_row(taskset: DatasetTaskset, made: Row, messages: list[Message], index: int) -> tuple[str, Row]:
    """The uid of a made row's task, and the row with everything that a canonical one has."""
    config = taskset.config
    given = made.get("extra_info") or {}
    env_class = made.get("env_class") or given.get("env_class") or config.env_class
    if type(env_class) is not str and env_class is not None:
        raise TasksetError(f"row {index} has the env_class {env_class!r}, which is no name")
    reward = _complete_reward(made.get("reward_model"), config.reward_method)
    spec = _reward_spec(reward)
    scorer = taskset.row_scorer
    if env_class is not None:
        scorer = taskset.scorer_of_environment(env_class)
    elif scorer == RULE and "ground_truth" not in spec:
        scorer = None
    tools = taskset.tool_names
    uid = uid_of(messages, spec, env_class, {"tools": tools} if tools else {})
    extra = {"index": _index(given.get("index", index), index), "uid": uid, "scorer": scorer}
    if env_class is not None:
        extra["env_class"] = env_class
    if scorer not in (None, RULE):
        unseen = {key: plain(value) for key, value in made.items() if key not in _SEEN}
        extra[ROW] = encode_unseen({**unseen, "reward_model": reward, "extra_info": given})
    for key, value in given.items():
        if key not in RESERVED and not (key == "uid" and value is None):
            extra[key] = plain(value)
    if tools:
        extra[KEY] = to_json_text({"tools": tools})
    own = made.get("data_source")
    data_source = config.data_source if own is None else str(own)
    row = {**made, "data_source": data_source, "reward_model": reward, "extra_info": extra}
    if "env_class" in made:
        del row["env_class"]
    if reward is None:
        del row["reward_model"]
    return uid, row


def table_of(rows: list[Row]) -> pa.Table:
    """Column by column, so that one mixed key does not make JSON of all."""
    columns: dict[str, pa.Array] = {}
    mixed: list[str] = []
    for name in dict.fromkeys(["data_source", "prompt", *parquet.keys_of(rows)]):
        values: list[Any] = [row.get(name) for row in rows]
        if name == "prompt":
            columns[name] = parquet.messages_column(values)
        elif name == IMAGES and (images := image_column(values)) is not None:
            columns[name] = images
        else:
            infer = parquet.infer_mapping if name in ("reward_model", "extra_info") else parquet.infer_column
            columns[name] = infer(values, name, mixed)
    return with_json_fields(pa.table(columns), mixed)


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


def _index(value: Any, position: int) -> int:
    try:
        return value if type(value) is int else int(value)
    except (TypeError, ValueError):
        raise TasksetError(
            f"row {position} has the index {value!r}, which is no whole number",
            remedy="extra_info.index is the number of the row in the source: give another value another key",
        ) from None
