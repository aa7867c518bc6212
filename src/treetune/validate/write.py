"""Tasks into a file of rows that `treetune validate` calls valid.

    write_tasks(tasks, "train.parquet", "skyrl")
    write_tasks(taskset.draw(1000), "train.parquet", "verl", scorer=taskset)

The file is checked before it is put in its place. `treetune.rows.read_tasks` gives back equal tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from treetune.errors import TasksetError
from treetune.rows.arrow_values import json_fields_of
from treetune.rows.writing import write_file
from treetune.task import Task
from treetune.taskset import Taskset
from treetune.validate.files import validate
from treetune.validate.finding import Finding, Severity
from treetune.validate.rules import RULES

SHOWN = 3
"""How many faults a message names."""


def write_tasks(
    tasks: Iterable[Task],
    path: str | Path,
    format: str,
    *,
    scorer: str | Taskset[Any, Any] | None = None,
    check: bool = True,
    environments: Collection[str] = (),
) -> int:
    """Write tasks as rows; gives their number.

    `scorer` is the taskset that the tasks were drawn from, or `"rule"`: answers are compared with ground truths.
    `tasks` may be a taskset itself. A file that `treetune validate` would not call valid is refused, unless `check` is
    False. `environments`: ids that are registered elsewhere.
    """
    refuse = partial(_refuse_invalid, path=Path(path).expanduser(), format=format, environments=environments)
    return write_file(tasks, path, format, scorer=scorer, check=refuse if check else None)


def _refuse_invalid(written: Path, *, path: Path, format: str, environments: Collection[str]) -> None:
    """Raises where the validator calls the file at `written`, which is to be `path`, not valid."""
    import pyarrow.parquet as pq

    if written.suffix.lower() == ".parquet" and "prompt" in json_fields_of(pq.read_metadata(written).metadata):
        raise TasksetError(
            f"{path} would not be valid: some messages have text as content and others lists, and no parquet column "
            "that a trainer reads holds both",
            remedy="write .jsonl, or all contents as lists of parts; check=False writes it as it is",
        )
    report = validate(written, format=format, environments=environments)
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    if not errors:
        return
    shown = "; ".join(f"{_tasks(one)}: {one.rule}: {one.found}" for one in errors[:SHOWN])
    more = f"; and {len(errors) - SHOWN} more faults" if len(errors) > SHOWN else ""
    first = errors[0]
    remedy = RULES[first.rule].fix
    if first.rule == "unknown-env-class":
        remedy = "see `treetune list`, or name one that is registered elsewhere: environments=[...]"
    raise TasksetError(f"{path} would not be valid: {shown}{more}", remedy=f"{remedy}; check=False writes it as it is")


def _tasks(finding: Finding) -> str:
    """The tasks of a finding, whose lines count from 1."""
    if not finding.count:
        return "all tasks together"
    first = finding.rows[0] - (finding.unit == "line")
    return f"task {first}" + (f" and {finding.count - 1:,} more" if finding.count > 1 else "")
