"""Writes files that `treetune validate` accepts: tasks are written and checked, and rows are fixed where that is safe.

write_tasks(tasks, "train.parquet", "skyrl")
write_tasks(taskset.draw(1000), "train.parquet", "verl", scorer=taskset)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from treetune.core.finding import ERROR, SHOWN, Finding
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.arrow_values import encode_json, json_fields_of
from treetune.data.rows.formats import format_named
from treetune.data.rows.writing import write_file
from treetune.data.sources.names import (
    File,
    FileKind,
    HubName,
    Row,
    kind_of,
)
from treetune.data.validate.files import read_batches, validate
from treetune.data.validate.row import fix_task
from treetune.data.validate.rules import RULES, FilesReport
from treetune.errors import EmptyTasksetError, TasksetError, TreetuneError


def write_tasks(
    tasks: Iterable[Task],
    path: str | Path,
    format: str,
    *,
    scorer: str | Taskset[Any, Any] | None = None,
    check: bool = True,
    environments: Collection[str] = (),
) -> int:
    """Write tasks as rows; return their number. `treetune.data.rows.read_tasks` reads back equal tasks.

    `scorer` is the taskset that the tasks were drawn from, or `"rule"`, which compares answers with ground truths.
    `tasks` may itself be a taskset. Unless `check` is False, a file that `treetune validate` would reject is refused
    before it is moved into place. `environments`: ids that are registered elsewhere.
    """
    refuse = partial(_refuse_invalid, path=Path(path).expanduser(), format=format, environments=environments)
    return write_file(tasks, path, format, scorer=scorer, check=refuse if check else None)


def _refuse_invalid(written: Path, *, path: Path, format: str, environments: Collection[str]) -> None:
    """Raise if the validator rejects the file at `written`, which will become `path`."""
    import pyarrow.parquet as pq

    if written.suffix.lower() == ".parquet" and "prompt" in json_fields_of(pq.read_metadata(written).metadata):
        raise TasksetError(
            f"{path} would not be valid: some messages have text as content and others lists, and a parquet column "
            "that a trainer reads cannot hold both",
            remedy="write .jsonl, or all contents as lists of parts; check=False writes it as it is",
        )
    report = validate(written, format=format, environments=environments)
    if report.ok:
        return
    errors = [one for one in report.findings if one.severity is ERROR]
    faults = "; ".join(f"{_name_tasks(one)}: {one.rule}: {one.found}" for one in errors[:3])
    more = f"; and {len(errors) - 3} more faults" if len(errors) > 3 else ""
    remedy = RULES[errors[0].rule].remedy
    if errors[0].rule == "unknown-env-class":
        remedy = "see `treetune list`, or name one that is registered elsewhere: environments=[...]"
    raise TasksetError(f"{path} would not be valid: {faults}{more}", remedy=f"{remedy}; check=False writes it as it is")


def _name_tasks(finding: Finding) -> str:
    """Return the tasks of a finding, whose lines count from 1."""
    if not finding.count:
        return "all tasks together"
    first = finding.rows[0] - (finding.unit == "line")
    return f"task {first}" + (f" and {finding.count - 1:,} more" if finding.count > 1 else "")


class LeftOut(msgspec.Struct):
    """Rows that cannot be fixed into tasks; the fixed file does not contain them."""

    why: str
    file: str
    unit: str
    rows: list[int] = []
    """The first ten row numbers."""
    count: int = 0


class Fixed(msgspec.Struct):
    """What `--fix` wrote."""

    path: str
    rows: int = 0
    changed: int = 0
    left_out: list[LeftOut] = []
    findings: list[Finding] = []
    """The remaining findings of `validate`: not everything can be fixed."""

    @property
    def ok(self) -> bool:
        return self.rows > 0 and all(finding.severity is not ERROR for finding in self.findings)


def write_fixed(
    sources: Sequence[File | HubName],
    path: Path,
    report: FilesReport,
    format: str | None,
    environments: Collection[str],
) -> Fixed:
    """Write the rows of the files in `report`, fixed, and check what was written. The format is `format`, or that of
    the first file. `environments`: ids that are registered elsewhere."""
    format = format or next((report.formats[str(one)] for one in sources if str(one) in report.formats), "skyrl")
    turns = any(one.rule == "null-max-turns" and one.found.startswith("max_turns") for one in report.findings)
    result = Fixed(str(path))
    left_out: dict[tuple[str, str], LeftOut] = {}

    def tasks() -> Iterator[Task]:
        for batch in read_batches(sources):
            read = format_named(report.formats.get(batch.source, format))
            for number, row in zip(batch.numbers, batch.rows, strict=True):
                try:
                    task, written = fix_task(row, read, format_named(format), turns)
                    # Only the second of these refuses NaN, which parquet can hold.
                    (msgspec.json.encode if kind_of(path) is FileKind.PARQUET else encode_json)(written)
                except (TreetuneError, UnicodeEncodeError, TypeError) as error:
                    said = error.message if isinstance(error, TreetuneError) else "a value that cannot be written"
                    why = said.partition(":")[0]
                    left = left_out.setdefault((why, batch.source), LeftOut(why, batch.source, batch.unit))
                    left.count += 1
                    left.rows = [*left.rows, number][:SHOWN]
                    continue
                result.changed += _differs(row, written)
                yield task

    with suppress(EmptyTasksetError):  # all rows are left out, each with its reason
        result.rows = write_file(tasks(), path, format, scorer="rule")
    result.left_out = list(left_out.values())
    if result.rows:
        result.findings = validate(path, format=format, environments=environments).findings
    return result


def _differs(row: Row, written: Row) -> bool:
    """Whether the meaning of a row has changed; additions to `extra_info` do not count."""
    extra, given = written.get("extra_info", {}), row.get("extra_info", {})
    same = all(extra.get(key) == value for key, value in given.items()) if isinstance(given, dict) else False
    others = (written.keys() | row.keys()) - {"extra_info", "data_source"}
    return not same or any(written.get(name) != row.get(name) for name in others)
