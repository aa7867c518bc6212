"""Writes tasks to a file of a trainer's rows (parquet, JSON or JSON lines, chosen by the file name), or to the hub.

    write_file(tasks, "train.parquet", "skyrl")
    write_file(taskset.draw(1000), "train.parquet", "verl", scorer=taskset)

Each row records how it is scored: by its environment, by the taskset, or as in the rows that it was read from. One
batch is in memory at a time, and the file appears once it is complete. `write_tasks` in `data/validate` also checks it.

    push_rows({"train": [Path("cache/x.parquet")]}, "me/sums", title="sums", command="treetune build sums.yaml")

uploads parquet files as a dataset, with a card that says what scores the rows.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.images import urls_in
from treetune.chat.message import Message
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.arrow_values import encode_json, find_clashes, read_extra, schema_tree
from treetune.data.rows.agent_column import AGENT, LOOP, needs_loop, row_needs_loop, with_agent
from treetune.data.rows.formats import Format, format_named
from treetune.data.rows.reading import RowTasks, read_rows
from treetune.data.rows.row_codec import with_opening
from treetune.data.rows.scorer import BY_RULE, ScoredBy, describe_environment, refuse_groups, scored_by
from treetune.data.sources.files import take_within
from treetune.data.sources.names import FileKind, kind_of, refuse_unwritable
from treetune.errors import EmptyTasksetError, TasksetError, UsageError, plural, writing
from treetune.system.hub import Card, check_repo, upload

BATCH = 10_000
"""Tasks per batch."""


ScoredTask = tuple[Task, str | None]
"""A task and what scores it; see `Format.row_of`."""


def write_file(
    tasks: Iterable[Task],
    path: str | Path,
    format: str,
    *,
    scorer: str | Taskset[Any, Any] | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write tasks as rows; return their number.

    `scorer` is the taskset that the tasks were drawn from, or `"rule"`, which compares answers with ground truths.
    `tasks` may itself be a taskset. `check` gets the file before it is moved into place, and raises to refuse it.
    """
    path, rows_format = Path(path).expanduser(), format_named(format)
    refuse_unwritable(path)
    if rows_format.endings and path.suffix not in rows_format.endings:
        problem = f"{format} does not read {path.suffix} files"
        raise UsageError(problem, remedy=f"name a file that ends in {' or '.join(rows_format.endings)}")
    write = write_parquet if kind_of(path) is FileKind.PARQUET else _write_json
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the target folder, so that the file can be moved into place in one step.
        with tempfile.TemporaryDirectory(prefix=".treetune-", dir=path.parent) as folder:
            written = Path(folder) / f"rows{path.suffix}"
            count = write_scored(tasks, scorer, written, rows_format, write)
            if not count:
                raise EmptyTasksetError(f"there are no tasks to write to {path}")
            if check is not None:
                check(written)
            os.replace(written, path)
    return count


def write_scored(
    tasks: Iterable[Task],
    scorer: str | Taskset[Any, Any] | None,
    path: Path,
    format: Format,
    write: Callable[[Iterator[ScoredTask], Path, Format], int],
) -> int:
    """Write tasks with what scores them; return their number. Rows name our agent loop if a task needs it."""
    taskset = scorer if isinstance(scorer, Taskset) else tasks if isinstance(tasks, Taskset) else None
    loop = False

    def notice_loop() -> Iterator[ScoredTask]:
        nonlocal loop
        for task, scored in _attach_scorers(tasks, scorer, in_groups=format.one_answer):
            if taskset is not None:
                loop = loop or needs_loop(taskset, task)
            else:
                named = task.extra_info.get("scorer")
                loop = loop or row_needs_loop(task, ScoredBy.read(named if isinstance(named, str) else scored))
            yield task, scored

    count = write(notice_loop(), path, format)
    if loop and format.one_answer:
        _name_agent(path)
    return count


def _attach_scorers(
    tasks: Iterable[Task], scorer: str | Taskset[Any, Any] | None, in_groups: bool
) -> Iterator[ScoredTask]:
    """Yield each task with what scores it; raises if that is unknown. `in_groups`: whether our agent loop plays the
    rows, which scores the rollouts of a task together."""
    if scorer is None and isinstance(tasks, Taskset):
        scorer = tasks
    of_rows = isinstance(tasks, RowTasks)
    warned: set[str] = set()
    for number, task in enumerate(tasks):
        named = of_rows or isinstance(task.extra_info.get("scorer"), str)
        if isinstance(scorer, Taskset):
            if (lost := refuse_groups(scorer, task, in_groups)) is not None and lost not in warned:
                warned.add(lost)
                warnings.warn(lost, stacklevel=6)
            yield task, own.text if (own := scored_by(scorer, task)) is not None else ""
        elif task.env_class is not None and scorer is None and not of_rows:
            # Not for rows: a file that untrusted rows name must not be stored as this user's.
            yield task, describe_environment(task.env_class).text
        elif scorer is not None or named or task.ground_truth is None:
            yield task, None if scorer == BY_RULE.text else scorer  # the rule needs a ground truth
        else:
            raise TasksetError(
                f"task {number} has a ground truth, but nothing says what scores it",
                remedy='pass its taskset, as scorer=taskset, or scorer="rule": answers are compared with ground truths',
            )


def _write_json(tasks: Iterator[ScoredTask], path: Path, format: Format) -> int:
    """Write an array of rows, or a row per line, depending on the file name."""
    lines = kind_of(path) is FileKind.LINES
    before, between, after = (b"", b"\n", b"\n") if lines else (b"[\n", b",\n", b"\n]\n")
    count = 0
    with path.open("wb") as file:
        for count, (task, scorer) in enumerate(tasks, 1):
            try:
                encoded = encode_json(format.row_of(task, scorer=scorer))
            except TasksetError as error:
                raise _name_task(error, count - 1) from None
            file.write((between if count > 1 else before) + encoded)
        file.write(after)
    return count


def _name_agent(path: Path) -> None:
    """Add the column `agent_name` to a file that was just written: parquet, or JSON with a row per line."""
    named = path.with_name(f"{path.name}.named")
    with path.open("rb") as source:
        if source.read(4) == b"PAR1":
            from treetune.data.rows.growing_parquet import write_changed

            write_changed(path, named, with_agent)
        else:
            source.seek(0)
            mark, column = f'"{AGENT}":'.encode(), f'{{"{AGENT}":"{LOOP}",'.encode()
            with named.open("wb") as target:
                for line in source:
                    target.write(column + line[1:] if line.startswith(b"{") and mark not in line else line)
    os.replace(named, path)


def _name_task(error: TasksetError, number: int) -> TasksetError:
    return TasksetError(f"task {number}: {error.message}", remedy=error.remedy)


def _size_of(scored: ScoredTask) -> int:
    """Return the bytes of a task's images, which dominate if it has any."""
    return sum(map(len, urls_in(scored[0].messages)))


Opening = Callable[[Task], list[Message]]
"""Returns the opening messages of the environment, for a task without a prompt."""


def write_parquet(
    tasks: Iterator[ScoredTask], path: Path, format: Format, opening: Opening | None = None, *, mixed: bool = False
) -> int:
    """Write rows of any values as parquet; return their number. `mixed`: their ground truths have several types.

    For environments, which each need their own type, the column then becomes JSON. Otherwise text among the ground
    truths stays text, and the others become text, with the original in the note.
    """
    from treetune.data.rows.growing_parquet import GrowingParquet
    from treetune.data.rows.parquet import MixedTruths, table_of

    as_json = mixed and format.has_environments
    with GrowingParquet(path, exact=True) as writer:
        while batch := take_within(tasks, BATCH, _size_of):
            rows = []
            for number, (task, scorer) in enumerate(batch, writer.rows):
                try:
                    row = format.row_of(task, scorer=scorer, text_truth=mixed and not as_json)
                    rows.append(with_opening(row, opening(task)) if opening is not None and not task.messages else row)
                except TasksetError as error:
                    raise _name_task(error, number) from None
            try:
                writer.write(table_of(rows, truths="json" if as_json else "refused"))
            except MixedTruths:
                if mixed:
                    raise
                break
        else:
            if "prompt" in writer.json_fields:
                warnings.warn(
                    "no parquet column can hold these prompts, whose messages differ in type: they are JSON text, "
                    f"which only Treetune reads; for {format.name} write .jsonl",
                    stacklevel=5,
                )
            return writer.rows
    if not format.has_environments:
        warnings.warn(
            "ground truths of several types: in parquet all of them become text; Treetune reads them as they were",
            stacklevel=5,
        )
    earlier = path.with_name(f"{path.name}.earlier.parquet")
    done: Iterable[ScoredTask] = ()
    if writer.rows:
        path.rename(earlier)
        done = ((format.task_of_pruned(row), row["extra_info"].get("scorer", "")) for row in read_rows(earlier))
    count = write_parquet(chain(done, batch, tasks), path, format, opening, mixed=True)
    earlier.unlink(missing_ok=True)
    return count


# On the hub


_MOST = 5
"""How many scorers a card names at most."""


def push_rows(
    splits: Mapping[str, Sequence[Path]], repo: str, *, title: str, command: str, format: str, private: bool = False
) -> str:
    """Upload the rows and return the dataset's URL."""
    import pyarrow.parquet as pq

    check_repo(repo)
    scorers = _scorers([path for paths in splits.values() for path in paths])
    with tempfile.TemporaryDirectory(prefix="treetune-push-") as folder:
        files: dict[str, Path | bytes] = {}
        named: dict[str, list[str]] = {}
        counts: dict[str, int] = {}
        for split, paths in _make_alike(splits, Path(folder)).items():
            named[split] = [f"data/{split}-{number:05}-of-{len(paths):05}.parquet" for number in range(len(paths))]
            files |= dict(zip(named[split], paths, strict=True))
            counts[split] = sum(pq.read_metadata(path).num_rows for path in paths)
        card = Card(title, named, _describe_dataset(repo, counts, scorers, command, format)).page()
        message = f"{plural(sum(counts.values()), 'row')} as {format}"
        return upload(repo, {"README.md": card, **files}, private=private, message=message)


def _make_alike(splits: Mapping[str, Sequence[Path]], folder: Path) -> dict[str, list[Path]]:
    """Return the files with identical columns, which a dataset requires. If they differ, copies get all columns, with
    nulls for those a file lacks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from treetune.data.rows.growing_parquet import write_changed

    schemas = {path: pq.read_schema(path).remove_metadata() for paths in splits.values() for path in paths}
    problem = ""
    try:
        whole = pa.unify_schemas(list(schemas.values()), promote_options="permissive")
        problem = "; ".join(c for each in schemas.values() for c in find_clashes(schema_tree(each), schema_tree(whole)))
    except pa.ArrowException as error:
        problem = str(error)
    if problem:
        remedy = "push the lists one by one, or give their tasks the same columns"
        raise UsageError(f"the files do not form one dataset: {problem}", remedy=remedy)
    found: dict[str, list[Path]] = {split: list(paths) for split, paths in splits.items()}
    for split, paths in found.items():
        for number, path in enumerate(paths):
            if not schemas[path].equals(whole):
                paths[number] = folder / f"{split}-{number}.parquet"
                write_changed(path, paths[number], lambda table: table, whole)
    return found


def _describe_dataset(repo: str, counts: Mapping[str, int], scorers: Sequence[str], command: str, format: str) -> str:
    from treetune.system.folders import read_version

    lines = [
        f"Tasks for reinforcement learning of language models, built by Treetune {read_version()} as rows of {format}.",
        *("", "| split | rows |", "|---|---|"),
        *(f"| {split} | {count:,} |" for split, count in counts.items()),
        *("", "Every row has its prompt and its ground truth, and `extra_info.scorer` says what scores an answer:", ""),
        *(f"- {scorer}" for scorer in scorers),
        *("", "```shell", command, f"treetune show {repo}:{next(iter(counts))} -n 3"),
        *(f"treetune eval {repo}:{next(iter(counts))} -m MODEL", "```", "", "```python"),
        *("from datasets import load_dataset", "", f'rows = load_dataset("{repo}")', "```"),
    ]
    return "\n".join(lines)


def _scorers(paths: Sequence[Path]) -> list[str]:
    """Describe in words what scores the rows."""
    import pyarrow.compute as pc

    found: dict[str, None] = {}
    for path in paths:
        if (scorers := read_extra(path, "scorer")) is not None:
            found |= dict.fromkeys(map(_describe, pc.unique(scorers).to_pylist()))
    named = list(found) or ["the trainer, by its own rule for `data_source`"]
    return named[:_MOST] + ([f"and {len(named) - _MOST} others"] if len(named) > _MOST else [])


def _describe(scorer: str | None) -> str:
    if scorer is None:
        return "the trainer, by its own rule for `data_source`, if a row names no scorer"
    if (scored := ScoredBy.read(scorer)) is None or scored.kind == "rule":
        return "`rule`: the answer is compared with the ground truth, as numbers if both are numbers"
    if scored.kind == "environment" or not scored.value.startswith("{"):
        return f"the environment `{scored.value}`"
    node: dict[str, Any] = msgspec.json.decode(scorer)
    if node.keys() == {"scorer"}:
        return f"the scorer `{node['scorer'].get('kind', '')}` of Treetune"
    custom = node.get("custom_cls") or {}
    if "path" not in custom:
        return f"the taskset `{node.get('id')}`"
    place = str(custom["path"])
    where = (
        f"in the module `{place[6:]}`" if place.startswith("pkg://") else f"in `{Path(place).name}`, which is not here"
    )
    return f"the taskset `{custom.get('name')}` {where}"
