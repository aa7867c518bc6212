"""Finds values that the `datasets` library changed: text that became a date, `007` that became 7.

    for flaw in find_changes(columns, "json", [Path("a.jsonl")], Layout(), "name the file"): ...

The library reads what Treetune does not read itself: other keyword arguments, and hub datasets. If the files behind it
are available here, their values are compared with the types that the library gave the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.core.finding import Flaw
from treetune.data.sources.local_files import LocalFiles
from treetune.data.sources.names import Layout
from treetune.errors import TreetuneError

if TYPE_CHECKING:
    import pyarrow as pa

RULE = "values-changed"
"""The rule for rows whose values differ from those in the file."""

_NOTHING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)
"""CSV cells that the library reads as empty."""


def find_changes(
    columns: Mapping[str, pa.DataType], kind: str, files: Sequence[Path], layout: Layout, remedy: str
) -> list[Flaw]:
    """Return a flaw for each column in which the library changed values; none if the files cannot be read here."""
    rows: dict[str, list[int]] = {}
    firsts: dict[str, Any] = {}
    try:
        number = 0
        for batch in LocalFiles(kind, {"train": files}, "train", layout).batches():
            for row in batch if isinstance(batch, list) else ():
                for name in columns.keys() & row.keys():
                    if is_changed(row[name], columns[name]) or _is_nothing(row[name], kind):
                        rows.setdefault(name, []).append(number)
                        firsts.setdefault(name, row[name])
                number += 1
    except TreetuneError:
        return []
    found: list[Flaw] = []
    for name, numbers in rows.items():
        became = "nothing" if _is_nothing(firsts[name], kind) else columns[name]
        first = f"{firsts[name]!r:.60} in the file, read as {became}; {remedy}"
        found.append(Flaw.of(RULE, describe_change(name), first, numbers).join(None))
    return found


def describe_change(column: str) -> str:
    """Return how a flaw describes rows with a changed value."""
    return f"with another {column} than the file has"


def _is_nothing(value: Any, kind: str) -> bool:
    return kind == "csv" and isinstance(value, str) and value in _NOTHING


def is_changed(value: Any, kind: pa.DataType) -> bool:
    """Whether a type changes a value from a JSON or CSV file."""
    from pyarrow import types

    from treetune.data.arrow_values import is_list

    if value is None or types.is_null(kind):
        return False
    if is_list(kind):
        return isinstance(value, list) and any(is_changed(item, kind.value_type) for item in value)
    if types.is_struct(kind):
        inner = {field.name: field.type for field in kind} if isinstance(value, dict) else {}
        return any(is_changed(value[key], inner[key]) for key in inner if key in value)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if isinstance(value, str):
        return bool(number or types.is_temporal(kind) or types.is_boolean(kind))
    if isinstance(value, bool):
        return bool(number)
    return isinstance(value, int) and bool(types.is_floating(kind))
