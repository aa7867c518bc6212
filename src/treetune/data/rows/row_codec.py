"""Stores what a trainer's row cannot express about its task as JSON text in `extra_info.treetune` (the note).

    row = {..., "reward_spec": {"ground_truth": "42"}, "extra_info": {"uid": "...", "treetune": '{"ground_truth":42}'}}

So every format preserves every task: an encoded ground truth, a prompt that was plain text, a key whose name Treetune
needs, the fields of a subclass. Most rows need no note. Derived values (`uid`, `scorer`, `row_json`, `treetune_json`)
are written for trainers and dropped on reading.
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
from treetune.data.rows.scorer import ScoredBy, scored_by_row
from treetune.errors import TasksetError

KEY = "treetune"

ROW = "row_json"
"""The key of `extra_info` that holds the other columns as JSON, for rows whose scorer may need them: verl passes on
only `data_source`, the ground truth and `extra_info`."""

ADDED = ("num_turns", "rollout_reward_scores")
"""Keys that verl's reward managers write into `extra_info`, replacing any values there."""

SCORED = "scored"
"""The environment of rows that have none: one answer, scored by the row's scorer. No task names it."""

SHARED = ("data_source", "prompt", "ability", "extra_info")
"""The columns that every format shares."""

REWARDS = ("reward_model", "reward_spec")
"""Columns that hold a reward specification in some format."""

MAPPINGS = ("extra_info", *REWARDS)
"""Columns in which each key has its own type."""

TRUTHS = (*(f"{name}.ground_truth" for name in REWARDS), "ground_truth")
"""The paths of ground truths, for all formats."""

_OWN = frozenset(("env_class", "scorer", ROW, MARK, KEY, ""))
"""Keys of `extra_info` with a special meaning here, plus the empty key, which no parquet path can name."""

_HEX = frozenset("0123456789abcdef")

_decode_note = msgspec.json.Decoder(dict[str, Any]).decode


class RowParts(msgspec.Struct):
    """The parts of a task while it is converted to a row."""

    extra: dict[str, Any]
    columns: dict[str, Any]
    """The user's own columns."""
    note: dict[str, Any]
    scorer: str | None

    def row(self, task: Task, columns: Mapping[str, Any], further: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Build the row from the format's columns that are not None, further keys of `extra_info`, and the fields of
        every row. A uid that the user set stays."""
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
    """`scorer` says how the row is scored, unless the task says so itself; "" means by nothing. Without it, the task
    decides."""
    parts = RowParts(dict(task.extra_info), {}, {}, _text_of(task) if scorer is None else scorer or None)
    if own := own_values(task):
        # As text inside the note's text, so that a None field stays None.
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
    """Build the task of a row without nulls, whose reward specification the format has read. `own` are the columns of
    that format, `known` those of all formats. `whole`: also keep what only a trainer's file needs, so that writing the
    task again loses nothing: its scorer and, in `extra_info.treetune`, which keys were columns."""
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
    if not own.issuperset(row):  # other columns move to `extra_info`
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
    # A uid that the user set is a key like any other.
    if looks_like_uid(extra.get("uid")) and extra["uid"] == task.uid:
        del extra["uid"]
    if whole:
        ScoredBy.read(extra.get("scorer"))  # raises for anything but text
    if not (whole and _is_special(task, extra.get("scorer"))):
        extra.pop("scorer", None)
    extra.update(note.get("extra_info", {}))
    return task


def _read_tools(note: Mapping[str, Any]) -> list[str]:
    tools = note.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        raise TasksetError(f"a row names tools that are not names: {tools!r:.80}")
    return tools


def encode_unseen(row: Mapping[str, Any]) -> str:
    """Encode as JSON what verl does not pass to reward functions: other columns, and keys that verl replaces."""
    columns = {name: row[name] for name in row if row[name] is not None and name not in ("data_source", "extra_info")}
    if (reward := columns.get("reward_model")) is not None:
        # A placeholder keeps its place, so that the key order is the same wherever the task is read.
        columns["reward_model"] = {key: "" if key == "ground_truth" else value for key, value in reward.items()}
    extra = row.get("extra_info") or {}
    if replaced := {key: extra[key] for key in ADDED if extra.get(key) is not None}:
        columns["extra_info"] = replaced
    return to_json_text(columns)


def encode_unseen_prompts(prompts: list[Any], row: Mapping[str, Any]) -> list[str]:
    """Return `encode_unseen` for many rows that differ only in their prompts, whose messages have no None values."""
    rest = encode_unseen(row)[1:]
    end = f",{rest}" if rest != "}" else rest
    # All at once: a line of JSON contains no line break.
    lines = msgspec.json.Encoder().encode_lines(prompts).decode().split("\n")[:-1]
    return [f'{{"prompt":{line}{end}' for line in lines]


def restore_json(row: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Restore the values of a row that are stored as JSON text, limited to paths that begin with `under`."""
    extra = row.get("extra_info")
    if not isinstance(extra, dict) or not isinstance(extra.get(MARK), str):
        return dict(row)
    copy = {name: dict(value) if isinstance(value, dict) else value for name, value in row.items()}
    return parse_json_fields(copy, [path for path in decode_json(extra[MARK]) if path.startswith(under)])


def truth_text(truth: Any) -> Any:
    """Return a ground truth as text: a scalar as printed, a structure as JSON."""
    if truth is None or isinstance(truth, str):
        return truth
    return str(truth) if isinstance(truth, bool | int | float) else to_json_text(truth)


def _is_special(task: Task, scorer: Any) -> bool:
    return isinstance(scorer, str) and scorer != _text_of(task)


def _text_of(task: Task) -> str | None:
    scored = scored_by_row(task)
    return None if scored is None else scored.text


def _pop_note(extra: dict[str, Any]) -> dict[str, Any]:
    """Remove the note from `extra_info` and return it. A value under that name that is not a note stays."""
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
    """Return a row with the environment's opening messages as its prompt, because trainers need a prompt. The task
    still has none."""
    return _with_prompt(row, opening, {"prompt": "opening"})


def with_parts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose contents are all lists of parts, like those of other rows: a parquet column has one type. The
    task still has text."""
    prompt, texts = to_parts(row["prompt"])
    return _with_prompt(row, prompt, {"texts": texts}) if texts else dict(row)


def _with_prompt(row: Mapping[str, Any], prompt: list[Message], noted: dict[str, Any]) -> dict[str, Any]:
    """Return a row with another prompt, and a note that records the prompt of its task."""
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
