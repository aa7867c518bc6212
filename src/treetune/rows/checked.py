"""A file that was just written, checked by the rules of `treetune validate` before anybody sees it.

refuse_invalid(written, "train.parquet", "skyrl")
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from treetune.errors import TasksetError
from treetune.finding import Finding, Severity

TOLD = 3
"""How many faults a message tells."""


def refuse_invalid(written: Path, path: Path, format: str, environments: Collection[str] = ()) -> None:
    """Raises where the validator calls the file at `written`, which is to be `path`, not valid.

    `environments`: ids that are registered elsewhere.
    """
    import pyarrow.parquet as pq

    from treetune.rows.reading import json_fields_of
    from treetune.validate import RULES, validate

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
    shown = "; ".join(f"{_tasks(one)}: {one.rule}: {one.found}" for one in errors[:TOLD])
    more = f"; and {len(errors) - TOLD} more faults" if len(errors) > TOLD else ""
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
