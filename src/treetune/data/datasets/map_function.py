"""The function that makes a trainer's row from a source row, as the config of a dataset task describes it.

    make_row = map_function(config)
    make_row({"question": "1 + 1?", "answer": "2"}, 0)      # {"prompt": [...], "reward_model": {...}, ...}

The prompt is a template over columns or a column of messages. The ground truth is a column, or the match of a regular
expression in one. `complete_row` adds the fields that Treetune fills in, to our rows and to users' rows.
"""

from __future__ import annotations

import datetime
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from treetune.chat.images import has_images, urls_in
from treetune.chat.message import Message
from treetune.core.task import uid_of
from treetune.data.arrow_values import (
    MARK,
    decode_json,
    drop_nulls,
    to_json_text,
)
from treetune.data.datasets.config import DatasetConfig, GroundTruthConfig, no_column
from treetune.data.datasets.dataset_rows import DatasetRows
from treetune.data.datasets.images import NO_IMAGE, ImageReader
from treetune.data.datasets.template import LEAVE_OUT, ColumnPath, Misfit, Template
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.image_columns import IMAGES, PLACE, fill_parts, join_images, note_images, to_marks
from treetune.data.rows.row_codec import KEY, ROW, encode_unseen
from treetune.data.rows.scorer import BY_RULE
from treetune.data.sources.names import Row
from treetune.errors import ConfigError, TasksetError, user_code

NO_PROMPT, NO_TRUTH = "no prompt", "no ground truth"
MISSING = (NO_PROMPT, NO_TRUTH, NO_IMAGE)
"""The reasons for dropping rows; they are faults if the config says `drop_missing: false`."""

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""The role names of the `from`/`value` layout."""


_PLAIN = frozenset((str, int, float, bool, type(None), list, dict))


class RowDropped(Exception):
    """Raise it while making a row to drop that row; the reason is counted and reported."""


def map_function(config: DatasetConfig) -> Callable[..., Row]:
    """Return the map function. It is compiled at the first row, which shows the columns."""
    make_prompt: Callable[[Row], list[Message]] | None = None
    column = ""
    find_truth: Callable[[Any], Any] = store_truth

    def make_row(row: Row, index: int = 0) -> Row:
        nonlocal make_prompt, column, find_truth
        if make_prompt is None:
            if config.ground_truth is not None:
                column, find_truth = truth_finder(config.ground_truth, list(row))
            make_prompt = _prompt_maker(config, row)
        try:
            prompt = make_prompt(row)
        except Misfit as error:
            raise TasksetError(f"row {index}: {error}", remedy=error.remedy) from None
        extra = {"index": index} | {field: row[field] for field in config.extra_fields}
        made: Row = {"data_source": config.data_source, "prompt": prompt, "extra_info": extra}
        if config.images:
            made[IMAGES] = [image for column in config.images for image in _list_images(row[column])]
        if config.ability is not None:
            made["ability"] = config.ability
        if config.ground_truth is not None:
            if (truth := find_truth(row[column])) is None:
                raise RowDropped(NO_TRUTH)
            made["reward_model"] = {"style": config.reward_method, "ground_truth": truth}
        return made

    return make_row


def _list_images(value: Any) -> list[Any]:
    if value is None:
        raise RowDropped(NO_IMAGE)
    return value if isinstance(value, list) else [value]


def _prompt_maker(config: DatasetConfig, first: Row) -> Callable[[Row], list[Message]]:
    columns = list(first)
    if config.prompt_format == "chat_messages":
        from treetune.data.rows.prompt_lengths import messages_of

        field = config.chat_messages_field
        if field not in columns:
            raise ConfigError([("chat_messages_field", no_column(field, columns))])

        def read_messages(row: Row) -> list[Message]:
            """Read a row's messages with all their keys; raises ValueError with what is wrong."""
            entries = _parse_messages(row[field])
            if entries is None or entries == []:
                raise RowDropped(NO_PROMPT)
            if not isinstance(entries, list):
                remedy = f'{LEAVE_OUT}; prompt_template: "{{{field}}}" makes prompts from text'
                raise Misfit(f"{field}: expected a list of messages, or its JSON, got {entries!r:.80}", remedy)
            messages = [_spell_message(entry, number) for number, entry in enumerate(entries)]
            if any(_is_empty(message) for message in messages):
                raise RowDropped(NO_PROMPT)
            try:
                messages = messages_of(messages)
            except ValueError as error:
                raise Misfit(f"{field}: {error}") from None
            if config.system_prompt is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": config.system_prompt})
            return messages

        return read_messages
    texts = [name for name in columns if isinstance(first[name], str) and name not in config.images]
    template = Template(config.prompt_template, columns, texts)
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []

    def fill_template(row: Row) -> list[Message]:
        if template.lacks(row):
            raise RowDropped(NO_PROMPT)
        return [*system, {"role": "user", "content": template.format(row)}]

    return fill_template


def find_fault(made: Any) -> str | None:
    """Return why a made row is not a valid row, or None."""
    if type(made) is not dict:
        return f"is a {type(made).__name__}, not a dict"
    prompt = made.get("prompt")
    if type(prompt) is not list or not prompt:
        return "has no prompt (a list of messages)"
    for message in prompt:
        if type(message) is not dict or type(message.get("role")) is not str:
            return "has a message without a role"
        if type(content := message.get("content")) in (bytes, bool, int, float):
            return f"has a message whose content is a {type(content).__name__}"
    for key in ("reward_model", "extra_info"):
        if type(value := made.get(key)) is not dict and value is not None:
            return f"has {key} that is not a dict"
    return None


def find_lack(made: Row) -> str | None:
    """Return what a made row lacks for training, or None."""
    reward = made.get("reward_model")
    if reward and "ground_truth" in reward:
        truth = reward["ground_truth"]
        if not truth if type(truth) is str else store_truth(plain(truth)) is None:
            return NO_TRUTH
    last = made["prompt"][-1].get("content")  # the last message usually has content
    return NO_PROMPT if not (last and type(last) is str and not last.isspace()) and _is_silent(made["prompt"]) else None


def plain(value: Any) -> Any:
    """Convert numpy scalars and arrays to Python values."""
    return value if type(value) in _PLAIN or not hasattr(value, "tolist") else value.tolist()


def call_make_map_fn(taskset: DatasetRows) -> Callable[[Row, int], Any]:
    """Call a task's map function, built in or a user's, with the row and its index."""
    whose = f"_make_map_fn() of {type(taskset).__name__}"
    with user_code(whose):
        function = taskset._make_map_fn()
    if not callable(function):
        raise TasksetError(
            f"{whose} returned {function!r:.80}, not a function", remedy="return a function of (row, index)"
        )
    parameters = inspect.signature(function).parameters.values()
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    second = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:2]
    # A parameter with a default is the author's own (`lambda row, key=key`), unless its name says otherwise.
    if several or any(p.default is p.empty or p.name in ("index", "idx", "i") for p in second):
        return function

    def with_index(row: Row, index: int) -> Any:
        made = function(row)
        if isinstance(made, dict):
            made["extra_info"] = {**(made.get("extra_info") or {}), "index": index}
        return made

    return with_index


def truth_finder(config: str | GroundTruthConfig, columns: Sequence[str]) -> tuple[str, Callable[[Any], Any]]:
    """Return the column of the ground truth, and a function that finds it in a value: as stored, or None if there is
    none."""
    given = GroundTruthConfig(column=config) if isinstance(config, str) else config
    path = ColumnPath.parse(given.column, columns)
    if path is None:
        raise ConfigError([("ground_truth", no_column(given.column.partition("[")[0], columns))])

    def read(value: Any) -> Any:
        try:
            return path.read(value)
        except (LookupError, TypeError, ValueError):
            return None

    if given.pattern is None:
        return path.column, (lambda value: store_truth(read(value))) if path.items else store_truth
    try:
        pattern = re.compile(given.pattern)
    except re.error as error:
        raise ConfigError([("ground_truth.pattern", f"not a regular expression: {error}")]) from None
    if pattern.groups > 1:
        raise ConfigError([("ground_truth.pattern", "has several groups; use (?:...) for all but the answer")])

    def search(value: Any) -> str | None:
        # The last match counts: a solution may quote the marker before its end.
        value = read(value)
        matches = pattern.findall(value) if isinstance(value, str) else None
        return (matches[-1].strip() or None) if matches else None

    return path.column, search


def store_truth(value: Any) -> Any:
    """Convert scalars to text, which scorers compare and which lets any two files be joined. Structures stay as they
    are."""
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, str | list | dict):
        return value
    if isinstance(value, bytes):
        return value.decode() or None  # bytes that are not text are reported as a fault of the row
    times = (datetime.date, datetime.time, datetime.timedelta)
    return msgspec.to_builtins(value) if isinstance(value, times) else str(value)


def _is_silent(messages: list[Any]) -> bool:
    """Whether all messages except the system's are empty."""
    said = [
        message.get(key) for message in messages if message["role"] != "system" for key in ("content", "tool_calls")
    ]
    return not any(value.strip() if isinstance(value, str) else value for value in said)


def _parse_messages(entries: Any) -> Any:
    """Parse JSON text that holds a list; return anything else unchanged."""
    if not isinstance(entries, str) or not entries.lstrip().startswith("["):
        return entries if entries != "" else None
    try:
        return decode_json(entries)
    except msgspec.DecodeError:
        return entries


def _is_empty(message: Message) -> bool:
    """Whether a message has a role but no content. Tool calls may stand alone."""
    return isinstance(message.get("role"), str) and message.get("content") is None and not message.get("tool_calls")


def _spell_message(entry: Any, number: int) -> Message:
    """Return a message with the keys `role` and `content`."""
    if not isinstance(entry, dict):
        raise Misfit(f"message {number} is {entry!r:.80}, not a mapping with role and content")
    message = {key: value for key, value in entry.items() if value is not None or key == "content"}
    if "role" in message or "from" not in message:
        return message
    role = _ROLES.get(str(message["from"]))
    if role is None:
        raise Misfit(f"message {number} is from {message['from']!r}; known roles: {', '.join(_ROLES)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "content")}
    return {"role": role, "content": message.get("value"), **rest}


# Completing made rows

RESERVED = frozenset(("index", "scorer", "env_class", ROW, MARK))
"""Keys of `extra_info` that Treetune itself fills in."""
_SEEN = ("data_source", "extra_info", "env_class")
"""Columns that verl passes to reward functions."""


def write_images(made: Row, index: int, images: ImageReader) -> tuple[Row, list[Message]]:
    """Return a made row with its images in the canonical layout, wherever they were before, and the messages of its
    task."""
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


def complete_row(taskset: DatasetRows, made: Row, messages: list[Message], index: int) -> tuple[str, Row]:
    """Return the uid of a made row's task, and the row with all fields of a canonical row."""
    config = taskset.config
    given = made.get("extra_info") or {}
    env_class = made.get("env_class") or given.get("env_class") or config.env_class
    if type(env_class) is not str and env_class is not None:
        raise TasksetError(f"row {index} has the env_class {env_class!r}, which is not a name")
    reward = _complete_reward(made.get("reward_model"), config.reward_method)
    spec = _reward_spec(reward)
    scorer = taskset.row_scorer
    if env_class is not None:
        scorer = taskset.describe_environment(env_class)
    elif scorer == BY_RULE and "ground_truth" not in spec:
        scorer = None
    tools = taskset.tool_names
    uid = uid_of(messages, spec, env_class, {"tools": tools} if tools else {})
    extra = {
        "index": _index(given.get("index", index), index),
        "uid": uid,
        "scorer": None if scorer is None else scorer.text,
    }
    if env_class is not None:
        extra["env_class"] = env_class
    if scorer not in (None, BY_RULE):
        unseen = {key: plain(value) for key, value in made.items() if key not in _SEEN}
        extra[ROW] = encode_unseen({**unseen, "reward_model": reward, "extra_info": given})
    for key, value in given.items():
        if key not in RESERVED and not (key == "uid" and value is None):
            extra[key] = plain(value)
    if tools:
        extra[KEY] = to_json_text({"tools": tools})
    own = made.get("data_source")
    data_source = config.data_source if own is None else str(own)
    row = {"data_source": None, "prompt": None, **made, "reward_model": reward, "extra_info": extra}
    row["data_source"] = data_source
    if "env_class" in made:
        del row["env_class"]
    if reward is None:
        del row["reward_model"]
    return uid, row


def _complete_reward(reward: dict[str, Any] | None, method: str) -> dict[str, Any] | None:
    if not reward or "ground_truth" not in reward:
        return reward or None
    if type(reward["ground_truth"]) is str and reward["ground_truth"] and "style" in reward:
        return dict(reward)
    return {"style": method, **reward, "ground_truth": store_truth(plain(reward["ground_truth"]))}


def _reward_spec(reward: dict[str, Any] | None) -> dict[str, Any]:
    """Return the reward specification as the format would read it, with a fast path for the usual one."""
    if reward is not None and len(reward) == 2 and type(reward.get("ground_truth")) is str and "style" in reward:
        return {"ground_truth": reward["ground_truth"], "method": reward["style"]}
    return FORMATS["verl"].read_reward({"reward_model": reward})


def _index(value: Any, position: int) -> int:
    try:
        return value if type(value) is int else int(value)
    except (TypeError, ValueError):
        raise TasksetError(
            f"row {position} has the index {value!r}, which is not a whole number",
            remedy="extra_info.index is the number of the row in the source: store any other value under another key",
        ) from None
