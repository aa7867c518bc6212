"""Rows of CSV files: the first line names the columns, and every value is text.

    prompt,ground_truth,extra_info.level
    2 + 3?,5,easy

An empty cell is an absent key. A dot in a name leads into a mapping. A cell of `prompt` or of a mapping may be JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from treetune.rows.arrow_values import json_value, pruned
from treetune.rows.batch import BATCH, Batch, ReadError, Row
from treetune.rows.compressed import open_plain
from treetune.rows.json_files import OnFault, json_batches
from treetune.rows.sources import File, Kind

MAPPINGS = ("extra_info", "reward_model", "reward_spec")


def text_batches(file: File, *, on_fault: OnFault | None = None) -> Iterator[Batch]:
    """The rows of a file of JSON, JSON lines or CSV; see `json_batches`."""
    return csv_batches(file, on_fault=on_fault) if file.kind is Kind.CSV else json_batches(file, on_fault=on_fault)


def csv_batches(file: File, *, on_fault: OnFault | None = None) -> Iterator[Batch]:
    path = str(file.path)
    try:
        with open_plain(file.path) as content:
            text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")  # type: ignore[type-var]
            lines = csv.reader(text, strict=True)
            names = next(lines, [])
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ReadError(f"{path} has several columns {', '.join(twice)}")
            numbered = enumerate(lines)
            while some := list(islice(numbered, BATCH)):
                rows: dict[int, Row] = {}
                for number, cells in some:
                    if len(cells) == len(names):
                        rows[number] = _row(names, cells)
                    elif cells:
                        why = f"{len(cells)} cells, where {len(names)} columns have a name"
                        if on_fault is None:
                            raise ReadError(f"{path}, row {number}: {why}", remedy="put text with commas into quotes")
                        on_fault(number, why)
                yield Batch(path, "row", list(rows), list(rows.values()))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ReadError(f"{path} cannot be read as CSV: {getattr(error, 'strerror', None) or error}") from None


def _row(names: list[str], cells: list[str]) -> Row:
    row: Row = {}
    for name, cell in zip(names, cells, strict=True):
        head, dot, key = name.partition(".")
        if cell == "":
            continue
        if dot and head in MAPPINGS:
            inner = row.setdefault(head, {})
            if isinstance(inner, dict):
                inner[key] = cell
        else:
            row[name] = _value(name, cell)
    return row


def _value(name: str, cell: str) -> Any:
    """The cell; where its column holds a mapping or messages and it is JSON of one, what it says."""
    if name != "prompt" and name not in MAPPINGS:
        return cell
    try:
        value = pruned(json_value(cell))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return cell
    if name == "prompt":
        messages = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
        return value if messages else cell
    return value if isinstance(value, dict) else cell
