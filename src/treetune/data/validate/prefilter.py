"""Finds the rows of an Arrow batch that need a closer check: all others are proven sound, whole columns at a time.

It may select a sound row but never skips a faulty one; `check_row` decides. So a million sound rows cost a second, and
each rule is implemented once. Arrow's own `to_numpy` is not used because it imports pandas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treetune.core.environment import Kind, Stored, TaskRequirements
from treetune.data.validate.prompt_rules import ODD, ROLES, Keys, Mask
from treetune.data.validate.rules import SPECIAL, RowContext

Numbers = np.ndarray[Any, Any]


class PromptColumns(NamedTuple):
    """A batch of rows whose prompts are messages with text; all their messages form one array."""

    rows: pa.StructArray
    starts: Numbers
    """Where the messages of each prompt begin, and where those of the last prompt end."""
    roles: pa.DictionaryArray
    contents: pa.Array | None
    """None if contents were not read, or are missing."""

    def any_message(self, mask: Mask) -> Mask:
        """Return the rows that have at least one message in the mask."""
        total = np.concatenate(([0], np.cumsum(mask)))
        return np.asarray(total[self.starts[1:]] > total[self.starts[:-1]])


def columns_of(batch: pa.RecordBatch) -> PromptColumns | None:
    """Return the columns; None if their types differ from those of usual sound rows, so that every row needs a
    check."""
    rows = batch.to_struct_array()
    prompts = _values_at(rows, "prompt")
    if prompts is None or not _is_list(prompts) or prompts.null_count or prompts.values.null_count:
        return None
    roles, contents = _values_at(prompts.values, "role"), _values_at(prompts.values, "content")
    if not _is_text(roles) or (contents is not None and (not _is_text(contents) or contents.null_count)):
        return None
    return PromptColumns(rows, offsets_of(prompts).astype(np.int64), roles.dictionary_encode(), contents)


def prefilter(columns: PromptColumns, check: RowContext) -> Mask:
    """Return which rows need a check: all rows if the format is not SkyRL's or a column is unusual."""
    environments, extra = _values_at(columns.rows, "env_class"), _values_at(columns.rows, "extra_info")
    truths = _values_at(columns.rows, "reward_spec", "ground_truth")
    usual = _is_text(environments) and _is_text(truths) and (extra is None or pa.types.is_struct(extra.type))
    if (scorers := _values_at(columns.rows, "extra_info", "scorer")) is not None:
        usual = usual and (_is_text(scorers) or scorers.null_count == len(scorers))
    if not usual or not check.format.has_environments or (check.contents and columns.contents is None):
        return np.ones(len(columns.rows), np.bool_)
    return _may_have_odd_prompts(columns, check) | _may_break_requirements(
        environments.dictionary_encode(), truths, check
    )


def _may_have_odd_prompts(columns: PromptColumns, check: RowContext) -> Mask:
    roles = columns.roles
    odd = ~_where(roles, ROLES.__contains__)
    if check.contents:
        odd = odd | _is_blank(columns.contents) | _may_be_special(columns.contents, check.special)
    # One more element at the front, for a first prompt without messages.
    assistant = np.concatenate(([False], _where(roles, "assistant".__eq__)))
    ends_with_assistant: Mask = assistant[columns.starts[1:]]
    return columns.any_message(odd) | ~columns.any_message(_where(roles, "user".__eq__)) | ends_with_assistant


def _may_be_special(texts: pa.Array, special: re.Pattern[str]) -> Mask:
    """Return which texts may hold a special token. The usual ones begin with < or [, and most texts have neither."""
    offsets = offsets_of(texts)
    data = bytes(bytes_of(texts)[offsets[0] : offsets[-1]])
    if special is SPECIAL and b"<" not in data and b"[" not in data:
        return np.zeros(len(texts), np.bool_)
    return _mask_of(pc.match_substring_regex(texts, special.pattern))


def _may_break_requirements(environments: pa.DictionaryArray, truths: pa.Array, check: RowContext) -> Mask:
    missing, blank = _mask_of(truths.is_null()), _is_blank(truths)
    look = ~_where(environments, check.known.__contains__) | missing
    for name in environments.dictionary.to_pylist():
        if (needed := check.requirements(name)) is None:
            continue
        rows = _where(environments, name.__eq__)
        if check.has_turns(name) or not _reads_one_text(needed):
            look |= rows
        elif needed.pattern is None:
            look |= rows & blank
        else:
            look |= rows & ~_mask_of(pc.match_substring_regex(truths, rf"^(?:{needed.pattern})$"))
    return look


def _reads_one_text(needed: TaskRequirements) -> bool:
    """Whether an environment reads a text and nothing else. Rows of other environments are checked one by one."""
    if needed.needs or needed.choices or needed.column != "reward_spec":
        return False
    plain = needed.stored is Stored.AS_IS and needed.takes == (Kind.TEXT,) and type(needed) is TaskRequirements
    return plain or needed.stored is Stored.TEXT


def keys_of(columns: PromptColumns) -> Keys | None:
    """Return the keys of all prompts of a batch; None if contents are missing."""
    from xxhash import xxh3_64_intdigest

    if columns.contents is None:
        return None
    starts, offsets, data = columns.starts, offsets_of(columns.contents), bytes_of(columns.contents)
    texts = (data[begin:end] for begin, end in pairwise(offsets[starts].tolist()))
    hashes = np.fromiter(map(xxh3_64_intdigest, texts), np.uint64, len(starts) - 1)
    counts = np.diff(starts)
    place = np.arange(starts[0], starts[-1]) - np.repeat(starts[:-1], counts) + 1
    lengths = np.diff(offsets)[starts[0] : starts[-1]].astype(np.int64)
    total = np.concatenate(([0], np.cumsum(lengths * place)))
    ends = total[starts[1:] - starts[0]] - total[starts[:-1] - starts[0]]
    keys = hashes + ends.astype(np.uint64) * np.uint64(ODD)
    keys[counts == 0] = 0
    return np.asarray(keys)


# Arrow arrays as numpy arrays, without a copy if possible


def _where(array: pa.DictionaryArray, holds: Callable[[Any], bool]) -> Mask:
    """Return which values pass a test; null never does. The test runs once per distinct value."""
    known = np.array([*map(holds, array.dictionary.to_pylist()), False], np.bool_)
    return np.asarray(known[np.from_dlpack(_fill_nulls(array.indices, -1))])


def _fill_nulls(array: pa.Array, value: Any) -> pa.Array:
    """Fill nulls only if there are any: it imports pandas, which takes a fifth of a second."""
    return array.fill_null(value) if array.null_count else array


def offsets_of(array: pa.Array) -> Numbers:
    """Return where each text or list begins, and where the last one ends."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_list(array.type)
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)[array.offset :][: len(array) + 1]


def bytes_of(text: pa.Array) -> memoryview:
    """Return the text of all values, concatenated."""
    buffer = text.buffers()[2] if len(text) else None
    return memoryview(buffer) if buffer is not None else memoryview(b"")


def _is_text(array: pa.Array | None) -> bool:
    return array is not None and bool(pa.types.is_string(array.type) or pa.types.is_large_string(array.type))


def _is_list(array: pa.Array) -> bool:
    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def _values_at(values: pa.Array, *path: str) -> Any:
    """Return the values of a field, decoded from any dictionary; None if the field is missing."""
    for name in path:
        if not pa.types.is_struct(values.type) or values.type.get_field_index(name) < 0:
            return None
        values = pc.struct_field(values, name) if values.null_count else values.field(name)
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return values


def _mask_of(array: pa.Array) -> Mask:
    """Return booleans as a mask; null is false."""
    return np.from_dlpack(_fill_nulls(array, False).cast(pa.uint8())).astype(np.bool_)


def _is_blank(text: pa.Array) -> Mask:
    """Return which texts are empty or whitespace."""
    return np.asarray(np.diff(offsets_of(text)) == 0) | _mask_of(pc.utf8_is_space(text))
