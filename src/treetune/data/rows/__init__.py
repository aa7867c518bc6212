"""Trainers' rows: reading, writing and formats, in parquet, JSON and JSON lines.

    from treetune.data.rows import read_tasks
    from treetune.data.validate import write_tasks
    write_tasks(read_tasks("train.parquet"), "train.jsonl", "skyrl")

Values stay exactly as they were written, and tasks stay equal through any chain of formats and files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.data.rows.reading import read_rows as read_rows
    from treetune.data.rows.reading import read_tables as read_tables
    from treetune.data.rows.reading import read_tasks as read_tasks


def __getattr__(name: str) -> Any:
    if name not in ("read_rows", "read_tables", "read_tasks"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on demand: a cache hit imports as little as possible.
    from treetune.data.rows import reading

    return getattr(reading, name)
