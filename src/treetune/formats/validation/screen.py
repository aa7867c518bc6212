"""Which rows of an Arrow batch need a look: all others are proven sound, whole columns at a time.

It may point at a sound row, never pass over a faulty one; `RowCheck` decides. So a million sound rows cost a second,
and each rule is written once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.contract import Contract, Stored
from treetune.formats.validation.arrays import Mask, bytes_of, codes_of, mask_of, offsets_of, taken
from treetune.formats.validation.prompts import Keys, keys_of
from treetune.formats.validation.row import SPECIAL, RowCheck
from treetune.formats.validation.rules import ROLES

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

        column = _column(batch, "prompt")
        if column is None or not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            self.look[:] = True
            return
        messages, starts = column.values, offsets_of(column).astype(np.int64)
        role = _field(messages, "role")
        content = _field(messages, "content")
        if role is None or not _is_text(role.type) or column.null_count or messages.null_count:
            self.look[:] = True
            return
        numbers, names = codes_of(role)
        sound = np.array([*(name in ROLES for name in names), False])[numbers]  # -1 is the last
        user = np.array([*(name == "user" for name in names), False])[numbers]
        if check.contents:
            if content is None or not _is_text(content.type) or content.null_count:
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
        environments = _column(batch, "env_class")
        if environments is None or not _is_text(environments.type):
            self.look[:] = True
            return
        extra = _column(batch, "extra_info")
        if extra is not None and not _is_struct(extra.type):
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
    import pyarrow.compute as pc

    nothing: Mask = np.zeros(batch.num_rows, np.bool_)
    spec = _column(batch, "reward_spec")
    truth = _field(spec, "ground_truth") if spec is not None else None
    if truth is None:
        return nothing
    sure = mask_of(truth.is_valid())
    if contract is None:
        return sure
    if contract.stored is not Stored.TEXT or contract.column != "reward_spec" or contract.choices:
        return nothing
    if not _is_text(truth.type):
        return nothing
    pattern = rf"^(?:{contract.pattern})$" if contract.pattern is not None else r"\S"
    sure = sure & mask_of(pc.match_substring_regex(truth, pattern))
    for key in contract.needs:
        column = _column(batch, key)
        sure = sure & mask_of(column.is_valid()) if column is not None else nothing
    if contract.max_turns > 1:
        extra = _column(batch, "extra_info")
        given = [_column(batch, "max_turns"), _field(extra, "max_turns") if extra is not None else None]
        if any(turns is not None for turns in given):
            return nothing
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


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """A column by its name, its values plain."""
    import pyarrow as pa

    number = batch.schema.get_field_index(name)
    if number < 0:
        return None
    column = batch.column(number)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _field(array: pa.Array, name: str) -> pa.Array | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_struct(array.type) or array.type.get_field_index(name) < 0:
        return None
    field = pc.struct_field(array, name) if array.null_count else array.field(name)
    return field.dictionary_decode() if pa.types.is_dictionary(field.type) else field


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
