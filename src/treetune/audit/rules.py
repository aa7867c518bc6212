"""Rules of the audit, what was found against them, and the Report of both.

    Rule("pays-empty", Family.FREE, "an empty answer earns nothing", "score an empty answer 0")
    report.add("pays-empty", ERROR, "an empty answer earns all there is", tasks=[3, 8], evidence=["task 3: 1 of 1"])

A rule is declared beside the code that tries it. Its severity is that of what was found: a rule may be broken a little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from treetune.data.validate.rules import SHOWN, Severity, name_rows
from treetune.errors import UnknownNameError, plural

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
EVIDENCE = 5
"""How many pieces of evidence a finding shows."""
EVIDENCE_CHARS = 400


class Family(StrEnum):
    """What a rule asks of a task."""

    SOLVABLE = "solvable"
    FREE = "not-free"
    LEAK = "no-leak"
    SPREAD = "spread"
    COSTS = "costs"


class Rule(msgspec.Struct, frozen=True):
    name: str
    family: Family
    expected: str
    remedy: str

    def __post_init__(self) -> None:
        RULES[self.name] = self


RULES: dict[str, Rule] = {}
"""Every rule by its name, in the order of the report."""


class Finding(msgspec.Struct):
    """One rule that a target breaks."""

    rule: str
    family: Family
    severity: Severity
    found: str
    """In one sentence, with its figures."""
    tasks: list[int]
    """By idx, the first ten; none where the whole target is meant."""
    count: int
    """How many tasks; 0 where the whole target is meant."""
    evidence: list[str]
    expected: str
    remedy: str

    @property
    def where(self) -> str:
        if not self.count:
            return "the target"
        return f"{plural(self.count, 'task')}: {name_rows(self.tasks, self.count)}"


class Floor(msgspec.Struct):
    """What one policy that cannot solve anything earned."""

    policy: str
    about: str
    tasks: int
    mean_reward: float | None
    paid: int
    """Tasks on which it earned as much as the gold answer."""
    expected: float
    """The share of tasks that chance would pay."""
    failed: int
    """Rollouts without a reward."""


class Quantiles(msgspec.Struct, frozen=True):
    """What the middle and the ends of some figures are."""

    median: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1])


class Report(msgspec.Struct):
    """What was tried and what was found."""

    target: str
    name: str = ""
    num_tasks: int | None = None
    """How many tasks there are; None where there is no end."""
    tasks: list[int] = []
    """Those that were tried, by idx."""
    seed: int = 0
    model: str = ""
    seconds: float = 0.0
    rollouts: int = 0
    findings: list[Finding] = []
    tried: list[str] = []
    """Rules that were tried."""
    not_tried: dict[str, str] = {}
    """Rules that were not, and why."""
    floors: list[Floor] = []
    spread: dict[str, float] = {}
    """Of the model's rollouts: shares of tasks, and more."""
    costs: dict[str, Quantiles] = {}
    """Seconds, turns, bytes."""
    facts: dict[str, Any] = {}
    """What else is worth knowing, such as how many gold answers there are."""
    chosen: set[str] | None = None

    def wants(self, *rules: str) -> bool:
        """Whether any of these rules is to be tried. The chosen ones are from then on."""
        wanted = [rule for rule in rules if self.chosen is None or rule in self.chosen]
        for rule in wanted:
            if rule not in self.tried:
                self.tried.append(rule)
        return bool(wanted)

    def leave_out(self, why: str, *rules: str) -> None:
        for rule in rules:
            if (self.chosen is None or rule in self.chosen) and rule not in self.tried:
                self.not_tried[rule] = why

    def add(
        self,
        rule: str,
        severity: Severity,
        found: str,
        *,
        tasks: Iterable[int] = (),
        evidence: Iterable[str] = (),
        remedy: str = "",
    ) -> None:
        if self.chosen is not None and rule not in self.chosen:
            return
        broken, idxs = RULES[rule], sorted(set(tasks))
        shown = [clip(text) for text in list(evidence)[:EVIDENCE]]
        self.findings.append(
            Finding(
                rule=rule,
                family=broken.family,
                severity=severity,
                found=found,
                tasks=idxs[:SHOWN],
                count=len(idxs),
                evidence=shown,
                expected=broken.expected,
                remedy=remedy or broken.remedy,
            )
        )

    def sort(self) -> None:
        """The gravest first, then in the order of the rules."""
        severities, rules = list(Severity), list(RULES)
        self.findings.sort(key=lambda one: (severities.index(one.severity), rules.index(one.rule)))

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: warnings and notes may stay."""
        return not self.count(ERROR)

    @property
    def by_rule(self) -> dict[str, dict[str, int]]:
        """How many findings of each severity each rule has."""
        counts: dict[str, Counter[str]] = {}
        for finding in self.findings:
            counts.setdefault(finding.severity.value, Counter())[finding.rule] += 1
        return {severity: dict(rules) for severity, rules in counts.items()}

    @property
    def verdict(self) -> str:
        found = ", ".join(plural(self.count(severity), severity.value) for severity in Severity)
        tried = f"{plural(len(self.tasks), 'task')} tried in {plural(self.rollouts, 'rollout')}"
        return f"{'Sound' if self.ok else 'Not sound'}: {found}; {tried}, {plural(len(self.tried), 'rule')}"


def choose(rules: Iterable[str], skip: Iterable[str]) -> set[str] | None:
    """The rules that are named, by themselves or by their family, without those to skip. None: all."""
    wanted, unwanted = _named(rules), _named(skip)
    return (wanted or set(RULES)) - unwanted if wanted or unwanted else None


def _named(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in [part.strip() for text in names for part in text.split(",") if part.strip()]:
        of_family = {rule.name for rule in RULES.values() if rule.family == name}
        if not of_family and name not in RULES:
            raise UnknownNameError.of("rule", name, [*RULES, *Family])
        found |= of_family or {name}
    return found


def clip(text: str, most: int = EVIDENCE_CHARS) -> str:
    """A text as evidence shows it."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most - 20]} … ({len(text):,} characters)"
