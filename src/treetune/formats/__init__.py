"""Trainers' row formats: reading, writing, checking and feeding them, in parquet, JSON and JSON lines.

    from treetune.formats import read_tasks, validate_dataset, write_tasks
    write_tasks(read_tasks("train.parquet"), "train.jsonl", "skyrl")
    validate_dataset("train.jsonl")

Values stay exactly as they were written, and tasks are equal after any chain of formats and files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treetune.formats.format import FORMATS, detect
from treetune.formats.reading import read_rows, read_tables, read_tasks
from treetune.formats.writing import write_tasks

if TYPE_CHECKING:
    from treetune.formats.prompt_dataset import PromptDataset
    from treetune.formats.validation import validate_dataset

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

_LATER = {
    "PromptDataset": "treetune.formats.prompt_dataset",
    "validate_dataset": "treetune.formats.validation",
}
"""What brings numpy and Arrow with it is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
