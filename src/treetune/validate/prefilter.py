"""Which rows of an Arrow batch need a look: all others are proven sound, whole columns at a time.

It may point at a sound row, never pass over a faulty one; `RowCheck` decides. So a million sound rows cost a second,
and each rule is written once. Arrow's own `to_numpy` is not used: it imports pandas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treetune.environment import Contract, Kind, Stored
from treetune.validate.prompts import Keys, keys_of
from treetune.validate.row import SPECIAL, RowCheck
from treetune.validate.rules import ROLES

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, Any]


def prefilter(batch: pa.RecordBatch, check: RowCheck) -> tuple[Mask, Keys | None]:
    """Which rows need a look, and the keys of the prompts where they were read."""
    if not check.format.has_environments:
        return np.ones(batch.num_rows, np.bool_), None
    look, keys = _look_at_prompts(batch, check)
    return look | _look_at_rewards(batch, check), keys


def _look_at_prompts(batch: pa.RecordBatch, check: RowCheck) -> tuple[Mask, Keys | None]:
    every: Mask = np.ones(batch.num_rows, np.bool_)
    column = values_at(batch, "prompt")
    if column is None or not is_list(column) or column.null_count or column.values.null_count:
        return every, None
    messages, starts = column.values, offsets_of(column).astype(np.int64)
    role, content = values_at(messages, "role"), values_at(messages, "content")
    if role is None or not is_text(role):
        return every, None
    roles, keys = encode(role), None
    sound = roles.where(ROLES.__contains__)
    if check.contents:
        if content is None or not is_text(content) or content.null_count:
            return every, None
        sound &= ~_is_blank(content) & ~_may_be_special(content, check.special)
        keys = keys_of(starts, offsets_of(content), bytes_of(content))
    look = (_count(~sound, starts) > 0) | (_count(roles.where("user".__eq__), starts) == 0)
    if len(role):
        look |= roles.where("assistant".__eq__)[np.maximum(starts[1:] - 1, 0)]
    return look, keys


def _look_at_rewards(batch: pa.RecordBatch, check: RowCheck) -> Mask:
    every: Mask = np.ones(batch.num_rows, np.bool_)
    column, extra = values_at(batch, "env_class"), values_at(batch, "extra_info")
    if column is None or not is_text(column) or not (extra is None or is_struct(extra)):
        return every
    environments = encode(column)
    look = ~environments.where(check.known.__contains__)
    for name in check.known.intersection(environments.names):
        if (contract := check.contract(name)) is None:
            sure = is_valid(values_at(batch, "reward_spec", "ground_truth"), batch.num_rows)
        else:
            sure = _has_truth(batch, contract) & _has_columns(batch, contract) & _has_turns(batch, contract)
        look |= environments.where(name.__eq__) & ~sure
    return look


def _has_truth(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows surely have a ground truth that can be matched. What is JSON must be parsed, so that none is sure."""
    truth = values_at(batch, contract.column, "ground_truth")
    if truth is not None and contract.stored is Stored.TARGET:
        return _has_target(values_at(truth, "target"), batch.num_rows)
    plain = contract.stored is Stored.AS_IS and contract.takes == (Kind.TEXT,) and type(contract) is Contract
    if truth is None or not is_text(truth) or not (plain or contract.stored is Stored.TEXT):
        return np.zeros(batch.num_rows, np.bool_)
    sure = is_valid(truth) & ~_is_blank(truth)
    if contract.pattern is not None:
        sure &= mask_of(pc.match_substring_regex(truth, rf"^(?:{contract.pattern})$"))
    if contract.column != "reward_spec" and values_at(batch, "reward_spec") is not None:
        other = values_at(batch, "reward_spec", "ground_truth")
        sure &= mask_of(pc.equal(truth, other)) if other is not None and other.type == truth.type else False
    return sure


def _has_target(target: pa.Array | None, count: int) -> Mask:
    """Which are a text, or a list of texts, none of them blank."""
    if target is not None and is_text(target):
        return is_valid(target) & ~_is_blank(target)
    if target is None or not is_list(target) or not is_text(target.values):
        return np.zeros(count, np.bool_)
    starts = offsets_of(target).astype(np.int64)
    bad = ~is_valid(target.values) | _is_blank(target.values)
    sure: Mask = is_valid(target) & (starts[1:] > starts[:-1]) & (_count(bad, starts) == 0)
    return sure


def _has_columns(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows have the columns that the environment reads; only those are sure that are text, or a mapping."""
    sure: Mask = np.ones(batch.num_rows, np.bool_)
    for key in contract.needs.keys() | contract.choices.keys():
        column = values_at(batch, key)
        if column is not None and is_text(column):
            sure &= is_valid(column) & ~_is_blank(column)
            if key in contract.choices:
                sure &= encode(column).where(contract.choices[key].__contains__)
        elif column is not None and is_struct(column):
            sure &= is_valid(column)
        else:
            return np.zeros(batch.num_rows, np.bool_)
    return sure


def _has_turns(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows have a whole number of turns, or none, which `Turns` looks after."""
    sure: Mask = np.ones(batch.num_rows, np.bool_)
    for turns in (values_at(batch, "max_turns"), values_at(batch, "extra_info", "max_turns")):
        if contract.max_turns > 1 and turns is not None and not pa.types.is_null(turns.type):
            whole = mask_of(pc.greater_equal(turns, 1)) if pa.types.is_integer(turns.type) else False
            sure &= whole | ~is_valid(turns)
    return sure


def _is_blank(text: pa.Array) -> Mask:
    """Which are empty, or nothing but space."""
    offsets = offsets_of(text)
    blank: Mask = offsets[1:] == offsets[:-1]
    return blank | mask_of(pc.utf8_is_space(text))


def _may_be_special(content: pa.Array, pattern: re.Pattern[str]) -> Mask:
    """Which contents may hold a special token. The usual ones begin with < or [, and most texts have neither."""
    offsets = offsets_of(content)
    data = bytes(bytes_of(content)[offsets[0] : offsets[-1]])
    if pattern is SPECIAL and b"<" not in data and b"[" not in data:
        return np.zeros(len(content), np.bool_)
    return mask_of(pc.match_substring_regex(content, pattern.pattern))


def _count(mask: Mask, starts: Numbers) -> Numbers:
    """How many items of each list."""
    total = np.concatenate(([0], np.cumsum(mask)))
    return np.asarray(total[starts[1:]] - total[starts[:-1]])


# Arrow arrays as numpy arrays, without a copy where that is possible


class Codes(NamedTuple):
    """A column as places in the list of its different values; null is -1."""

    numbers: Numbers
    names: list[Any]

    def where(self, holds: Callable[[Any], bool]) -> Mask:
        """The rows whose value passes a test, which null never does. Asked once for each different value."""
        return np.array([*map(holds, self.names), False], np.bool_)[self.numbers]


def encode(array: pa.Array) -> Codes:
    encoded = array.dictionary_encode()
    indices = encoded.indices
    numbers = np.frombuffer(indices.buffers()[1], np.int32)[indices.offset : indices.offset + len(indices)]
    if indices.null_count:
        numbers = np.where(is_valid(indices), numbers, -1)
    return Codes(numbers, encoded.dictionary.to_pylist())


def mask_of(array: pa.Array) -> Mask:
    """Booleans; null is false."""
    array = array.fill_null(False) if array.null_count else array
    bits = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
    return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)].astype(np.bool_)


def is_valid(array: pa.Array | None, count: int = 0) -> Mask:
    """Which values are not null; none of `count` where there is no such column."""
    return mask_of(array.is_valid()) if array is not None else np.zeros(count, np.bool_)


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


def values_at(holder: pa.RecordBatch | pa.Array, *path: str) -> pa.Array | None:
    """The values of a column, or of a field inside it, not as a dictionary; None where there is none."""
    for name in path:
        array = holder.to_struct_array() if isinstance(holder, pa.RecordBatch) else holder
        if not is_struct(array) or array.type.get_field_index(name) < 0:
            return None
        field = pc.struct_field(array, name) if array.null_count else array.field(name)
        holder = field.dictionary_decode() if pa.types.is_dictionary(field.type) else field
    return holder


def is_struct(array: pa.Array) -> bool:
    return bool(pa.types.is_struct(array.type))


def is_list(array: pa.Array) -> bool:
    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def is_text(array: pa.Array) -> bool:
    return bool(pa.types.is_string(array.type) or pa.types.is_large_string(array.type))
