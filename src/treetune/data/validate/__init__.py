"""Checks files of rows.

    report = validate_dataset("train.parquet")       # prints what was found
    write_tasks(tasks, "train.parquet", "skyrl")     # writes no file that is not valid

`validate` only returns the report. `rules` holds the table of rules and the report; the rules themselves are in
`prompt_rules`, `reward_rules`, `column_types` and `gold`. `row` checks and fixes one row, `files` reads files and
checks them together, and `prefilter` proves that most rows of parquet are sound without checking each one. `write`
writes tasks and fixed rows.
"""

from __future__ import annotations

from typing import Any

from treetune.data.sources.names import Sources
from treetune.data.validate.files import validate
from treetune.data.validate.rules import RULES, FilesReport, print_report
from treetune.data.validate.write import write_tasks

__all__ = ["RULES", "FilesReport", "validate", "validate_dataset", "write_tasks"]


def validate_dataset(path: Sources, **options: Any) -> FilesReport:
    """Check one or several files, print what was found, and return the report: `.ok` says whether it can be trained on.

    The options are those of `validate`.
    """
    from treetune.system.screen import Screen

    report = validate(path, **options)
    print_report(report, Screen())
    return report
