"""The rules of the audit, by family, the report of their findings, and its HTML page.

    report.add("close-fails", WARNING, "3 environments do not close", {3: "OSError: no disk", ...})

`rules.toml` declares the rules. The severity belongs to the finding, because a rule may be broken slightly.
The page has no scripts and no external resources, and all text in it is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from treetune.chat.message import without_surrogates
from treetune.core.finding import Finding, Report, Rules, Severity
from treetune.errors import UnknownNameError, plural

EVIDENCE = 5
"""How many pieces of evidence a finding shows."""
EVIDENCE_CHARS = 400


class Family(StrEnum):
    """The requirements of a group of rules on a task."""

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
    """The rewards of one policy that cannot solve anything."""

    policy: str
    about: str
    tasks: int
    mean_reward: float | None
    paid: int
    """Tasks on which it earned as much as the gold answer."""
    expected: float
    """The share of tasks that chance would solve."""
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
    """The rules that were tested, and their findings."""

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
        with the tasks that it applies to."""
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
    """Lists the faults of tasks, each text once with the tasks that it applies to."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for idx, text in sorted(faults.items()):
        by_text[clip(text, 300)].append(idx)
    ordered = sorted(by_text.items(), key=lambda item: -len(item[1]))
    return [f"{'task' if len(idxs) == 1 else 'tasks'} {_name(idxs)}: {text}" for text, idxs in ordered]


def _name(idxs: list[int]) -> str:
    return ", ".join(map(str, idxs[:5])) + (f" and {len(idxs) - 5} more" if len(idxs) > 5 else "")


NUMBERS = ("reward", "paid in full", "chance", "failed", "value", "median", "95 %", "most")
"""The headings of numeric columns."""
POLICY = "default-src 'none'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


def write_page(report: AuditReport, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")


def render(report: AuditReport) -> str:
    style = resources.files("treetune.audit").joinpath("page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = f"Audit of {report.name or report.target}"
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY.format(digest))}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head><body>"
    )
    return "".join([head, *_body(report, title), "</body></html>"])


def _body(report: AuditReport, title: str) -> Iterable[str]:
    of = "endless" if report.num_tasks is None else f"{report.num_tasks:,} there are"
    model = f", model {report.model}" if report.model else ", no model"
    yield f"<h1>{_text(title)}</h1>"
    yield f'<p class="verdict {"good" if report.ok else "error"}">{_text(report.verdict)}</p>'
    tried = f"{plural(len(report.tasks), 'task')} tried of {of}"
    about = f"{report.target}: {tried}, seed {report.seed}{model}, {report.seconds:.1f} s"
    yield f'<p class="soft">{_text(about)}</p>'
    yield f"<h2>Findings</h2>{''.join(map(_finding, report.findings)) or '<p>Nothing was found.</p>'}"
    for title, headings, rows in list_tables(report):
        yield f"<h2>{title}</h2>{_table(headings, rows)}"
    yield f"<h2>Rules</h2>{_table(('rule', 'family', 'what is expected', 'state'), list(_states(report)))}"


def list_tables(report: AuditReport) -> Iterable[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """The figures of a report, for the page and the terminal: each table with its title and headings."""
    if report.floors:
        headings = ("policy", "reward", "paid in full", "chance", "failed", "what it says")
        rows: list[Sequence[str]] = [
            (
                one.policy,
                "-" if one.mean_reward is None else f"{one.mean_reward:.3f}",
                f"{one.paid} of {one.tasks}",
                f"{one.expected:.0%}" if one.expected else "",
                f"{one.failed}",
                one.about,
            )
            for one in report.floors
        ]
        yield "What policies that solve nothing earn", headings, rows
    if report.spread:
        yield "Rewards of the model", ("figure", "value"), [(k, f"{value:.4g}") for k, value in report.spread.items()]
    if report.costs:
        rows = [(name, f"{one.median:.4g}", f"{one.p95:.4g}", f"{one.most:.4g}") for name, one in report.costs.items()]
        yield "Costs", ("what", "median", "95 %", "most"), rows


def _finding(finding: Finding) -> str:
    shown = "".join(f"<pre>{_text(text)}</pre>" for text in finding.evidence)
    evidence = f"<details open><summary>evidence</summary>{shown}</details>" if shown else ""
    return (
        f'<article class="{finding.severity}"><p><span class="label">{finding.severity}: {_text(finding.rule)}</span> '
        f'<span class="soft">{_text(finding.family)}, {_text(finding.where)}</span></p><p>{_text(finding.found)}</p>'
        f'{evidence}<p class="soft">expected: {_text(finding.expected)}</p>'
        f"<p>remedy: {_text(finding.remedy)}</p></article>"
    )


def _states(report: AuditReport) -> Iterable[tuple[str, str, str, str]]:
    broken = {finding.rule: finding.severity for finding in reversed(report.findings)}
    for name, rule in sorted(RULES.items(), key=lambda item: list(Family).index(Family(item[1].family))):
        if name in broken:
            state = str(Severity(broken[name]))
        elif name in report.tried:
            state = "kept"
        else:
            state = f"not tried: {report.not_tried.get(name, 'not requested')}"
        yield name, str(rule.family), rule.expected, state


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if heading in NUMBERS else ''}>{_text(cell)}</{tag}>"
            for heading, cell in zip(headings, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", headings)}</tr>{body}</table></div>'


def _text(value: str) -> str:
    return escape(str(without_surrogates(value)).replace("\0", "␀"))
