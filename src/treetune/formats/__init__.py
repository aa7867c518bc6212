"""Trainers' row formats: reading, writing, checking and feeding them, in parquet, JSON and JSON lines.

    from treetune.formats import read_tasks, validate_dataset, write_tasks
    write_tasks(read_tasks("train.parquet"), "train.jsonl", "skyrl")
    validate_dataset("train.jsonl")

Values stay exactly as they were written, and tasks are equal after any chain of formats and files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.formats.format import FORMATS, detect
    from treetune.formats.prompt_dataset import PromptDataset
    from treetune.formats.reading import read_rows, read_tables, read_tasks
    from treetune.formats.validation import validate_dataset
    from treetune.formats.writing import write_tasks

__all__ = [
    "FORMATS",
    "PromptDataset",
    "detect",
    "read_rows",
    "read_tables",
    "read_tasks",
    "validate_dataset",
    "write_tasks",
]

_HOMES = {
    "FORMATS": "format",
    "PromptDataset": "prompt_dataset",
    "detect": "format",
    "read_rows": "reading",
    "read_tables": "reading",
    "read_tasks": "reading",
    "validate_dataset": "validation",
    "write_tasks": "writing",
}
"""Each is imported when it is first asked for: a hit of the cache needs one constant of this package, and no more."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
