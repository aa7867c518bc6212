"""Builds rows: writes a dataset task's source tables, or any taskset's tasks, to one parquet file in a trainer's
format.

    sidecar = build(taskset, taskset.open_source(), path, "verl", on_rows=progress)
    sidecar, path = build_rows(load_taskset("doubles.py:Doubles"), "verl")

Memory use stays at a few tables, however large the source is. Other processes (`num_proc`) or a Ray cluster
(`engine="ray"`) can build the tables; rows and their order stay the same.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from treetune.chat.message import Message
from treetune.config.interpolation import conceal
from treetune.config.structs import to_plain
from treetune.core.finding import Flaw
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.arrow_values import arrow_rows, schema_tree
from treetune.data.datasets.dataset_rows import BUILDER_VERSION, DatasetRows, unknown_environment
from treetune.data.datasets.row_builder import RowBuilder
from treetune.data.datasets.selection import INVALID, Notes, length_filter, look_at_prompts
from treetune.data.rows.cache import Cache, Sidecar, config_hash, impl_hash
from treetune.data.rows.formats import FORMATS, Format, format_named
from treetune.data.rows.growing_parquet import GrowingParquet, write_taken
from treetune.data.rows.writing import write_parquet, write_scored
from treetune.data.sources.loading import LibraryDataset, describe_change
from treetune.data.sources.local_files import ROWS, LocalFiles, SourceBatch
from treetune.errors import EmptyTasksetError, TasksetError, TreetuneError, format_error
from treetune.play.episode import Episode
from treetune.system.folders import default_cache_dir
from treetune.system.processes import SILENT_SECONDS, join_cluster, why_waiting
from treetune.system.threads import run_in_background

Engine = Literal["local", "ray"]
Progress = Callable[[int, int | None], None]
"""Called with the number of source rows done, and the total if it is known."""

IMAGE_ROWS = 32
"""Rows per batch, and so per row group, if they have images. All images of a batch are in memory."""

LOOKED_AT = 100
"""The number of rows that are checked for whether an answer can solve them. This many reveal a column that is wrong
throughout, and cost little in a large build. `treetune validate` checks all rows."""

BuiltTable = tuple[pa.Table | None, Notes]
Work = tuple[SourceBatch, int]


def build(
    taskset: DatasetRows,
    opened: LibraryDataset | LocalFiles,
    path: Path,
    format: str,
    *,
    engine: Engine = "local",
    on_rows: Progress | None = None,
) -> Sidecar:
    """Write the rows of a dataset task to `path` in a trainer's format."""
    writer, notes = write_rows(taskset, opened, path, format, taskset.overrides_build, engine, on_rows)
    return Sidecar(
        config=conceal({**taskset.config.for_key(), "format": format}),
        source=" ".join(map(str, taskset.config.loading_params.args)),
        revision=opened.revision,
        rows=writer.rows,
        dropped=dict(notes.dropped),
        flaws=[*notes.flaws, *_find_changes(taskset, opened)],
        fingerprint=opened.fingerprint,
        schema=schema_tree(writer.schema),
        versions=_versions(),
    )


def _find_changes(taskset: DatasetRows, opened: LibraryDataset | LocalFiles) -> list[Flaw]:
    """Return the values that the library changed, in columns that the rows are made from."""
    changes = [] if taskset.overrides_build else opened.find_changes()
    if not changes or taskset.overrides_rows:
        return changes
    used = RowBuilder(taskset, opened.columns, made=False).used_columns
    return [change for change in changes if change.what in {describe_change(name) for name in used}]


def write_draws(taskset: DatasetRows, path: Path, built: tuple[Sidecar, Path, bool]) -> Sidecar:
    """Write the first draws of a taskset's schedule from the rows that were `built` without it."""
    sidecar, rows, _ = built
    profile = taskset.config.profile
    wanted = profile.rows if profile is not None and profile.rows is not None else sidecar.rows
    write_taken([rows], [taskset.position_at(index, None) for index in range(wanted)], path)
    config = {**taskset.config.for_key(), "format": sidecar.config.get("format")}
    return msgspec.structs.replace(sidecar, config=config, rows=wanted)


def build_rows(
    taskset: Taskset[Any, Any], format: str, num_tasks: int | None = None, cache_dir: str | Path | None = None
) -> tuple[Sidecar, Path]:
    """Write the first `num_tasks` tasks of any taskset as rows in the cache; return the sidecar and the path.

    The rows are rebuilt each time, since the tasks may come from anywhere. The path depends only on the taskset, the
    number and the format.
    """
    config = {"format": format, "num_tasks": num_tasks, **to_plain(taskset.config)}
    asked = {**config, "class": type(taskset).__qualname__, "name": taskset.name}
    key = f"{impl_hash(type(taskset), Taskset, [], BUILDER_VERSION)}_{config_hash(asked, {})}"
    cache, rows_format = Cache(default_cache_dir(cache_dir)), format_named(format)

    async def read_opening(task: Task) -> list[Message]:
        episode = await Episode.start(taskset, task)
        await episode.close()
        return episode.observation.messages()

    def write(path: Path) -> Sidecar:
        write_opened = partial(write_parquet, opening=lambda task: run_in_background(read_opening(task)))
        rows = write_scored(taskset.draw(num_tasks), taskset, path, rows_format, write_opened)
        if not rows:
            raise EmptyTasksetError(f"{taskset.name} has no tasks")
        return Sidecar(
            config=conceal(config),
            source=taskset.name,
            rows=rows,
            fingerprint=taskset.source() or "",
            schema=schema_tree(pq.read_schema(path)),
            versions=_versions(),
        )

    sidecar, _ = cache.get_or_build(key, write, force=True)
    return sidecar, cache.path(key)


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that took part."""
    from importlib.metadata import version

    from treetune.system.folders import read_version

    return {"treetune": read_version(), "datasets": version("datasets"), "pyarrow": version("pyarrow")}


def write_rows(
    taskset: DatasetRows,
    opened: LibraryDataset | LocalFiles,
    path: Path,
    format: str,
    made: bool,
    engine: Engine = "local",
    on_rows: Progress | None = None,
) -> tuple[GrowingParquet, Notes]:
    """Write the selected rows; return the writer, and the notes of one pass over the source.

    `made`: the source already has a trainer's rows, from a `build_dataset` that selected them itself.
    """
    config, rows_format = taskset.config, format_named(format)
    notes = Notes()
    drop_long = length_filter(config)
    checked: set[Any] = {config.env_class}
    with GrowingParquet(path) as writer:
        for number in range(1 if made else config.repeat):
            left = None if made else config.max_rows
            for table, own in _build_tables(taskset, opened, made, engine, on_rows):
                if table is not None and drop_long is not None:
                    table = drop_long(table, own)
                if table is not None and left is not None and table.num_rows >= left:
                    table = table.slice(0, left)
                    if not taskset.overrides_rows:  # then rows keep the index of their source
                        own.end_with(pc.struct_field(table["extra_info"], "index")[-1].as_py())
                has_rows = table is not None and table.num_rows > 0
                if number == 0:
                    if has_rows and not (made or taskset.overrides_rows):
                        look_at_prompts(config, table, own)
                    if has_rows and writer.rows < LOOKED_AT:
                        _find_invalid(taskset, table, LOOKED_AT - writer.rows, own)
                    notes.add(own)
                if table is None or not has_rows:
                    continue
                if made or taskset.overrides_rows:
                    _check_environments(taskset, table, checked, rows_format)
                writer.write(rows_format.convert(table))
                if left is not None and (left := left - table.num_rows) <= 0:
                    break
        if writer.schema is None:
            reasons = ", ".join(f"{count} dropped ({reason})" for reason, count in notes.dropped.items())
            firsts = "".join(f"\n  row {flaw.rows[0]}: {flaw.first}" for flaw in notes.flaws if flaw.first)
            raise EmptyTasksetError(
                f"{taskset.name} has no rows: {reasons or 'its source is empty'}{firsts}",
                remedy="check filter, ground_truth and loading_params",
            )
    return writer, notes


def _find_invalid(taskset: DatasetRows, table: pa.Table, most: int, notes: Notes) -> None:
    """Report rows, among the first rows of a table, that no answer can solve according to the scorer. The user's
    `validate` may be slow: only `treetune validate` runs it."""
    if taskset.overrides("validate") or taskset.scorer is None:
        return
    invalid: list[int] = []
    first = ""
    for row in chain.from_iterable(map(arrow_rows, table.slice(0, most).to_batches())):
        try:
            reason = taskset.validate(FORMATS["verl"].task_of_pruned(row, whole=False)).reason
        except Exception as error:  # `validate` would report it; the rows can still be written
            reason = format_error(error)
        if reason is not None:
            first = first or reason
            invalid.append(row["extra_info"]["index"])
    if invalid:
        notes.report(Flaw.of(INVALID, f"among the first {LOOKED_AT} that no answer solves", first, invalid))


def _check_environments(taskset: DatasetRows, table: pa.Table, checked: set[Any], format: Format) -> None:
    """Check the environments that a map function gave to rows. `checked` holds the environments of earlier tables."""
    if table.schema.field("extra_info").type.get_field_index("env_class") < 0:
        return
    for env_class in set(pc.unique(pc.struct_field(table["extra_info"], "env_class")).to_pylist()) - checked:
        checked.add(env_class)
        if (problem := unknown_environment(taskset, env_class)) is not None:
            said = f"rows with the env_class {env_class!r}: {problem}"
            if not format.has_environments:
                raise TasksetError(said)
            warnings.warn(f"{said}; the trainer must have it", stacklevel=2)


def _build_tables(
    taskset: DatasetRows, opened: LibraryDataset | LocalFiles, made: bool, engine: Engine, on_rows: Progress | None
) -> Iterator[BuiltTable]:
    """Yield canonical rows in order, batch by batch."""
    builder = RowBuilder(taskset, opened.columns, made=made)

    def read_batches() -> Iterator[Work]:
        first = 0
        for batch in opened.batches(IMAGE_ROWS if taskset.config.images else ROWS):
            yield batch, first
            first += len(batch)
            if on_rows is not None:
                on_rows(first, opened.rows)

    if engine == "ray":
        return _build_on_ray(builder, read_batches())
    if taskset.config.num_proc > 1:
        return _build_in_processes(builder, read_batches(), taskset.config.num_proc)
    return (builder.build(batch, first) for batch, first in read_batches())


def _build_in_processes(builder: RowBuilder, work: Iterator[Work], count: int) -> Iterator[BuiltTable]:
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    from treetune.system.processes import spawn_context

    # Spawn, not fork: forking a process with threads (pyarrow's, the library's) may hang.
    with ProcessPoolExecutor(count, spawn_context(), _set_builder, (builder,)) as pool:
        try:
            yield from _keep_ahead(work, lambda item: pool.submit(_build_here, item), Future.result, 2 * count)
        except TreetuneError as error:
            raise error from None  # without the traceback of that process
        except BrokenProcessPool:
            raise TasksetError(
                f"one of the {count} processes that build rows ended abruptly: its code ended it, or it ran out of "
                "memory",
                remedy="set num_proc: 1 to build in this process and see where it ends",
            ) from None


_builder: RowBuilder | None = None
"""The row builder of a worker process."""


def _set_builder(builder: RowBuilder) -> None:
    global _builder
    _builder = builder


def _build_here(work: Work) -> BuiltTable:
    assert _builder is not None
    return _builder.build(*work)


def _build_on_ray(builder: RowBuilder, work: Iterator[Work]) -> Iterator[BuiltTable]:
    ray = join_cluster()
    shared = ray.put(builder)  # once per node, not once per table
    begun = ray.remote(num_cpus=1)(lambda: None).remote()  # before any of the work starts
    remote = ray.remote(num_cpus=1)(lambda builder, batch, first: builder.build(batch, first))
    ahead = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
    waited = False

    def get(built: Any) -> BuiltTable:
        nonlocal waited
        if not waited and not ray.wait([built], timeout=SILENT_SECONDS)[0] and (why := why_waiting(ray, [begun])):
            waited = True
            warnings.warn(f"{why}. The build waits; without --engine ray it runs here.", stacklevel=2)
        result: BuiltTable = ray.get(built)
        return result

    return _keep_ahead(work, lambda item: remote.remote(shared, *item), get, ahead)


def _keep_ahead(
    work: Iterator[Work], submit: Callable[[Work], Any], get: Callable[[Any], BuiltTable], ahead: int
) -> Iterator[BuiltTable]:
    """Yield the results in order, with at most `ahead` more in progress."""
    waiting: deque[Any] = deque()
    for item in work:
        waiting.append(submit(item))
        if len(waiting) > ahead:
            yield get(waiting.popleft())
    while waiting:
        yield get(waiting.popleft())
