"""Solvable: tasks are valid, environments start, and gold answers earn the most there is."""

from __future__ import annotations

from treetune.audit.player import Player
from treetune.audit.rules import RULES, AuditReport, Family, clip
from treetune.audit.sample import Sample, Subject
from treetune.core.finding import ERROR, NOTE, WARNING
from treetune.core.score import Validity
from treetune.data.rows.scorer import kind_of
from treetune.errors import format_error
from treetune.play.toolbox import find_fault
from treetune.scorers.said import find_unpaid
from treetune.system.threads import call

RULES.add_family(
    Family.SOLVABLE,
    {
        "invalid-task": ("the taskset's own validate() finds nothing wrong", "correct the task, or leave it out"),
        "start-fails": (
            "every environment starts: what it runs first, such as `init` and a reference, ends well",
            "see the cause; leave such tasks out",
        ),
        "gold-failed": ("the gold answer is played to its end", "see the cause"),
        "gold-not-rewarded": (
            "the gold answer earns the most there is",
            "correct the ground truth, the gold answer or the scorer",
        ),
        "gold-tool-error": (
            "every call of a tool that the gold answer makes is answered without an error",
            "correct the call, or the tool; a method is one where @tool stands above it",
        ),
        "gold-unknown": (
            "a gold answer to try",
            "write gold(task): without it nobody knows whether a task can be solved",
        ),
        "gold-said-otherwise": (
            "the gold answer earns as much bold, with a full stop, boxed or in a sentence",
            "use another kind of scorer, or tell the form of the answer in the prompt",
        ),
    },
)
GOLD = ("start-fails", "gold-failed", "gold-not-rewarded", "gold-unknown")


async def find_golds(sample: Sample, player: Player, report: AuditReport) -> None:
    """Asks for the gold answers, plays them once, and keeps both: other rules measure by them."""
    unknown: list[int] = []
    failed: dict[int, str] = {}

    async def find(subject: Subject) -> None:
        try:
            subject.gold = await player.bounded(player.taskset.gold_of(subject.task))
        except Exception as error:
            failed[subject.idx] = f"gold(): {format_error(error)}"
            return
        if subject.gold is None:
            unknown.append(subject.idx)
            subject.first = await player.play(subject, "")
        else:
            subject.first = subject.trace = await player.play(subject, subject.gold)

    await player.each(find, sample.subjects)
    report.facts["gold_answers"] = sum(subject.gold is not None for subject in sample.subjects)
    if report.wants(*GOLD):
        _judge_golds(sample, report, unknown, failed)
    if report.wants("gold-tool-error"):
        _judge_calls(sample, report)
    if report.wants("gold-said-otherwise"):
        await _say_golds(sample, player, report)


def _judge_calls(sample: Sample, report: AuditReport) -> None:
    faults: dict[int, str] = {}
    for subject in sample.subjects:
        if subject.trace is not None and (fault := find_fault(subject.gold, subject.trace)) is not None:
            faults[subject.idx] = fault
    of = f"{len(faults)} of {len(sample)} gold answers call a tool in vain"
    report.add("gold-tool-error", WARNING, of, faults)


async def _say_golds(sample: Sample, player: Player, report: AuditReport) -> None:
    unpaid: dict[int, str] = {}
    for subject in sample.subjects:
        if subject.trace is not None and subject.trace.passed():
            scored = kind_of(player.taskset, subject.task)
            found = await call(find_unpaid, *scored) if scored is not None else None
            if found is not None:
                unpaid[subject.idx] = f"{clip(found[0], 80)!r} earns nothing; {found[1]}"
    of = f"{len(unpaid)} of {len(sample)} gold answers earn nothing as a model would say them"
    report.add("gold-said-otherwise", WARNING, of, unpaid)


def _judge_golds(sample: Sample, report: AuditReport, unknown: list[int], failed: dict[int, str]) -> None:
    start: dict[int, str] = {}
    poor: dict[int, str] = {}
    for subject in sample.subjects:
        trace, failure = subject.trace, subject.first.failure if subject.first is not None else None
        if failure is not None and failure.phase == "start":
            start[subject.idx] = failure.message
        elif trace is None:
            continue
        elif trace.reward is None:
            failed[subject.idx] = failure.message if failure is not None else trace.outcome.value
        elif not trace.passed():
            answer = "" if trace.explanation is None else f" ({clip(trace.explanation, 120)})"
            poor[subject.idx] = f"gold earns {trace.reward:g}{answer}"
    if unknown:
        severity = WARNING if len(unknown) == len(sample) else NOTE
        found = f"{len(unknown)} of {len(sample)} tasks have no gold answer that is known here"
        report.add("gold-unknown", severity, found, tasks=unknown)
    for rule, faults, what in (
        ("start-fails", start, "environments do not start"),
        ("gold-failed", failed, "gold answers cannot be played"),
        ("gold-not-rewarded", poor, "gold answers do not earn the most there is"),
    ):
        report.add(rule, ERROR, f"{len(faults)} of {len(sample)} {what}", faults)


async def check_validity(sample: Sample, player: Player, report: AuditReport) -> None:
    """What the taskset's own `validate` says."""
    if not player.taskset.overrides("validate"):
        return report.leave_out("the taskset has no validate()", "invalid-task")
    if not report.wants("invalid-task"):
        return None
    faults: dict[int, str] = {}

    async def check(subject: Subject) -> None:
        try:
            verdict = await player.bounded(player.taskset.check(subject.task))
            if verdict.validity is Validity.INVALID:
                faults[subject.idx] = verdict.reason or "invalid"
        except Exception as error:
            faults[subject.idx] = f"validate() failed: {format_error(error)}"

    await player.each(check, sample.subjects)
    report.add("invalid-task", ERROR, f"validate() finds {len(faults)} of {len(sample)} tasks invalid", faults)
    return None
