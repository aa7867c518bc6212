"""Trainers' row formats: reading and writing them, in parquet, JSON and JSON lines.

    from treetune.formats import read_tasks, write_tasks
    write_tasks(read_tasks("train.parquet"), "train.jsonl", "skyrl")

Values stay exactly as they were written, and tasks are equal after any chain of formats and files.
"""

from treetune.formats.format import FORMATS, detect
from treetune.formats.reading import read_rows, read_tables, read_tasks
from treetune.formats.writing import write_tasks

__all__ = ["FORMATS", "detect", "read_rows", "read_tables", "read_tasks", "write_tasks"]
