"""Which rows of an Arrow batch need a look: all others are proven sound, whole columns at a time.

It may point at a sound row, never pass over a faulty one; `RowCheck` decides. So a million sound rows cost a second,
and each rule is written once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.environment import Contract, Kind, Stored
from treetune.validate.arrays import (
    Mask,
    bytes_of,
    codes_of,
    column_of,
    field_of,
    is_struct,
    is_text,
    mask_of,
    offsets_of,
    taken,
)
from treetune.validate.prompts import Keys, keys_of
from treetune.validate.row import SPECIAL, RowCheck
from treetune.validate.rules import ROLES

if TYPE_CHECKING:
    import pyarrow as pa


class Screened:
    """`look`: the rows to look at. `keys`: of the prompts, where they were read."""

    def __init__(self, batch: pa.RecordBatch, check: RowCheck) -> None:
        self.look: Mask = np.zeros(batch.num_rows, np.bool_)
        self.keys: Keys | None = None
        if check.format == "skyrl":
            self._prompts(batch, check)
            self._rewards(batch, check)
        else:
            self.look[:] = True

    def _prompts(self, batch: pa.RecordBatch, check: RowCheck) -> None:
        import pyarrow as pa

        column = column_of(batch, "prompt")
        if column is None or not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            self.look[:] = True
            return
        messages, starts = column.values, offsets_of(column).astype(np.int64)
        role = field_of(messages, "role")
        content = field_of(messages, "content")
        if role is None or not is_text(role.type) or column.null_count or messages.null_count:
            self.look[:] = True
            return
        numbers, names = codes_of(role)
        sound = np.array([*(name in ROLES for name in names), False])[numbers]  # -1 is the last
        user = np.array([*(name == "user" for name in names), False])[numbers]
        if check.contents:
            if content is None or not is_text(content.type) or content.null_count:
                self.look[:] = True
                return
            content = content.cast(pa.string()) if pa.types.is_string_view(content.type) else content
            sound &= ~_blank(content)
            sound &= ~_special(content, check.special)
            self.keys = keys_of(starts, content)
        self.look |= _counts(~sound, starts) > 0
        self.look |= _counts(user, starts) == 0
        last = np.maximum(starts[1:] - 1, 0)
        if "assistant" in names and len(numbers):
            self.look |= numbers[last] == names.index("assistant")

    def _rewards(self, batch: pa.RecordBatch, check: RowCheck) -> None:
        environments = column_of(batch, "env_class")
        if environments is None or not is_text(environments.type):
            self.look[:] = True
            return
        extra = column_of(batch, "extra_info")
        if extra is not None and not is_struct(extra.type):
            self.look[:] = True
            return
        numbers, names = codes_of(environments)
        self.look |= numbers < 0
        for number, name in enumerate(names):
            mine = numbers == number
            if name not in check.known:
                self.look |= mine
                continue
            self.look |= mine & ~_rewarded(batch, check.contract(name))


def _rewarded(batch: pa.RecordBatch, contract: Contract | None) -> Mask:
    """Which rows are surely rewarded as the environment reads them."""
    spec = column_of(batch, "reward_spec")
    if contract is None:
        truth = field_of(spec, "ground_truth") if spec is not None else None
        return mask_of(truth.is_valid()) if truth is not None else np.zeros(batch.num_rows, np.bool_)
    return _truthful(batch, contract) & _complete(batch, contract) & _counted(batch, contract)


def _truthful(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows surely have a ground truth that can be matched. What is JSON must be parsed, so that none is sure."""
    import pyarrow.compute as pc

    nothing: Mask = np.zeros(batch.num_rows, np.bool_)
    holder, spec = column_of(batch, contract.column), column_of(batch, "reward_spec")
    truth = field_of(holder, "ground_truth") if holder is not None else None
    if truth is None:
        return nothing
    if contract.stored is Stored.TARGET:
        target = field_of(truth, "target")
        return _targets(target) if target is not None else nothing
    plain = contract.stored is Stored.AS_IS and contract.takes == (Kind.TEXT,) and type(contract) is Contract
    if not is_text(truth.type) or not (plain or contract.stored is Stored.TEXT):
        return nothing
    sure = mask_of(truth.is_valid()) & ~_blank(truth)
    if contract.pattern is not None:
        sure &= mask_of(pc.match_substring_regex(truth, rf"^(?:{contract.pattern})$"))
    if contract.column != "reward_spec" and spec is not None:
        other = field_of(spec, "ground_truth")
        sure &= mask_of(pc.equal(truth, other)) if other is not None and other.type == truth.type else False
    return sure


def _targets(target: pa.Array) -> Mask:
    """Which are a text, or a list of texts, none of them blank."""
    import pyarrow as pa

    if is_text(target.type):
        return mask_of(target.is_valid()) & ~_blank(target)
    if not pa.types.is_list(target.type) or not is_text(target.type.value_type):
        return np.zeros(len(target), np.bool_)
    bad = ~mask_of(target.values.is_valid()) | _blank(target.values)
    starts = offsets_of(target).astype(np.int64)
    sure: Mask = mask_of(target.is_valid()) & (starts[1:] > starts[:-1]) & (_counts(bad, starts) == 0)
    return sure


def _complete(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows have the columns that the environment reads; only those are sure that are text, or a mapping."""
    sure: Mask = np.ones(batch.num_rows, np.bool_)
    for key in contract.needs.keys() | contract.choices.keys():
        column = column_of(batch, key)
        if column is None:
            return np.zeros(batch.num_rows, np.bool_)
        sure &= mask_of(column.is_valid())
        if is_text(column.type):
            sure &= ~_blank(column)
            if key in contract.choices:
                numbers, names = codes_of(column)
                sure &= np.array([*(name in contract.choices[key] for name in names), False])[numbers]
        elif not is_struct(column.type):
            return np.zeros(batch.num_rows, np.bool_)
    return sure


def _counted(batch: pa.RecordBatch, contract: Contract) -> Mask:
    """Which rows have a whole number of turns, or none, which `Turns` looks after."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sure: Mask = np.ones(batch.num_rows, np.bool_)
    extra = column_of(batch, "extra_info")
    for turns in (column_of(batch, "max_turns"), field_of(extra, "max_turns") if extra is not None else None):
        if contract.max_turns > 1 and turns is not None and not pa.types.is_null(turns.type):
            whole = mask_of(pc.greater_equal(turns, 1)) if pa.types.is_integer(turns.type) else False
            sure &= whole | ~mask_of(turns.is_valid())
    return sure


def _blank(content: pa.Array) -> Mask:
    """Which contents are empty, or nothing but space."""
    import pyarrow.compute as pc

    offsets = offsets_of(content)
    blank: Mask = offsets[1:] == offsets[:-1]
    data = np.frombuffer(bytes_of(content) or b"\0", np.uint8)
    first = data[np.minimum(offsets[:-1], len(data) - 1)]
    may = np.flatnonzero(((first <= 0x20) | (first >= 0x80)) & ~blank)
    blank[may] = mask_of(pc.utf8_is_space(taken(content, may))) if len(may) else False
    return blank


def _special(content: pa.Array, pattern: re.Pattern[str]) -> Mask:
    """Which contents may hold a special token."""
    import pyarrow.compute as pc

    if pattern is not SPECIAL:
        return mask_of(pc.match_substring_regex(content, pattern.pattern))
    offsets = offsets_of(content)
    begin, end = int(offsets[0]), int(offsets[-1])
    found: Mask = np.zeros(len(content), np.bool_)
    text = bytes(bytes_of(content)[begin:end])
    if b"<" not in text and b"[" not in text:
        return found
    data = np.frombuffer(text, np.uint8)
    places = np.flatnonzero((data == ord("<")) | (data == ord("[")))
    places = places[places < len(data) - 2]
    if len(places):
        words = (
            data[places].astype(np.uint32) << 16
            | data[places + 1].astype(np.uint32) << 8
            | data[places + 2].astype(np.uint32)
        )
        places = places[_BEGINS_WITH_TWO[words >> 8] | np.isin(words, _BEGIN)]
        found[np.searchsorted(offsets, places + begin, side="right") - 1] = True
    return found


_BEGIN = np.array(
    [int.from_bytes(text, "big") for text in (b"<s>", b"</s", b"<bo", b"<eo", b"<pa", b"<un", b"<st", b"<en", b"<<S")]
    + [int.from_bytes(text, "big") for text in (b"<</", b"[IN", b"[/I", "<｜".encode()[:3])],
    np.uint32,
)
_BEGINS_WITH_TWO = np.zeros(1 << 16, np.bool_)
_BEGINS_WITH_TWO[int.from_bytes(b"<|", "big")] = True


def _counts(mask: Mask, starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many messages of each prompt."""
    total = np.concatenate(([0], np.cumsum(mask)))
    return np.asarray(total[starts[1:]] - total[starts[:-1]])
