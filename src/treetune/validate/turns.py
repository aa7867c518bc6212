"""Rows without `max_turns` where their file, or one that is loaded with it, has a place for it: loaders give them a
null, and `int(None)` fails.

    turns = Turns()                       # of one file
    turns.take(row, number, check)        # a row of JSON, with its nulls
    turns.take_batch(batch, numbers, check)     # many rows of parquet
    turns.tell(report, file, unit, column=True, inside=False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.validate.arrays import Mask, codes_of, column_of, field_of, is_struct, is_text, mask_of
from treetune.validate.report import Report
from treetune.validate.row import MAKE_NUMBERS, RowCheck
from treetune.validate.shape import Places

if TYPE_CHECKING:
    import pyarrow as pa


class Turns:
    def __init__(self) -> None:
        self._without = Places()
        """Rows without a `max_turns` of their own, in an environment of several turns."""
        self._without_inside = Places()
        """Those whose `extra_info`, which their environment reads too, has none either."""
        self._null_inside = Places()
        """Those of JSON in whose `extra_info` a null is written."""

    def take(self, row: Mapping[str, Any], number: int, check: RowCheck) -> None:
        env_class = row.get("env_class")
        if not isinstance(env_class, str) or not _several(env_class, check) or row.get("max_turns") is not None:
            return
        self._without.add(number)
        extra = row.get("extra_info")
        if env_class in MAKE_NUMBERS and isinstance(extra, dict) and extra.get("max_turns") is None:
            self._without_inside.add(number)
            if "max_turns" in extra:
                self._null_inside.add(number)

    def take_batch(self, batch: pa.RecordBatch, numbers: Sequence[int], check: RowCheck) -> None:
        """The same for rows of parquet, whole columns at a time."""
        environments = column_of(batch, "env_class")
        if environments is None or not is_text(environments.type):
            return
        codes, names = codes_of(environments)
        several = [_several(name, check) for name in names]
        if not any(several):
            return
        without = np.array([*several, False])[codes] & ~_given(column_of(batch, "max_turns"), batch.num_rows)
        self._without.add_many(numbers, without)
        extra = column_of(batch, "extra_info")
        if extra is not None and is_struct(extra.type):
            reads = np.array([*(name in MAKE_NUMBERS for name in names), False])[codes]
            inside = ~_given(field_of(extra, "max_turns"), batch.num_rows) & mask_of(extra.is_valid())
            self._without_inside.add_many(numbers, without & reads & inside)

    def tell(self, report: Report, file: str, unit: str, *, column: bool, inside: bool) -> None:
        """`column`: whether the files that are loaded together have a column `max_turns`. `inside`: whether all their
        `extra_info` have that key; JSON whose mappings differ has it only where it is written."""
        if column:
            place, rows = "max_turns", self._without
        else:
            place, rows = "extra_info.max_turns", self._without_inside if inside else self._null_inside
        if rows.count:
            found = f"{place} is null here, for other rows have it"
            report.add("null-max-turns", file, found, rows.first, unit, count=rows.count)


def _several(env_class: str | None, check: RowCheck) -> bool:
    """Whether SkyRL plays an environment of this name for several turns."""
    if check.format != "skyrl" or env_class is None or env_class not in check.known:
        return False
    contract = check.contract(env_class)
    return contract is not None and contract.max_turns > 1


def _given(column: pa.Array | None, count: int) -> Mask:
    return mask_of(column.is_valid()) if column is not None else np.zeros(count, np.bool_)
