"""What is wrong with tasks, with rows or with rollouts: a Rule, a Finding against it, and the Report of them all.

    RULES = Rules()
    RULES.add("empty-prompt", "at least one message", "add one, or leave the row out")
    report.note(RULES["empty-prompt"].make_finding("an empty list", file="train.jsonl", unit="line", rows=[3]))

`treetune validate`, `treetune audit` and the viewer have rules of their own, and the same findings and report.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

from treetune.errors import plural

SHOWN = 10
"""How many rows a finding names."""


class Severity(StrEnum):
    ERROR = "error"
    """It breaks the training, or spoils it silently."""
    WARNING = "warning"
    """It may be meant."""
    NOTE = "note"
    """It is worth knowing."""


ERROR, WARNING, NOTE = Severity
_ORDER = {severity: place for place, severity in enumerate(Severity)}


class Finding(msgspec.Struct, omit_defaults=True):
    """One rule that a file, a taskset or a trace breaks."""

    rule: str
    severity: Severity
    file: str
    """The file, or the taskset; empty where the report is of one."""
    unit: str
    """What `rows` counts: `row` from 0, `line` from 1, or `task` by its idx."""
    rows: list[int]
    """The first ten; none where the whole is meant."""
    count: int
    """How many rows; 0 where the whole is meant."""
    found: str
    """In one sentence, with its figures."""
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
    """What is expected, and what to do where it is not so."""

    name: str
    expected: str
    remedy: str
    severity: Severity = ERROR
    """Unless a finding has another: a rule may be broken a little."""
    family: str = ""
    fixable: bool = False
    """Whether `treetune validate --fix` does it."""

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
    """Rules by their names, in the order of a report. They are declared beside the code that tries them."""

    def add(self, name: str, expected: str, remedy: str, severity: Severity = ERROR, **more: Any) -> None:
        self[name] = Rule(name, expected, remedy, severity, **more)

    def add_family(self, family: str, rules: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
        """Several, each with what is expected and the remedy; gives their names."""
        for name, (expected, remedy) in rules.items():
            self.add(name, expected, remedy, family=family)
        return tuple(rules)


class Report(msgspec.Struct, kw_only=True):
    """What was found: the gravest first, then in the order of the rules."""

    RULES: ClassVar[Rules]
    findings: list[Finding] = []

    def note(self, finding: Finding) -> None:
        rules = list(self.RULES)
        insort(self.findings, finding, key=lambda one: (_ORDER[one.severity], rules.index(one.rule)))

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: warnings and notes may stay."""
        return not self.count(ERROR)


def name_rows(rows: Sequence[int], count: int) -> str:
    """The first rows of `count`."""
    return ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")


_COLOURS = {ERROR: "red", WARNING: "yellow", NOTE: "cyan"}


def print_findings(findings: Iterable[Finding], console: Any) -> None:
    """A block for each, which a narrow terminal shows as well as a wide one."""
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
    """What is wrong with rows that tasks are made of: those that were left out, and those that no answer solves.

    Who reads the tasks is warned of it, and `treetune validate` makes a finding of it.

        flaw = Flaw("rows-dropped", "dropped: no ground truth", "answer is None", count=3, rows=[2, 5, 9])
        str(flaw)      # "3 rows dropped: no ground truth; row 2: answer is None"
    """

    rule: str
    what: str
    """What became of the rows, or what they are."""
    first: str
    """What is wrong with the first of them."""
    count: int
    rows: list[int]
    """By their number in the source, from 0; once it is joined with others, the first ten."""

    @classmethod
    def of(cls, rule: str, what: str, first: str, rows: Sequence[int]) -> Self:
        return cls(rule, what, first, len(rows), list(rows))

    def join(self, later: Flaw | None) -> Flaw:
        """The same with further rows."""
        rows, more = (later.rows, later.count) if later is not None else ([], 0)
        return msgspec.structs.replace(self, count=self.count + more, rows=[*self.rows, *rows][:SHOWN])

    def __str__(self) -> str:
        place = f"row {self.rows[0]}"
        return f"{plural(self.count, 'row')} {self.what}; {f'{place}: {self.first}' if self.first else place}"
