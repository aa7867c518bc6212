"""Rows without `max_turns` where their file has a place for it: loaders give them a null, and `int(None)` fails.

turns = Turns(schema)            # of a parquet file; None of JSON, whose rows tell
turns.take(row, number, check)
turns.tell(report, file, unit)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treetune.formats.validation.report import Report
from treetune.formats.validation.row import MAKE_NUMBERS, RowCheck
from treetune.formats.validation.shape import Places

if TYPE_CHECKING:
    import pyarrow as pa


class Turns:
    def __init__(self, schema: pa.Schema | None) -> None:
        self._top = _has(schema, "max_turns")
        self._inside = _has(_type(schema, "extra_info"), "max_turns")
        self._without = Places()
        self._without_inside = Places()

    def take(self, row: Mapping[str, Any], number: int, check: RowCheck) -> None:
        """A row, of JSON with its nulls."""
        self._top = self._top or "max_turns" in row
        env_class = row.get("env_class")
        contract = check.contract(env_class) if isinstance(env_class, str) and env_class in check.known else None
        if check.format != "skyrl" or contract is None or contract.max_turns == 1 or row.get("max_turns") is not None:
            return
        self._without.add(number)
        extra = row.get("extra_info")
        if env_class not in MAKE_NUMBERS or not isinstance(extra, dict) or extra.get("max_turns") is not None:
            return
        # A mapping of JSON lacks the key where a row does: `datasets` puts no null there.
        if self._inside or "max_turns" in extra:
            self._without_inside.add(number)

    def tell(self, report: Report, file: str, unit: str) -> None:
        place, rows = ("max_turns", self._without) if self._top else ("extra_info.max_turns", self._without_inside)
        if rows.count:
            found = f"{place} is null here, for the file has it"
            report.add("null-max-turns", file, found, rows.first, unit, count=rows.count)


def _type(schema: pa.Schema | None, name: str) -> Any:
    return schema.field(name).type if _has(schema, name) and schema is not None else None


def _has(kind: Any, name: str) -> bool:
    """Whether a schema or a mapping's type has a field of this name."""
    return hasattr(kind, "get_field_index") and bool(kind.get_field_index(name) >= 0)
