"""What a trainer's row cannot say about its task stands as JSON text in `extra_info.treetune`.

    row = {..., "reward_spec": {"ground_truth": "42"}, "extra_info": {"uid": "...", "treetune": '{"ground_truth":42}'}}

So every format keeps every task: a ground truth that was encoded, a prompt that was plain text, a key whose name
Treetune needs for itself, the fields of a subclass. Most rows need no note. What follows from the row (`uid`, `scorer`,
`row_json`, `treetune_json`) is written for trainers and left out again on reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from treetune.chat.message import Message
from treetune.core.task import UID_LENGTH, ForeignTask, Task, own_values
from treetune.data.arrow_values import (
    MARK,
    decode_json,
    drop_nulls,
    parse_json_fields,
    to_json_text,
)
from treetune.data.rows.image_columns import IMAGES, restore_prompt, to_parts
from treetune.data.rows.scored_by import ScoredBy, scored_by_row
from treetune.errors import TasksetError

KEY = "treetune"

ROW = "row_json"
"""The key of `extra_info` with the other columns as JSON, for rows whose scorer may want them: verl passes only
`data_source`, the ground truth and `extra_info` on."""

ADDED = ("num_turns", "rollout_reward_scores")
"""Keys that verl's reward managers put into `extra_info`, over any values there."""

SCORED = "scored"
"""The environment of rows that have none: one answer, which the row's scorer scores. No task names it."""

SHARED = ("data_source", "prompt", "ability", "extra_info")
"""The columns that every format has."""

REWARDS = ("reward_model", "reward_spec")
"""Columns that hold a reward specification, each in some format."""

MAPPINGS = ("extra_info", *REWARDS)
"""Columns whose keys each have a type of their own."""

TRUTHS = (*(f"{name}.ground_truth" for name in REWARDS), "ground_truth")
"""The paths of ground truths in all formats."""

_OWN = frozenset(("env_class", "scorer", ROW, MARK, KEY, ""))
"""Keys of `extra_info` that have a meaning here (and one that no parquet path can name)."""

_HEX = frozenset("0123456789abcdef")

_decode_note = msgspec.json.Decoder(dict[str, Any]).decode


class RowParts(msgspec.Struct):
    """A task on its way into a row."""

    extra: dict[str, Any]
    columns: dict[str, Any]
    """The user's own columns."""
    note: dict[str, Any]
    scorer: str | None

    def row(self, task: Task, columns: Mapping[str, Any], further: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The row of a format's own columns, where they are not None, further keys of `extra_info`, and what every
        row has. A uid that the user gave stays."""
        extra = {"uid": None, **(further or {}), **self.extra}
        if extra["uid"] is None:
            extra["uid"] = task.uid
        if self.scorer is not None:
            extra["scorer"] = self.scorer
        if self.note:
            extra[KEY] = to_json_text(self.note)
        row = {"data_source": task.data_source, "prompt": task.messages, **columns, "ability": task.ability}
        row = {name: value for name, value in row.items() if value is not None}
        return {**row, "extra_info": extra, **self.columns}


def parts_of(task: Task, scorer: str | None = None) -> RowParts:
    """`scorer` says how the row is scored, unless the task says so itself; "" that nothing does. Without it, what
    follows from the task."""
    parts = RowParts(dict(task.extra_info), {}, {}, _text_of(task) if scorer is None else scorer or None)
    if own := own_values(task):
        # As text in the note's text, so that a field that is None stays one.
        parts.note["fields"] = msgspec.json.encode(own).decode()
    if task.tools:
        parts.note["tools"] = task.tools
    if not isinstance(task.prompt, list):
        parts.note["prompt"] = "none" if task.prompt is None else "text"
    extra = parts.extra
    if _OWN.isdisjoint(extra):
        return parts
    memory = extra.get(KEY)
    if isinstance(memory, dict) and memory.keys() == {"columns", "hidden"}:
        del extra[KEY]
        parts.columns = {name: extra.pop(name) for name in memory["columns"] if name in extra}
        extra.update(memory["hidden"])
    if _is_special(task, extra.get("scorer")):
        parts.scorer = extra.pop("scorer")
    if kept := {key: extra.pop(key) for key in _OWN & extra.keys()}:
        parts.note["extra_info"] = kept
    return parts


def build_task(
    row: Mapping[str, Any],
    spec: Mapping[str, Any],
    env_class: Any,
    own: frozenset[str],
    known: frozenset[str],
    whole: bool,
) -> Task:
    """The task of a row without nulls, whose format has found its reward specification. `own` are the columns of that
    format, `known` those of all formats. `whole`: with what only a trainer's file needs, so that writing it again loses
    nothing: a scorer of its own and, in `extra_info.treetune`, which keys were columns."""
    extra = dict(get_typed(row, "extra_info", dict) or {})
    note = _pop_note(extra)
    inner = extra.pop("env_class", None)
    env_class = inner if env_class is None else env_class
    prompt = get_typed(row, "prompt", (list, str))
    if IMAGES in row or "texts" in note:
        prompt, joined = restore_prompt(row, prompt, note)
        row = {name: value for name, value in row.items() if name != IMAGES} if joined else row
    if not whole or "scorer" in extra:
        extra.pop(ROW, None)
    if not own.issuperset(row):  # other columns join `extra_info`
        others = {name: row[name] for name in row if name not in own and name not in note.get("added", ())}
        if whole and (names := [name for name in others if name and "." not in name and name not in known]):
            extra[KEY] = {"columns": names, "hidden": {name: extra[name] for name in names if name in extra}}
        extra.update(others)
    if "prompt" in note:
        prompt = _read_prompt(prompt, note["prompt"])
    if "reward_spec" in note:
        truths = {"ground_truth": spec["ground_truth"]} if "ground_truth" in spec else {}
        spec = {**note["reward_spec"], **truths}
    if "ground_truth" in note:
        spec = {**spec, "ground_truth": note["ground_truth"]}
    fields: dict[str, Any] = {
        "prompt": prompt,
        "data_source": str(row.get("data_source", "unknown")),
        "env_class": None if env_class == SCORED else env_class,
        "reward_spec": spec,
        "ability": row.get("ability"),
        "extra_info": extra,
        "tools": _read_tools(note),
    }
    task = ForeignTask(**fields, own=decode_json(note["fields"])) if "fields" in note else Task(**fields)
    # A uid that the user gave is a key like any other.
    if looks_like_uid(extra.get("uid")) and extra["uid"] == task.uid:
        del extra["uid"]
    if whole:
        ScoredBy.read(extra.get("scorer"))  # refuses what is no text
    if not (whole and _is_special(task, extra.get("scorer"))):
        extra.pop("scorer", None)
    extra.update(note.get("extra_info", {}))
    return task


def _read_tools(note: Mapping[str, Any]) -> list[str]:
    tools = note.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        raise TasksetError(f"a row names tools that are no names: {tools!r:.80}")
    return tools


def encode_unseen(row: Mapping[str, Any]) -> str:
    """What verl does not give to reward functions of a row, as JSON: columns, and the keys that it replaces."""
    columns = {name: row[name] for name in row if row[name] is not None and name not in ("data_source", "extra_info")}
    if (reward := columns.get("reward_model")) is not None:
        # Its place is kept, so that the keys are in one order wherever the task is read.
        columns["reward_model"] = {key: "" if key == "ground_truth" else value for key, value in reward.items()}
    extra = row.get("extra_info") or {}
    if replaced := {key: extra[key] for key in ADDED if extra.get(key) is not None}:
        columns["extra_info"] = replaced
    return to_json_text(columns)


def encode_unseen_prompts(prompts: list[Any], row: Mapping[str, Any]) -> list[str]:
    """`unseen` of many rows that differ in their prompts only, whose messages have no keys that are None."""
    rest = encode_unseen(row)[1:]
    end = f",{rest}" if rest != "}" else rest
    # All at once: a line of JSON has no line break of its own.
    lines = msgspec.json.Encoder().encode_lines(prompts).decode().split("\n")[:-1]
    return [f'{{"prompt":{line}{end}' for line in lines]


def restore_json(row: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """A row whose values that are JSON text are what they were; of those paths only that begin with `under`."""
    extra = row.get("extra_info")
    if not isinstance(extra, dict) or not isinstance(extra.get(MARK), str):
        return dict(row)
    copy = {name: dict(value) if isinstance(value, dict) else value for name, value in row.items()}
    return parse_json_fields(copy, [path for path in decode_json(extra[MARK]) if path.startswith(under)])


def truth_text(truth: Any) -> Any:
    """A ground truth as text: a scalar as it is printed, a structure as JSON."""
    if truth is None or isinstance(truth, str):
        return truth
    return str(truth) if isinstance(truth, bool | int | float) else to_json_text(truth)


def _is_special(task: Task, scorer: Any) -> bool:
    return isinstance(scorer, str) and scorer != _text_of(task)


def _text_of(task: Task) -> str | None:
    scored = scored_by_row(task)
    return None if scored is None else scored.text


def _pop_note(extra: dict[str, Any]) -> dict[str, Any]:
    """The note, taken out of `extra_info`; a key of that name that is no note stays."""
    if not isinstance(extra.get(KEY), str):
        return {}
    try:
        note: dict[str, Any] = drop_nulls(_decode_note(extra[KEY]))
    except msgspec.DecodeError:
        return {}
    del extra[KEY]
    return note


def looks_like_uid(value: Any) -> bool:
    return isinstance(value, str) and len(value) == UID_LENGTH and _HEX.issuperset(value)


def with_opening(row: Mapping[str, Any], opening: list[Message]) -> dict[str, Any]:
    """A row whose environment opens the conversation, with what it shows first: trainers want a prompt. Its task has
    none all the same."""
    return _with_prompt(row, opening, {"prompt": "opening"})


def with_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose contents are all lists of parts, as those of other rows are: a column of parquet has one type. Its
    task has text all the same."""
    prompt, texts = to_parts(row["prompt"])
    return _with_prompt(row, prompt, {"texts": texts}) if texts else dict(row)


def _with_prompt(row: Mapping[str, Any], prompt: list[Message], noted: dict[str, Any]) -> dict[str, Any]:
    """A row with another prompt, and a note for what its task had."""
    extra = row["extra_info"]
    note = {**decode_json(extra.get(KEY) or "{}"), **noted}
    return {**row, "prompt": prompt, "extra_info": {**extra, KEY: to_json_text(note)}}


def _read_prompt(prompt: Any, kind: str) -> Any:
    if kind != "text":
        return None if kind == "opening" else prompt or None
    single = isinstance(prompt, list) and len(prompt) == 1 and prompt[0].keys() == {"role", "content"}
    return prompt[0]["content"] if single else prompt


def get_typed(row: Mapping[str, Any], column: str, kind: Any) -> Any:
    value = row.get(column)
    if value is not None and not isinstance(value, kind):
        expected = {"prompt": "a list of messages"}.get(column, "a mapping")
        raise TasksetError(f"{column} is a {type(value).__name__}, expected {expected}: {value!r:.80}")
    return value
