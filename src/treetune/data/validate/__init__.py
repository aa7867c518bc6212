"""Checks of files of rows: `validate` gives a report, `validate_dataset` prints it as well. `write_tasks` writes
no file that is not valid."""

from __future__ import annotations

from typing import Any

from treetune.data.sources.names import Sources
from treetune.data.validate.files import validate
from treetune.data.validate.rules import RULES, FilesReport, print_report
from treetune.data.validate.write import write_tasks

__all__ = ["RULES", "FilesReport", "validate", "validate_dataset", "write_tasks"]


def validate_dataset(path: Sources, **options: Any) -> FilesReport:
    """Check one file or several, print what was found, and give the report: `.ok` says whether it can be trained on.

    Options are those of `validate`.
    """
    from treetune.system.screen import Screen

    report = validate(path, **options)
    print_report(report, Screen())
    return report
