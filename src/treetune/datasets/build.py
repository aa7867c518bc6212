"""Building a dataset task: source tables in, canonical rows out, streamed into one parquet file.

    built = build(taskset, path, "verl", on_rows=progress)

Memory stays bounded by a few tables, whatever the size of the source. Tables can be built by other processes
(`num_proc`) or by a Ray cluster (`engine="ray"`); rows and their order are the same.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from treetune.datasets.config import FormatName
from treetune.datasets.rows import RowBuilder
from treetune.datasets.taskset import unknown_environment
from treetune.errors import EmptyTasksetError, MissingExtraError, TasksetError, TreetuneError
from treetune.rows.layouts import convert_table
from treetune.rows.loading import Source, SourceBatch
from treetune.rows.parquet import GrowingParquet

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

Engine = Literal["local", "ray"]
Progress = Callable[[int, int | None], None]
"""Told the source rows done, and how many there are where that is known."""

Built = tuple["pa.Table | None", Counter[str]]
Work = tuple[SourceBatch, int]


class BuildReport(msgspec.Struct):
    rows: int
    dropped: dict[str, int]
    schema: Any
    source: str
    revision: str | None
    fingerprint: str


def build(
    taskset: DatasetTaskset,
    path: Path,
    format: FormatName,
    *,
    engine: Engine = "local",
    on_rows: Progress | None = None,
) -> BuildReport:
    """Write the rows of a taskset to `path` in a trainer's format."""
    from treetune.rows.arrow_values import schema_tree

    opened = taskset.open_source()
    writer, dropped = write_rows(taskset, opened, path, format, taskset.overrides_build, engine, on_rows)
    return BuildReport(
        rows=writer.rows,
        dropped=dict(dropped),
        schema=schema_tree(writer.schema),
        source=" ".join(map(str, taskset.config.loading_params.args)),
        revision=opened.revision,
        fingerprint=opened.fingerprint,
    )


def write_rows(
    taskset: DatasetTaskset,
    opened: Source,
    path: Path,
    format: FormatName,
    made: bool,
    engine: Engine = "local",
    on_rows: Progress | None = None,
) -> tuple[GrowingParquet, Counter[str]]:
    """Write the selected rows; gives what was written, and what was dropped in one pass over the source.

    `made`: the source has a trainer's rows already, from a `build_dataset` that selected them itself.
    """
    from treetune.datasets.selection import length_filter

    config = taskset.config
    dropped: Counter[str] = Counter()
    drop_long = length_filter(config)
    named: set[Any] = {config.env_class}
    with GrowingParquet(path) as writer:
        for number in range(1 if made else config.repeat):
            left = None if made else config.max_rows
            for table, missing in built_tables(taskset, opened, made, engine, on_rows):
                if table is not None and drop_long is not None:
                    table = drop_long(table, missing)
                if number == 0:
                    dropped.update(missing)
                if table is None or not table.num_rows:
                    continue
                table = table.slice(0, left) if left is not None else table
                if made or taskset.overrides_rows:
                    _refuse_unknown_environments(taskset, table, named, format)
                writer.write(convert_table(table, format))
                if left is not None and (left := left - table.num_rows) <= 0:
                    break
        if writer.schema is None:
            reasons = ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())
            raise EmptyTasksetError(
                f"{taskset.name} has no rows: {reasons or 'its source is empty'}",
                remedy="look at filter, ground_truth and loading_params",
            )
    return writer, dropped


def _refuse_unknown_environments(taskset: DatasetTaskset, table: pa.Table, named: set[Any], format: FormatName) -> None:
    """Those that a map function gave to rows; `named` are those that were looked at before."""
    import pyarrow.compute as pc

    extra = table.schema.field("extra_info").type
    if extra.get_field_index("env_class") < 0:
        return
    found = pc.unique(pc.struct_field(table["extra_info"], "env_class")).to_pylist()
    for env_class in set(found) - named:
        named.add(env_class)
        problem = unknown_environment(taskset, env_class)
        if problem is not None and format != "skyrl":
            raise TasksetError(f"rows with the env_class {env_class!r}: {problem}")
        if problem is not None:  # SkyRL has environments of its own
            warnings.warn(f"rows with the env_class {env_class!r}: {problem}; the trainer must know it", stacklevel=2)


def versions() -> dict[str, str]:
    """Of what had a hand in it."""
    from importlib.metadata import version

    import treetune

    return {"treetune": treetune.__version__, "datasets": version("datasets"), "pyarrow": version("pyarrow")}


def built_tables(
    taskset: DatasetTaskset,
    opened: Source,
    made: bool,
    engine: Engine = "local",
    on_rows: Progress | None = None,
) -> Iterator[Built]:
    """Canonical rows, batch by batch, in order; `made` where the source has a trainer's rows already."""
    builder = RowBuilder(taskset, opened.columns, made=made)
    work = _numbered(opened, on_rows)
    if engine == "ray":
        return _on_ray(builder, work)
    if taskset.config.num_proc > 1:
        return _in_processes(builder, work, taskset.config.num_proc)
    return (builder.build(batch, first) for batch, first in work)


def _numbered(opened: Source, on_rows: Progress | None) -> Iterator[Work]:
    first = 0
    for batch in opened.batches():
        yield batch, first
        first += len(batch)
        if on_rows is not None:
            on_rows(first, opened.rows)


_builder: RowBuilder | None = None


def _remember(builder: RowBuilder) -> None:
    global _builder
    _builder = builder


def _build(work: Work) -> Built | TreetuneError:
    assert _builder is not None
    try:
        return _builder.build(*work)
    except TreetuneError as error:
        if error.__cause__ is None:
            return error  # raised, it would come with the traceback of this process
        raise


def _given(built: Built | TreetuneError) -> Built:
    if isinstance(built, TreetuneError):
        raise built
    return built


def _in_processes(builder: RowBuilder, work: Iterator[Work], count: int) -> Iterator[Built]:
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Spawned: a fork of a process that has threads (pyarrow's, the library's) may hang.
    with ProcessPoolExecutor(count, get_context("spawn"), _remember, (builder,)) as pool:
        waiting: deque[Future[Built | TreetuneError]] = deque()
        try:
            for item in work:
                waiting.append(pool.submit(_build, item))
                if len(waiting) > 2 * count:
                    yield _given(waiting.popleft().result())
            while waiting:
                yield _given(waiting.popleft().result())
        except BrokenProcessPool:
            raise TasksetError(
                f"one of the {count} processes that build rows ended abruptly: by its own code, or for its memory",
                remedy="num_proc: 1 builds in this process, and shows where",
            ) from None


def _on_ray(builder: RowBuilder, work: Iterator[Work]) -> Iterator[Built]:
    try:
        import ray
    except ImportError:
        raise MissingExtraError.of("ray", "ray") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    shared = ray.put(builder)  # once per node, not once per table
    remote = ray.remote(num_cpus=1)(_build_there)
    slots = max(2, 2 * int(ray.cluster_resources().get("CPU", 1)))
    waiting: deque[Any] = deque()
    for item in work:
        waiting.append(remote.remote(shared, *item))
        if len(waiting) > slots:
            yield ray.get(waiting.popleft())
    while waiting:
        yield ray.get(waiting.popleft())


def _build_there(builder: RowBuilder, batch: SourceBatch, first: int) -> Built:
    return builder.build(batch, first)
