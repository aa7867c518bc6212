"""The rules of the audit, by family, and the report of their findings.

    report.add("close-fails", WARNING, "3 environments do not close", {3: "OSError: no disk", ...})

`rules.toml` declares the rules. The severity belongs to the finding, because a rule may be broken slightly.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from importlib import resources
from typing import Any, ClassVar

import msgspec

from treetune.core.finding import Finding, Report, Rules, Severity
from treetune.errors import UnknownNameError, plural

EVIDENCE = 5
"""How many pieces of evidence a finding shows."""
EVIDENCE_CHARS = 400


class Family(StrEnum):
    """What a group of rules requires of a task."""

    SOLVABLE = "solvable"
    FREE = "not-free"
    LEAK = "no-leak"
    SPREAD = "spread"
    COSTS = "costs"


RULES = Rules()
"""Every rule by its name, in the order of the report."""
for _family, _declared in tomllib.loads(resources.files("treetune.audit").joinpath("rules.toml").read_text()).items():
    for _rule, _texts in _declared.items():
        RULES.add(_rule, **_texts, family=Family(_family))


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
    """The median, the 95th percentile and the maximum of a set of values."""

    median: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], ordered[-1])


class AuditReport(Report):
    """What was tested and what was found."""

    RULES: ClassVar[Rules] = RULES
    target: str
    name: str = ""
    num_tasks: int | None = None
    """How many tasks there are; None if the taskset is infinite."""
    tasks: list[int] = []
    """The tasks that were audited, by idx."""
    seed: int = 0
    model: str = ""
    seconds: float = 0.0
    rollouts: int = 0
    tried: list[str] = []
    """Rules that were tested."""
    not_tried: dict[str, str] = {}
    """Rules that were not tested, and why."""
    floors: list[Floor] = []
    spread: dict[str, float] = {}
    """Figures of the model's rollouts, such as shares of tasks."""
    costs: dict[str, Quantiles] = {}
    """Costs in seconds, turns and bytes."""
    facts: dict[str, Any] = {}
    """Other facts, such as the number of gold answers."""
    chosen: set[str] | None = None

    def is_chosen(self, rule: str) -> bool:
        return self.chosen is None or rule in self.chosen

    def wants(self, *rules: str) -> bool:
        """Whether any of these rules should be tested; from then on they count as tested."""
        wanted = [rule for rule in rules if self.is_chosen(rule)]
        self.tried += [rule for rule in wanted if rule not in self.tried]
        return bool(wanted)

    def leave_out(self, why: str, *rules: str) -> None:
        self.not_tried |= {rule: why for rule in rules if self.is_chosen(rule) and rule not in self.tried}

    def add(
        self,
        rule: str,
        severity: Severity,
        found: str,
        faults: Mapping[int, str] | None = None,
        *,
        tasks: Iterable[int] = (),
        evidence: Iterable[str] = (),
        remedy: str = "",
    ) -> None:
        """`faults` says what is wrong with each task; if it is empty, nothing was found. Pass other evidence together
        with the tasks that it is about."""
        if not self.is_chosen(rule) or faults == {}:
            return
        if faults is not None:
            tasks, evidence = faults, gather(faults)
        shown = [clip(text) for text in list(evidence)[:EVIDENCE]]
        self.note(RULES[rule].make_finding(found, severity, rows=tasks, remedy=remedy, evidence=shown))

    @property
    def by_rule(self) -> dict[str, dict[str, int]]:
        """The number of findings of each severity, by rule."""
        counts: dict[str, Counter[str]] = {}
        for finding in self.findings:
            counts.setdefault(finding.severity.value, Counter())[finding.rule] += 1
        return {severity: dict(rules) for severity, rules in counts.items()}

    @property
    def verdict(self) -> str:
        found = ", ".join(plural(self.count(severity), severity.value) for severity in Severity)
        tried = f"{plural(len(self.tasks), 'task')} tried in {plural(self.rollouts, 'rollout')}"
        return f"{'Sound' if self.ok else 'Not sound'}: {found}; {tried}, {plural(len(self.tried), 'rule')}"


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """A finding as `treetune audit --json` shows it. Its rows are tasks of the one target."""
    plain = msgspec.structs.asdict(finding)
    del plain["file"], plain["unit"]
    return {**plain, "tasks": plain.pop("rows")}


def choose(rules: Iterable[str], skip: Iterable[str]) -> set[str] | None:
    """Returns the selected rules, named directly or by family, without the skipped ones. None: all."""
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
    """Shortens a text for use as evidence."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most - 20]} … ({len(text):,} characters)"


def gather(faults: Mapping[int, str]) -> list[str]:
    """Lists the faults of tasks, each text once with the tasks that it is about."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for idx, text in sorted(faults.items()):
        by_text[clip(text, 300)].append(idx)
    ordered = sorted(by_text.items(), key=lambda item: -len(item[1]))
    return [f"{'task' if len(idxs) == 1 else 'tasks'} {_name(idxs)}: {text}" for text, idxs in ordered]


def _name(idxs: list[int]) -> str:
    return ", ".join(map(str, idxs[:5])) + (f" and {len(idxs) - 5} more" if len(idxs) > 5 else "")
