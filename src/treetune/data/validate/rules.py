"""Rules that rows must keep, and the Report of those that files break.

    Rule("rare-role", "system, user or assistant", "see whether your chat template knows it", WARNING)

A rule is declared beside the code that finds what breaks it. `treetune validate` reports by the names of
rules, and the docs list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from treetune.core.flaw import SHOWN as SHOWN
from treetune.errors import plural

ADVICE = ", or `--fix OUT.parquet`"


class Severity(StrEnum):
    ERROR = "error"
    """It breaks the training, or spoils it silently."""
    WARNING = "warning"
    """It may be meant."""
    NOTE = "note"
    """It is worth knowing. Rules of files have none; those of the audit do."""


ERROR, WARNING = Severity.ERROR, Severity.WARNING


class Rule(msgspec.Struct, frozen=True):
    name: str
    expected: str
    fix: str
    severity: Severity = ERROR
    fixable: bool = False
    """Whether `--fix` does it."""

    def __post_init__(self) -> None:
        RULES[self.name] = self


RULES: dict[str, Rule] = {}
"""Every rule by its name; those of `--gold` once that module is loaded."""

FixableRule = partial(Rule, fixable=True)

Fault = tuple[str, str]
"""A rule, and what was found."""


def show(value: Any) -> str:
    """A value as a finding shows it: its type where that is not plain to see, and its beginning."""
    names: dict[type, str] = {bool: "boolean", int: "number", float: "number", dict: "mapping"}
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(value, str) else f"{names.get(type(value), type(value).__name__)} {text}"


class Finding(msgspec.Struct):
    """One rule that one file, or taskset, breaks."""

    rule: str
    severity: Severity
    file: str
    unit: str
    """What `rows` counts: `row` from 0, `line` from 1, or `task` by its idx."""
    rows: list[int]
    """The first ten; none where the whole file is meant."""
    count: int
    """How many rows; 0 where the whole file is meant."""
    found: str
    expected: str = ""
    fix: str = ""

    @property
    def where(self) -> str:
        if not self.count:
            return "the file"
        if self.count == 1:
            return f"{self.unit} {self.rows[0]}"
        return f"{self.count:,} {self.unit}s: {name_rows(self.rows, self.count)}"


class Report(msgspec.Struct):
    """What was found: one Finding for a rule and a file."""

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

    @property
    def findings(self) -> list[Finding]:
        """The gravest first, then in the order of the rules and of the files."""
        rules = list(RULES)
        return sorted(self.by_place.values(), key=lambda one: (one.severity is not ERROR, rules.index(one.rule)))

    @property
    def errors(self) -> int:
        return sum(finding.severity is ERROR for finding in self.by_place.values())

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: warnings may stay."""
        return not self.errors

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
        broken = RULES[rule]
        new = Finding(rule, broken.severity, file, unit, [], 0, found, broken.expected, broken.fix)
        finding = self.by_place.setdefault((rule, file), new)
        if helps and broken.fixable and not finding.fix.endswith(ADVICE):
            finding.fix += ADVICE
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
        warnings = plural(len(self.by_place) - self.errors, "warning")
        quick = "; contents were not read" if self.quick else ""
        if self.errors:
            return f"Not valid: {checked}, {plural(self.errors, 'error')} and {warnings}{quick}"
        return f"Dataset valid! {checked}{f', {warnings}' if self.by_place else ''}{quick}"


def print_report(report: Report, console: Any) -> None:
    """One block for each finding, errors first, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    if report.by_place:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading in ("rule", "where", "found and expected"):
            table.add_column(heading, overflow="fold")
        for one in report.findings:
            style = "red" if one.severity is ERROR else "yellow"
            why = Text(one.found)
            why.append(f"\nexpected: {one.expected}\nfix: {one.fix}", style="dim")
            table.add_row(Text(f"{one.rule}\n{one.severity}", style=style), Text(f"{one.file}\n{one.where}"), why)
        console.print(table)
    console.print(report.verdict, markup=False, soft_wrap=True)


def name_rows(rows: Sequence[int], count: int) -> str:
    """The first rows of `count`."""
    return ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")
