"""Tasks into a file of a trainer's rows: parquet, JSON or JSON lines, by the name of the file.

    write_tasks(tasks, "train.parquet", "skyrl")

A batch is in memory at a time, and the file appears when it is whole. `read_tasks` gives back equal tasks.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.errors import EmptyTasksetError, StorageError, TasksetError
from treetune.formats.format import Format, named
from treetune.formats.sources import Kind, kind_of, refuse_compressed
from treetune.formats.values import json_line
from treetune.task import Task

if TYPE_CHECKING:
    from treetune.formats.parquet import ExactParquet

BATCH = 10_000
"""Tasks of one batch."""


def write_tasks(tasks: Iterable[Task], path: str | Path, format: str) -> int:
    """Write tasks as rows; gives their number."""
    path, rows_format = Path(path).expanduser(), named(format)
    write = {Kind.PARQUET: _parquet, Kind.JSON: _array, Kind.LINES: _lines}[kind_of(path)]
    refuse_compressed(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the file, so that it can be put in its place in one step.
        with tempfile.TemporaryDirectory(prefix=".treetune-", dir=path.parent) as folder:
            written = Path(folder) / f"rows{path.suffix}"
            count = write(iter(tasks), written, rows_format)
            if not count:
                raise EmptyTasksetError(f"there are no tasks to write to {path}")
            os.replace(written, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return count


def _lines(tasks: Iterator[Task], path: Path, format: Format) -> int:
    count = 0
    with path.open("wb") as file:
        for line in _encoded(tasks, format):
            file.write(line + b"\n")
            count += 1
    return count


def _array(tasks: Iterator[Task], path: Path, format: Format) -> int:
    count = 0
    with path.open("wb") as file:
        for count, line in enumerate(_encoded(tasks, format), 1):
            file.write((b",\n" if count > 1 else b"[\n") + line)
        file.write(b"\n]\n")
    return count


def _encoded(tasks: Iterator[Task], format: Format) -> Iterator[bytes]:
    for number, task in enumerate(tasks):
        try:
            yield json_line(format.row_of(task))
        except TasksetError as error:
            raise TasksetError(f"task {number}: {error.message}", remedy=error.remedy) from None


def _parquet(tasks: Iterator[Task], path: Path, format: Format) -> int:
    from treetune.formats.parquet import ExactParquet, MixedTruths
    from treetune.formats.reading import read_tasks

    batches = _batched(tasks)
    with ExactParquet(path) as writer:
        for batch in batches:
            json_fields = set(writer.json_fields)
            try:
                _put(writer, batch, format)
            except MixedTruths:
                writer.json_fields = json_fields  # what the file has, without the batch that it does not have
                break
        else:
            return _told(writer, format)
    # From the beginning: text among the ground truths stays text, and the others become text, their original noted.
    earlier = path.with_name("earlier.parquet")
    done: Iterable[Task] = ()
    if path.exists():
        path.rename(earlier)
        done = read_tasks(earlier, format.name)
    warnings.warn(
        "ground truths of several types: in parquet all of them become text; Treetune reads them as they were",
        stacklevel=4,
    )
    with ExactParquet(path) as writer:
        for some in _batched(chain(done, batch, chain.from_iterable(batches))):
            _put(writer, some, format, text_truth=True)
        return _told(writer, format)


def _batched(tasks: Iterator[Task]) -> Iterator[list[Task]]:
    while batch := list(islice(tasks, BATCH)):
        yield batch


def _put(writer: ExactParquet, tasks: list[Task], format: Format, **options: Any) -> None:
    from treetune.formats.parquet import table_of

    rows = []
    for number, task in enumerate(tasks, writer.rows):
        try:
            rows.append(format.row_of(task, **options))
        except TasksetError as error:
            raise TasksetError(f"task {number}: {error.message}", remedy=error.remedy) from None
    writer.write(table_of(rows, strict_truths=True))


def _told(writer: ExactParquet, format: Format) -> int:
    if "prompt" in writer.json_fields:
        warnings.warn(
            "no parquet column holds these prompts, whose messages differ in type: they are JSON text, which only "
            f"Treetune reads; for {format.name} write .jsonl",
            stacklevel=5,
        )
    return writer.rows
