"""Problems with tasks, rows or rollouts: a Rule, a Finding for each rule that is broken, and a Report of findings.

    RULES = Rules()
    RULES.add("empty-prompt", "at least one message", "add one, or leave the row out")
    report.note(RULES["empty-prompt"].make_finding("an empty list", file="train.jsonl", unit="line", rows=[3]))

`treetune validate`, `treetune audit` and the viewer have their own rules but share findings and reports.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

from treetune.errors import plural

SHOWN = 10
"""The maximum number of rows that a finding lists."""


class Severity(StrEnum):
    ERROR = "error"
    """Breaks training or silently spoils it."""
    WARNING = "warning"
    """Could be intended."""
    NOTE = "note"
    """Good to know."""


ERROR, WARNING, NOTE = Severity
_ORDER = {severity: place for place, severity in enumerate(Severity)}


class Finding(msgspec.Struct, omit_defaults=True):
    """A rule that a file, a taskset or a trace breaks."""

    rule: str
    severity: Severity
    file: str
    """The file or the taskset; empty if the report covers only one."""
    unit: str
    """The unit of `rows`: `row` from 0, `line` from 1, or `task` by its idx."""
    rows: list[int]
    """The first ten; empty if the finding is about the whole file or taskset."""
    count: int
    """The number of rows; 0 if the finding is about the whole file or taskset."""
    found: str
    """One sentence, with figures."""
    expected: str
    remedy: str = msgspec.field(name="fix")
    evidence: list[str] = []
    family: str = ""

    @property
    def where(self) -> str:
        if not self.count:
            return "the target" if self.unit == "task" else "the file"
        if self.count == 1:
            return f"{self.unit} {self.rows[0]}"
        return f"{plural(self.count, self.unit)}: {name_rows(self.rows, self.count)}"


class Rule(msgspec.Struct, frozen=True):
    """What is expected, and how to fix a violation."""

    name: str
    expected: str
    remedy: str
    severity: Severity = ERROR
    """The default severity; a finding may override it, because a rule may be broken only slightly."""
    family: str = ""
    fixable: bool = False
    """Whether `treetune validate --fix` can fix it."""

    def make_finding(
        self,
        found: str,
        severity: Severity | None = None,
        *,
        file: str = "",
        unit: str = "task",
        rows: Iterable[int] = (),
        remedy: str = "",
        evidence: Iterable[str] = (),
    ) -> Finding:
        numbers = sorted(set(map(int, rows)))
        return Finding(
            rule=self.name,
            severity=severity or self.severity,
            file=file,
            unit=unit,
            rows=numbers[:SHOWN],
            count=len(numbers),
            found=found,
            expected=self.expected,
            remedy=remedy or self.remedy,
            evidence=list(evidence),
            family=self.family,
        )


class Rules(dict[str, Rule]):
    """Rules by name, in the order of a report."""

    def add(self, name: str, expected: str, remedy: str, severity: Severity = ERROR, **more: Any) -> None:
        self[name] = Rule(name, expected, remedy, Severity(severity), **more)


class Report(msgspec.Struct, kw_only=True):
    """The findings, sorted by severity and then by the order of the rules."""

    RULES: ClassVar[Rules]
    findings: list[Finding] = []

    def note(self, finding: Finding) -> None:
        rules = list(self.RULES)
        insort(self.findings, finding, key=lambda one: (_ORDER[one.severity], rules.index(one.rule)))

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether the data can be trained on: there are no errors. Warnings and notes are allowed."""
        return not self.count(ERROR)


def name_rows(rows: Sequence[int], count: int) -> str:
    """List the first rows, with an ellipsis if there are more."""
    return ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")


_COLOURS = {ERROR: "red", WARNING: "yellow", NOTE: "cyan"}


def print_findings(findings: Iterable[Finding], console: Any) -> None:
    """Print a block for each finding, readable in narrow and wide terminals."""
    from rich.text import Text

    for one in findings:
        console.print(Text.assemble((f"{one.severity}: {one.rule}", _COLOURS[one.severity]), f"  {one.found}"))
        facts = [f"{one.file}, {one.where}" if one.file else one.where, *(f"· {text}" for text in one.evidence)]
        facts += [f"expected: {one.expected}"] if one.expected else []
        for fact in facts:
            console.print(f"  {fact}", style="dim", markup=False, soft_wrap=True)
        if one.remedy:
            console.print(f"  remedy: {one.remedy}", markup=False, soft_wrap=True)


class Flaw(msgspec.Struct, frozen=True):
    """A problem with rows that tasks are made from, such as rows that were left out or that no answer solves.

    Reading the tasks gives a warning; `treetune validate` reports a finding.

        flaw = Flaw("rows-dropped", "dropped: no ground truth", "answer is None", count=3, rows=[2, 5, 9])
        str(flaw)      # "3 rows dropped: no ground truth; row 2: answer is None"
    """

    rule: str
    what: str
    """What happened to the rows, or what is wrong with them."""
    first: str
    """What is wrong with the first row."""
    count: int
    rows: list[int]
    """Row numbers in the source, from 0; only the first ten after a join."""

    @classmethod
    def of(cls, rule: str, what: str, first: str, rows: Sequence[int]) -> Self:
        return cls(rule, what, first, len(rows), list(rows))

    def join(self, later: Flaw | None) -> Flaw:
        """Add the rows of another flaw to this one."""
        rows, more = (later.rows, later.count) if later is not None else ([], 0)
        return msgspec.structs.replace(self, count=self.count + more, rows=[*self.rows, *rows][:SHOWN])

    def __str__(self) -> str:
        place = f"row {self.rows[0]}"
        return f"{plural(self.count, 'row')} {self.what}; {f'{place}: {self.first}' if self.first else place}"
