"""What a config asks of columns that are not there: all of it, of all tasks, before anything is built.

refuse_column_faults({"train_tasks": tasksets}, "verl")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from treetune.datasets.config import FormatName
from treetune.errors import check_all

if TYPE_CHECKING:
    from treetune.datasets.taskset import DatasetTaskset

Faults = list[tuple[str, str]]

_LISTS = {"train": "train_tasks", "val": "val_tasks"}


def refuse_column_faults(
    lists: Mapping[str, Sequence[DatasetTaskset]],
    format: FormatName = "verl",
    *,
    force: bool = False,
    source: str = "config",
) -> None:
    """Opens the source of each task that is not in the cache, and raises one error with the faults of all of them."""
    check_all(
        [
            (f"{_LISTS.get(name, name)}[{number}]", partial(taskset.check_source, format, force=force))
            for name, tasksets in lists.items()
            for number, taskset in enumerate(tasksets)
        ],
        source=source,
    )
