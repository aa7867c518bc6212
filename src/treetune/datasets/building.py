"""Any taskset into a trainer's rows, in the cache.

    sidecar, path = build_rows(load_taskset("doubles.py:Doubles"), "verl")

A dataset task has its own, faster way (`DatasetTaskset.built`). The rows of any other taskset are made anew each time,
for its tasks may come from anywhere; the path stays the same for the same taskset, number and format.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune.config import to_plain
from treetune.datasets.taskset import BUILDER_VERSION
from treetune.episode import Episode
from treetune.errors import EmptyTasksetError
from treetune.rows.cache import Cache, Sidecar, config_hash, default_cache_dir, impl_hash
from treetune.rows.layouts import format_named
from treetune.rows.scorer import refuse_several_turns
from treetune.rows.writing import attach_scorers, write_parquet
from treetune.task import Message, Task
from treetune.taskset import Taskset
from treetune.threads import run_in_background


def build_rows(
    taskset: Taskset[Any, Any], format: str, num_tasks: int | None = None, cache_dir: str | Path | None = None
) -> tuple[Sidecar, Path]:
    """Write the first `num_tasks` of a taskset as rows; gives what was written, and where."""
    from treetune.datasets.build import versions

    config = {"format": format, "num_tasks": num_tasks, **to_plain(taskset.config)}
    asked = {**config, "class": type(taskset).__qualname__, "name": taskset.name}
    key = f"{impl_hash(type(taskset), Taskset, [], BUILDER_VERSION)}_{config_hash(asked, {})}"
    cache = Cache(default_cache_dir(cache_dir))

    def build(path: Path) -> Sidecar:
        import pyarrow.parquet as pq

        from treetune.rows.arrow_values import schema_tree

        began = time.perf_counter()
        tasks = _checked(taskset, taskset.draw(num_tasks), format)
        rows = write_parquet(
            attach_scorers(tasks, taskset),
            path,
            format_named(format),
            lambda task: run_in_background(_opening(taskset, task)),
        )
        if not rows:
            raise EmptyTasksetError(f"{taskset.name} has no tasks")
        return Sidecar(
            config=config,
            source=taskset.name,
            rows=rows,
            fingerprint=taskset.source() or "",
            schema=schema_tree(pq.read_schema(path)),
            versions=versions(),
            seconds=time.perf_counter() - began,
        )

    sidecar, _ = cache.get_or_build(key, build, force=True)
    return sidecar, cache.path(key)


async def _opening(taskset: Taskset[Any, Any], task: Task) -> list[Message]:
    episode = await Episode.start(taskset, task)
    await episode.close()
    return episode.observation.messages()


def _checked(taskset: Taskset[Any, Any], tasks: Iterator[Any], format: str) -> Iterator[Task]:
    for task in tasks:
        if format == "verl":
            refuse_several_turns(taskset, task)
        yield task
