"""A report as a person reads it: one block for each finding, errors first."""

from __future__ import annotations

from typing import Any

from treetune.validate.finding import Finding, Severity
from treetune.validate.report import Report


def print_report(report: Report, console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    findings = report.findings
    if findings:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading in ("rule", "where", "found and expected"):
            table.add_column(heading, overflow="fold")
        for one in findings:
            style = "red" if one.severity is Severity.ERROR else "yellow"
            why = Text(one.found)
            why.append(f"\nexpected: {one.expected}\nfix: {one.fix}", style="dim")
            table.add_row(Text(f"{one.rule}\n{one.severity}", style=style), Text(f"{one.file}\n{where(one)}"), why)
        console.print(table)
    console.print(verdict(report), markup=False, soft_wrap=True)


def where(finding: Finding) -> str:
    if not finding.count:
        return "the file"
    if finding.count == 1:
        return f"{finding.unit} {finding.rows[0]}"
    rows = ", ".join(map(str, finding.rows))
    more = ", ..." if finding.count > len(finding.rows) else ""
    return f"{finding.count:,} {finding.unit}s: {rows}{more}"


def verdict(report: Report) -> str:
    looked = f"{counted(report.rows, 'row')} in {counted(len(report.files), 'file')}{_gold(report)}"
    quick = "; contents were not read" if report.quick else ""
    errors, warnings = report.errors, len(report.by_place) - report.errors
    if not errors:
        aside = f", {counted(warnings, 'warning')}" if warnings else ""
        return f"Dataset valid! {looked}{aside}{quick}"
    return f"Not valid: {looked}, {counted(errors, 'error')} and {counted(warnings, 'warning')}{quick}"


def _gold(report: Report) -> str:
    if report.gold_checked:
        return f", {counted(report.gold_checked, 'gold answer')} tried"
    return ", no gold answer tried" if report.gold else ""


def counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' if number != 1 else ''}"
