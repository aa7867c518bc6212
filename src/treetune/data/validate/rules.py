"""Rules that rows must keep, and the report of those that files break.

    add_rule("rare-role", "system, user or assistant", "see whether your chat template knows it", WARNING)

A rule is declared beside the code that finds what breaks it. `treetune validate` reports by the names of
rules, and the docs list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from treetune.core.finding import ERROR, SHOWN, WARNING, Finding, Report, Rules, print_findings
from treetune.errors import plural

ADVICE = ", or `--fix OUT.parquet`"

RULES = Rules()
"""Every rule by its name; those of `--gold` once that module is loaded."""
add_rule = RULES.add
add_fixable_rule = partial(RULES.add, fixable=True)

Fault = tuple[str, str]
"""A rule, and what was found."""


def show(value: Any) -> str:
    """A value as a finding shows it: its type where that is not plain to see, and its beginning."""
    names: dict[type, str] = {bool: "boolean", int: "number", float: "number", dict: "mapping"}
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(value, str) else f"{names.get(type(value), type(value).__name__)} {text}"


class FilesReport(Report):
    """What was found in files: one Finding for a rule and a file."""

    RULES: ClassVar[Rules] = RULES
    rows: int = 0
    """How many rows were looked at."""
    files: list[str] = []
    quick: bool = False
    """Whether contents were left unread."""
    formats: dict[str, str] = {}
    """The format of each file that has rows."""
    gold: bool = False
    """Whether gold answers were asked for."""
    gold_checked: int = 0
    by_place: dict[tuple[str, str], Finding] = {}

    def has_room(self, rule: str, file: str) -> bool:
        """Whether another row that breaks a rule would be named by its number."""
        finding = self.by_place.get((rule, file))
        return finding is None or len(finding.rows) < SHOWN

    def add(
        self,
        rule: str,
        file: str,
        found: str,
        numbers: Sequence[int] = (),
        unit: str = "row",
        *,
        count: int | None = None,
        helps: bool = True,
    ) -> None:
        """Some rows, or without numbers the whole file, break a rule. `numbers` may be only the first of `count`.

        `helps`: whether `--fix` does, if it can fix what breaks this rule at all.
        """
        if (finding := self.by_place.get((rule, file))) is None:
            finding = self.by_place[rule, file] = RULES[rule].make_finding(found, file=file, unit=unit)
            self.note(finding)
        if helps and RULES[rule].fixable and not finding.remedy.endswith(ADVICE):
            finding.remedy += ADVICE
        if len(finding.rows) < SHOWN or any(number < finding.rows[-1] for number in numbers):
            # In any order: gold answers are tried many at a time.
            finding.rows = sorted([*finding.rows, *map(int, numbers)])[:SHOWN]
        finding.count += len(numbers) if count is None else count

    @property
    def verdict(self) -> str:
        checked = f"{plural(self.rows, 'row')} in {plural(len(self.files), 'file')}"
        if self.gold:
            tried = plural(self.gold_checked, "gold answer") if self.gold_checked else "no gold answer"
            checked += f", {tried} tried"
        warnings = plural(self.count(WARNING), "warning")
        quick = "; contents were not read" if self.quick else ""
        if not self.ok:
            return f"Not valid: {checked}, {plural(self.count(ERROR), 'error')} and {warnings}{quick}"
        return f"Dataset valid! {checked}{f', {warnings}' if self.findings else ''}{quick}"


def print_report(report: FilesReport, console: Any) -> None:
    """The findings, errors first, then the verdict."""
    print_findings(report.findings, console)
    console.print(report.verdict, markup=False, soft_wrap=True)
