"""A Report gathers what was found, one finding for a rule and a file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from treetune.validate.finding import SHOWN, Finding, Severity
from treetune.validate.rules import RULES

ADVICE = ", or `--fix OUT.parquet`"


class Report(msgspec.Struct):
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
        return sorted(self.by_place.values(), key=lambda one: (one.severity != Severity.ERROR, rules.index(one.rule)))

    @property
    def errors(self) -> int:
        return sum(finding.severity is Severity.ERROR for finding in self.by_place.values())

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: warnings may stay."""
        return not self.errors

    def is_shown(self, rule: str, file: str) -> bool:
        """Whether another row that breaks a rule would be told by its number."""
        told = self.by_place.get((rule, file))
        return told is None or len(told.rows) < SHOWN

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
        told = self.by_place.get((rule, file))
        if told is None:
            severity, expected, fix, _ = RULES[rule]
            told = self.by_place[rule, file] = Finding(rule, severity, file, unit, [], 0, found, expected, fix)
        if helps and RULES[rule].fixable and not told.fix.endswith(ADVICE):
            told.fix += ADVICE
        if len(told.rows) < SHOWN or any(number < told.rows[-1] for number in numbers):
            # In any order: gold answers are tried many at a time.
            told.rows = sorted([*told.rows, *map(int, numbers)])[:SHOWN]
        told.count += len(numbers) if count is None else count
