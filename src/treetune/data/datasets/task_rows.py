"""Any taskset among dataset tasks, where a trainer's config lists them: `- {id: "doubles.py:Doubles", max_rows: 100}`.

    TaskRows(load_taskset("doubles.py:Doubles"), 100).build()

It has the face of a `DatasetTaskset` as far as a list of them is looked at; `build_rows` makes its rows.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from treetune.chat.images import has_images
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.datasets.config import DatasetConfig
from treetune.data.rows.agent_column import needs_loop
from treetune.data.rows.cache import Sidecar, default_cache_dir
from treetune.data.rows.scorer import scorer_for
from treetune.data.rows.sources import LoadingParams
from treetune.errors import EmptyTasksetError, UsageError

LOOKED_AT = 100
"""Tasks by which it is known whether they have several turns."""


class TaskRows:
    tool_methods = ()
    overrides_rows = overrides_build = False

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        num_tasks: int | None,
        cache_dir: str | Path | None = None,
        weight: float | None = None,
    ) -> None:
        if taskset.INFINITE and num_tasks is None:
            raise UsageError(f"{taskset.name} is INFINITE: its rows need an end", remedy="set max_rows")
        self.taskset, self.name = taskset, taskset.name
        self.cache_dir = default_cache_dir(cache_dir)
        self._num_tasks, self._weight = num_tasks, weight

    def build(self, format: str = "verl", **how: Any) -> tuple[Sidecar, Path, bool]:
        from treetune.data.datasets.build import build_rows

        sidecar, path = build_rows(self.taskset, format, self._num_tasks, self.cache_dir)
        self._count = sidecar.rows
        return sidecar, path, False

    # As a source of a mixture, once it is built: its rows stand in its own order.

    @property
    def _unscheduled(self) -> TaskRows:
        return self

    def order_key(self, format: str) -> None:
        """None: its rows identify it."""

    def _size(self) -> int:
        return self._count

    def position_at(self, index: int, size: int) -> int:
        return index % size

    @cached_property
    def _built(self) -> Path:
        return self.build()[1]

    def get_parquet_path(self, format: str = "verl") -> str:
        return str(self._built)

    def check_source(self, format: str = "verl", *, force: bool = False) -> None:
        """Its tasks have no columns that a config could ask for."""

    @cached_property
    def _first(self) -> list[Task]:
        most = LOOKED_AT if self._num_tasks is None else min(LOOKED_AT, self._num_tasks)
        if not (tasks := self.taskset.select_tasks(most)):
            raise EmptyTasksetError(f"{self.name} has no tasks")
        return tasks

    @cached_property
    def config(self) -> DatasetConfig:
        images = ["images"] if any(has_images(task.messages) for task in self._first) else []
        source = self._first[0].data_source or self.name
        params = LoadingParams(args=[])
        return DatasetConfig(loading_params=params, data_source=source, images=images, weight=self._weight)

    @cached_property
    def row_scorer(self) -> str | None:
        return scorer_for(self.taskset, self._first[0])

    def has_turns(self) -> bool | None:
        if any(needs_loop(self.taskset, task) for task in self._first):
            return True
        says = all(task.env_class is None for task in self._first) and not self.taskset.overrides("environment")
        return False if says else None
