"""Not free: policies that cannot solve anything earn only what chance pays, and none of their answers breaks the
scoring."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from treetune.audit.floor_answers import FloorPolicy
from treetune.audit.rules import RULES, AuditReport, Family, Floor, clip
from treetune.audit.sample import ECHO, Player, Sample, Subject, describe
from treetune.core.finding import ERROR, NOTE, WARNING, Severity
from treetune.core.trace import Trace
from treetune.data.validate.gold import Answer
from treetune.errors import plural

GRAVE, SERIOUS, KNOWN = 0.5, 0.1, 0.03
"""The share beyond chance from which a floor is an error, a warning or a note. It is an error or a warning only if the
lower end of its confidence interval reaches SERIOUS, on at least FEW tasks."""
FEW = 3

RULES_HERE = tuple(rule.name for rule in RULES.values() if rule.family == Family.FREE)
SERVES = {"pays-format": ("format-paid",), "pays-empty": ("format-paid", "truth-in-observations")}
"""Rules that are judged by another rule's rollouts."""


class Paid(msgspec.Struct):
    """What one floor policy earned, task by task."""

    policy: FloorPolicy
    traces: list[tuple[Subject, Answer, Trace]]

    @property
    def scored(self) -> list[tuple[Subject, Answer, Trace]]:
        return [one for one in self.traces if one[2].reward is not None]

    @property
    def full(self) -> list[tuple[Subject, Answer, Trace]]:
        """Answers that earned as much as gold; if gold is unknown, answers that earned enough to pass."""
        return [one for one in self.scored if is_paid(one[0], one[2])]

    def figures(self) -> Floor:
        rewards = [trace.reward for _, _, trace in self.scored if trace.reward is not None]
        return Floor(
            policy=self.policy.name,
            about=self.policy.about,
            tasks=len(self.traces),
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            paid=len(self.full),
            expected=self.policy.expected,
            failed=len(self.traces) - len(rewards),
        )


def is_paid(subject: Subject, trace: Trace) -> bool:
    assert trace.reward is not None
    gold = subject.trace
    if gold is not None and gold.reward is not None and gold.passed():
        return trace.reward >= gold.reward - 1e-9
    return trace.passed()


async def try_floors(
    policies: Iterable[FloorPolicy], sample: Sample, player: Player, report: AuditReport
) -> list[Paid]:
    """Plays the policies for the requested rules, and judges each rule by its best policy."""
    subjects = [subject for subject in sample.subjects if starts(subject)]
    results: list[Paid] = []
    for policy in policies:
        if not report.wants(policy.rule, "breaks-scoring", "gold-beaten", *SERVES.get(policy.rule, ())):
            continue
        answers = [(subject, answer) for subject in subjects if (answer := _say(policy, subject)) is not None]
        traces = await player.each_of(answers)
        if answers:
            played = [(subject, answer, trace) for (subject, answer), trace in zip(answers, traces, strict=True)]
            results.append(Paid(policy, played))
    report.floors += [paid.figures() for paid in results]
    by_rule: dict[str, list[Paid]] = defaultdict(list)
    for paid in results:
        by_rule[paid.policy.rule].append(paid)
    for rule, group in by_rule.items():
        _judge(rule, group, report)
    _judge_failures(results, report)
    return results


def starts(subject: Subject) -> bool:
    """Whether its environment started when the gold answer was tried."""
    return subject.first is None or subject.first.failure is None or subject.first.failure.phase != "start"


def _say(policy: FloorPolicy, subject: Subject) -> Answer | None:
    answer = policy.answer(subject)
    # An answer that should be wrong may be right by chance.
    right = answer is not None and answer in (subject.gold, subject.last_gold)
    return None if right and policy.rule in ("pays-format", "pays-hedged", "pays-odd", "pays-part") else answer


def _judge(rule: str, group: Sequence[Paid], report: AuditReport) -> None:
    found: list[tuple[Severity, Paid]] = []
    for paid in group:
        if (severity := _severity(paid)) is not None:
            found.append((severity, paid))
    if not found:
        return
    order = list(Severity)
    found.sort(key=lambda one: (order.index(one[0]), -_excess(one[1])))
    severity, worst = found[0]
    evidence = [f"{paid.policy.name}: {_share(paid)}" for _, paid in found[:3]]
    evidence += [
        f"task {subject.idx}: {'the prompt' if answer == ECHO else describe(answer)} earned {trace.reward:g}"
        for subject, answer, trace in worst.full[:2]
    ]
    tasks = [subject.idx for level, paid in found if level is severity for subject, _, _ in paid.full]
    report.add(rule, severity, f"{worst.policy.about}: {_share(worst)}", tasks=tasks, evidence=evidence)


def _share(paid: Paid) -> str:
    number, total = len(paid.full), len(paid.scored)
    chance = f", chance would pay {paid.policy.expected:.0%}" if paid.policy.expected else ""
    return f"{number} of {total} tasks ({number / total:.0%}) pay it in full{chance}"


def _excess(paid: Paid) -> float:
    return excess_of(len(paid.full) / max(1, len(paid.scored)), paid.policy.expected)


def _severity(paid: Paid) -> Severity | None:
    hits, total, more = len(paid.full), len(paid.scored), _excess(paid)
    if not hits:
        return None
    if paid.policy.strict:
        return ERROR
    least = least_share(hits, total)
    sure = excess_of(least, paid.policy.expected)
    if sure >= SERIOUS and hits >= FEW:
        return ERROR if more >= GRAVE else WARNING
    return NOTE if more >= KNOWN and hits > 1 and least > paid.policy.expected else None


def _judge_failures(results: Sequence[Paid], report: AuditReport) -> None:
    """Reports answers that ended without a reward although the environment had started."""
    failed: dict[int, str] = {}
    for paid in results:
        for subject, _, trace in paid.traces:
            if trace.failure is not None and trace.failure.phase != "start":
                why = f"{trace.outcome.value}: {trace.failure.message}"
                failed.setdefault(subject.idx, f"{paid.policy.name} ({paid.policy.about}): {clip(why, 200)}")
    found = f"answers to {plural(len(failed), 'task')} ended without a reward"
    report.add("breaks-scoring", ERROR, found, failed)


def compare_with_gold(results: Sequence[Paid], report: AuditReport) -> None:
    """Reports policies that earn more than gold, and what the format alone earns."""
    if not report.wants("gold-beaten", "format-paid"):
        return
    beaten: dict[int, str] = {}
    lowest: dict[int, float] = {}
    for paid in results:
        for subject, _, trace in paid.scored:
            assert trace.reward is not None
            lowest[subject.idx] = min(trace.reward, lowest.get(subject.idx, trace.reward))
            gold = subject.gold_reward
            if gold is not None and trace.reward > gold + 1e-9:
                beaten[subject.idx] = f"{paid.policy.name} ({paid.policy.about}) earned {trace.reward:g}, gold {gold:g}"
    found = f"on {plural(len(beaten), 'task')} a policy that solves nothing earns more than gold"
    report.add("gold-beaten", ERROR, found, beaten)
    parts: Counter[str] = Counter()
    tasks: list[int] = []
    for paid in results:
        if paid.policy.name not in ("format-empty", "format-mark"):
            continue
        for subject, _, trace in paid.scored:
            assert trace.reward is not None
            gold, least = subject.gold_reward, lowest[subject.idx]
            if gold is not None and least < trace.reward - 1e-9 and trace.reward < gold - 1e-9:
                parts[f"{paid.policy.about}: {trace.reward:g}, gold earns {gold:g} and the least is {least:g}"] += 1
                tasks.append(subject.idx)
    if parts:
        shown = [f"{count} tasks: {text}" for text, count in parts.most_common(3)]
        found = f"the format alone is paid on {plural(len(set(tasks)), 'task')}"
        report.add("format-paid", NOTE, found, tasks=tasks, evidence=shown)


Z = 2.576
"""Bounds hold in 99 of 100 cases."""


def least_share(hits: int, tries: int, z: float = Z) -> float:
    """The lower end of Wilson's interval for a share."""
    if not tries or not hits:
        return 0.0
    share = hits / tries
    middle = share + z * z / (2 * tries)
    width = z * math.sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return max(0.0, (middle - width) / (1 + z * z / tries))


def excess_of(share: float, expected: float) -> float:
    """Normalises a share for chance: 0 if the share is as expected, 1 if every task was paid."""
    return 0.0 if expected >= 1 else max(0.0, (share - expected) / (1 - expected))
