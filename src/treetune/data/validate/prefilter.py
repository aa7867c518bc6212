"""Which rows of an Arrow batch need a look: all others are proven sound, whole columns at a time.

It may point at a sound row, never pass over a faulty one; `RowCheck` decides. So a million sound rows cost a second,
and each rule is decided in one place. Arrow's own `to_numpy` is not used: it imports pandas.
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
from treetune.data.validate.prompts import ODD, ROLES, Keys, Mask
from treetune.data.validate.rules import SPECIAL, RowContext

Numbers = np.ndarray[Any, Any]


class PromptColumns(NamedTuple):
    """A batch of rows whose prompts are messages with text; the messages of all of them are one array."""

    rows: pa.StructArray
    starts: Numbers
    """Where the messages of each prompt begin, and where those of the last end."""
    roles: pa.DictionaryArray
    contents: pa.Array | None
    """None where they were not read, or are not there."""

    def any_message(self, mask: Mask) -> Mask:
        """The rows of which some message is in a mask of messages."""
        total = np.concatenate(([0], np.cumsum(mask)))
        return np.asarray(total[self.starts[1:]] > total[self.starts[:-1]])


def columns_of(batch: pa.RecordBatch) -> PromptColumns | None:
    """None where columns are of other types than those of sound rows usually: then every row needs a look."""
    rows = batch.to_struct_array()
    prompts = _values_at(rows, "prompt")
    if prompts is None or not _is_list(prompts) or prompts.null_count or prompts.values.null_count:
        return None
    roles, contents = _values_at(prompts.values, "role"), _values_at(prompts.values, "content")
    if not _is_text(roles) or (contents is not None and (not _is_text(contents) or contents.null_count)):
        return None
    return PromptColumns(rows, offsets_of(prompts).astype(np.int64), roles.dictionary_encode(), contents)


def prefilter(columns: PromptColumns, check: RowContext) -> Mask:
    """Which rows need a look: all of a format other than SkyRL's, or where a column is not as usual."""
    environments, extra = _values_at(columns.rows, "env_class"), _values_at(columns.rows, "extra_info")
    truths = _values_at(columns.rows, "reward_spec", "ground_truth")
    usual = _is_text(environments) and _is_text(truths) and (extra is None or pa.types.is_struct(extra.type))
    if (scorers := _values_at(columns.rows, "extra_info", "scorer")) is not None:
        usual = usual and (_is_text(scorers) or scorers.null_count == len(scorers))
    if not usual or not check.format.has_environments or (check.contents and columns.contents is None):
        return np.ones(len(columns.rows), np.bool_)
    return _may_have_odd_prompts(columns, check) | _may_break_contracts(environments.dictionary_encode(), truths, check)


def _may_have_odd_prompts(columns: PromptColumns, check: RowContext) -> Mask:
    roles = columns.roles
    odd = ~_where(roles, ROLES.__contains__)
    if check.contents:
        odd = odd | _is_blank(columns.contents) | _may_be_special(columns.contents, check.special)
    # One more in front, for a first prompt without messages.
    assistant = np.concatenate(([False], _where(roles, "assistant".__eq__)))
    ends_with_assistant: Mask = assistant[columns.starts[1:]]
    return columns.any_message(odd) | ~columns.any_message(_where(roles, "user".__eq__)) | ends_with_assistant


def _may_be_special(texts: pa.Array, special: re.Pattern[str]) -> Mask:
    """Which may hold a special token. The usual ones begin with < or [, and most texts have neither."""
    offsets = offsets_of(texts)
    data = bytes(bytes_of(texts)[offsets[0] : offsets[-1]])
    if special is SPECIAL and b"<" not in data and b"[" not in data:
        return np.zeros(len(texts), np.bool_)
    return _mask_of(pc.match_substring_regex(texts, special.pattern))


def _may_break_contracts(environments: pa.DictionaryArray, truths: pa.Array, check: RowContext) -> Mask:
    missing, blank = _mask_of(truths.is_null()), _is_blank(truths)
    look = ~_where(environments, check.known.__contains__) | missing
    for name in environments.dictionary.to_pylist():
        if (contract := check.contract(name)) is None:
            continue
        rows = _where(environments, name.__eq__)
        if not _reads_one_text(contract):
            look |= rows
        elif contract.pattern is None:
            look |= rows & blank
        else:
            look |= rows & ~_mask_of(pc.match_substring_regex(truths, rf"^(?:{contract.pattern})$"))
    return look


def _reads_one_text(contract: TaskRequirements) -> bool:
    """Whether an environment reads a text and nothing else. Rows of others are looked at one by one."""
    if contract.needs or contract.choices or contract.max_turns > 1 or contract.column != "reward_spec":
        return False
    plain = contract.stored is Stored.AS_IS and contract.takes == (Kind.TEXT,) and type(contract) is TaskRequirements
    return plain or contract.stored is Stored.TEXT


def keys_of(columns: PromptColumns) -> Keys | None:
    """The keys of all prompts of a batch; None where contents are not there."""
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


# Arrow arrays as numpy arrays, without a copy where that is possible


def _where(array: pa.DictionaryArray, holds: Callable[[Any], bool]) -> Mask:
    """Which values pass a test, which null never does. Asked once for each different value."""
    known = np.array([*map(holds, array.dictionary.to_pylist()), False], np.bool_)
    return np.asarray(known[np.from_dlpack(_fill_nulls(array.indices, -1))])


def _fill_nulls(array: pa.Array, value: Any) -> pa.Array:
    """Only where there are some: it imports pandas, a fifth of a second."""
    return array.fill_null(value) if array.null_count else array


def offsets_of(array: pa.Array) -> Numbers:
    """Where each text or list begins, and where the last ends."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_list(array.type)
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)[array.offset :][: len(array) + 1]


def bytes_of(text: pa.Array) -> memoryview:
    """The text of all values, one after another."""
    buffer = text.buffers()[2] if len(text) else None
    return memoryview(buffer) if buffer is not None else memoryview(b"")


def _is_text(array: pa.Array | None) -> bool:
    return array is not None and bool(pa.types.is_string(array.type) or pa.types.is_large_string(array.type))


def _is_list(array: pa.Array) -> bool:
    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def _values_at(values: pa.Array, *path: str) -> Any:
    """The values of a field, not as a dictionary; None where there is none."""
    for name in path:
        if not pa.types.is_struct(values.type) or values.type.get_field_index(name) < 0:
            return None
        values = pc.struct_field(values, name) if values.null_count else values.field(name)
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return values


def _mask_of(array: pa.Array) -> Mask:
    """Booleans; null is false."""
    return np.from_dlpack(_fill_nulls(array, False).cast(pa.uint8())).astype(np.bool_)


def _is_blank(text: pa.Array) -> Mask:
    """Which are empty, or nothing but space."""
    return np.asarray(np.diff(offsets_of(text)) == 0) | _mask_of(pc.utf8_is_space(text))
