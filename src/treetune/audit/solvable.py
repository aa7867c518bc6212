"""Solvable, every time: tasks are valid, environments start, and gold answers earn the maximum. If a task is created
and played again, here or in another process, it shows and earns the same."""

from __future__ import annotations

import asyncio
import difflib
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from treetune.audit.report import AuditReport, clip
from treetune.audit.sample import Player, Sample, Subject, as_text
from treetune.core.contract import Limits
from treetune.core.finding import ERROR, NOTE, WARNING
from treetune.core.score import Validity
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.data.rows.scorer import kind_of, reading_of
from treetune.data.validate.gold import Answer
from treetune.errors import format_error
from treetune.play.toolbox import find_call_fault
from treetune.scorers.scorer import find_form_faults, find_unpaid
from treetune.system.digest import digest
from treetune.system.processes import spawn_context
from treetune.system.threads import call

FORMS = ("answer-form-differs", "answer-form-unsaid", "answer-guessed")
GOLD = ("start-fails", "gold-failed", "gold-not-rewarded", "gold-unknown")


async def find_golds(sample: Sample, player: Player, report: AuditReport) -> None:
    """Gets the gold answers, plays them once, and keeps both: other rules compare with them."""
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
        if subject.trace is not None and (fault := find_call_fault(subject.gold, subject.trace)) is not None:
            faults[subject.idx] = fault
    of = f"{len(faults)} of {len(sample)} gold answers make a tool call that fails"
    report.add("gold-tool-error", WARNING, of, faults)


def find_forms(sample: Sample, taskset: Taskset[Any, Any], report: AuditReport) -> None:
    """Report prompts that do not ask for the form in which answers are read, and scorers that can be guessed at."""
    found: dict[str, dict[int, str]] = {rule: {} for rule in FORMS}
    for subject in sample.subjects:
        for rule, why in find_form_faults(*reading_of(taskset, subject.task)):
            found[rule][subject.idx] = why
    for rule, faults in found.items():
        report.add(rule, WARNING, f"{len(faults)} of {len(sample)} tasks: {next(iter(faults.values()), '')}", faults)


async def _say_golds(sample: Sample, player: Player, report: AuditReport) -> None:
    unpaid: dict[int, str] = {}
    for subject in sample.subjects:
        if subject.trace is not None and subject.trace.passed():
            scored = kind_of(player.taskset, subject.task)
            found = await call(find_unpaid, *scored) if scored is not None else None
            if found is not None:
                unpaid[subject.idx] = f"{clip(found[0], 80)!r} earns nothing; {found[1]}"
    of = f"{len(unpaid)} of {len(sample)} gold answers earn nothing in the words of a model"
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
        found = f"{len(unknown)} of {len(sample)} tasks have no known gold answer"
        report.add("gold-unknown", severity, found, tasks=unknown)
    for rule, faults, what in (
        ("start-fails", start, "environments do not start"),
        ("gold-failed", failed, "gold answers cannot be played"),
        ("gold-not-rewarded", poor, "gold answers do not earn the maximum"),
    ):
        report.add(rule, ERROR, f"{len(faults)} of {len(sample)} {what}", faults)


async def check_validity(sample: Sample, player: Player, report: AuditReport) -> None:
    """Reports the results of the taskset's own `validate`."""
    if not (player.taskset.overrides("validate") or player.taskset.default_scorer is not None):
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


AGAIN = 8
"""The number of tasks that are also played in another process."""
AGAIN_SECONDS = 300.0

AGAIN_RULES = ("tasks-differ", "reward-differs", "observations-differ", "not-portable")


async def check_again(sample: Sample, player: Player, report: AuditReport, *, elsewhere: bool) -> None:
    """Creates and plays all tasks again: in this process and, unless they are on a server (`elsewhere`), in another."""
    if not report.wants(*AGAIN_RULES):
        return
    tasks: dict[int, str] = {}
    rewards: dict[int, str] = {}
    shown: dict[int, str] = {}

    async def again(subject: Subject) -> None:
        if subject.gold is not None and subject.trace is not None and subject.trace.outcome.scored:
            second = await player.play(subject, subject.gold)
            _compare(subject, second.reward, _observed(second), "played again", rewards, shown)

    await player.each(again, sample.subjects)
    if elsewhere:
        report.facts["played_again_in"] = "this process, on the server's environments"
    else:
        _make_again(sample, player.taskset, tasks)
        if not tasks and not rewards and not shown:  # a difference in this process need not be confirmed by another one
            await _in_another_process(sample, player, report, tasks, rewards, shown)
    for rule, severity, found, what in (
        ("tasks-differ", ERROR, tasks, "tasks differ when they are made again"),
        ("reward-differs", ERROR, rewards, "gold answers earn different rewards when they are played again"),
        ("observations-differ", WARNING, shown, "environments show something different when they are played again"),
    ):
        report.add(rule, severity, f"{len(found)} {what}", found)


def _make_again(sample: Sample, taskset: Taskset[Any, Any], found: dict[int, str]) -> None:
    if not taskset.random_access:
        return
    for subject in sample.subjects:
        again = taskset[subject.idx]
        if fingerprint(again) != fingerprint(subject.task):
            found[subject.idx] = f"made again in this process: {_difference(subject.task, again)}"


def fingerprint(task: Task) -> str:
    return digest([task.uid, task.extra_info])


def _difference(first: Task, second: Task) -> str:
    fields = [name for name in first.__struct_fields__ if getattr(first, name) != getattr(second, name, None)]
    shown = ", ".join(
        f"{name} {clip(repr(getattr(first, name)), 80)} -> {clip(repr(getattr(second, name, None)), 80)}"
        for name in fields[:2]
    )
    return shown or "another content"


def _compare(
    subject: Subject,
    reward: float | None,
    observed: list[str],
    where: str,
    rewards: dict[int, str],
    shown: dict[int, str],
) -> None:
    assert subject.trace is not None
    if reward != subject.trace.reward:
        second = "nothing: it failed" if reward is None else f"{reward:g}"
        rewards.setdefault(subject.idx, f"gold earned {subject.trace.reward:g}, {where} {second}")
    before = _observed(subject.trace)
    if observed != before:
        lines = difflib.unified_diff("\n".join(before).splitlines(), "\n".join(observed).splitlines(), lineterm="", n=0)
        changes = [line for line in lines if line[:3] not in ("---", "+++", "@@ ") and not line.startswith("@@")]
        shown.setdefault(subject.idx, f"{where}: " + " | ".join(changes[:4]))


def _observed(trace: Trace) -> list[str]:
    """The observations of the environment in each turn and at the end."""
    return [as_text(turn.observed) for turn in trace.turns] + [as_text(trace.final)]


async def _in_another_process(
    sample: Sample,
    player: Player,
    report: AuditReport,
    tasks: dict[int, str],
    rewards: dict[int, str],
    shown: dict[int, str],
) -> None:
    if not player.taskset.random_access:
        report.facts["played_again_in"] = "this process: the taskset is a generator"
        return
    played = [one for one in sample.subjects if one.trace is not None and one.trace.outcome.scored][:AGAIN]
    golds = [None if player.taskset.scores_group_of(one.task) else one.gold for one in played]
    try:
        work = pickle.dumps((player.taskset, sample.idxs, [one.idx for one in played], golds, player.limits))
    except Exception as error:
        report.add("not-portable", WARNING, f"the taskset cannot be pickled: {format_error(error)}")
        return
    try:
        prints, results = await asyncio.wait_for(_ask_process(work), AGAIN_SECONDS)
    except (BrokenProcessPool, TimeoutError) as error:
        why = "it took too long" if isinstance(error, TimeoutError) else "its process died"
        report.add("not-portable", WARNING, f"another process could not play the tasks: {why}")
        return
    except Exception as error:
        report.add("not-portable", WARNING, f"another process could not play the tasks: {format_error(error)}")
        return
    report.facts["played_again_in"] = f"this process, and {len(played)} of them in another"
    for subject, found in zip(sample.subjects, prints, strict=True):
        if found != fingerprint(subject.task):
            tasks.setdefault(subject.idx, "it differs if it is made in another process, with another hash seed")
    for subject, result in zip(played, results, strict=True):
        if result is not None:
            _compare(subject, result[0], result[1], "in another process", rewards, shown)


async def _ask_process(work: bytes) -> tuple[list[str], list[tuple[float | None, list[str]] | None]]:
    # A new interpreter with its own set order, not a fork of this one.
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "1" if before != "1" else "2"
    pool = ProcessPoolExecutor(1, mp_context=spawn_context())
    try:
        asked = pool.submit(_play_there, work)
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before
        return await asyncio.wrap_future(asked)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _play_there(work: bytes) -> tuple[list[str], list[tuple[float | None, list[str]] | None]]:
    """Runs in the other process: returns the fingerprints of the tasks and the results of the gold answers."""
    taskset, idxs, played, golds, limits = pickle.loads(work)
    prints = [fingerprint(taskset[idx]) for idx in idxs]
    return prints, asyncio.run(_play_all(taskset, played, golds, limits))


async def _play_all(
    taskset: Taskset[Any, Any], idxs: list[int], golds: list[Answer | None], limits: Limits
) -> list[tuple[float | None, list[str]] | None]:
    player = Player(taskset, limits, max_concurrent=2)
    results: list[tuple[float | None, list[str]] | None] = []
    for idx, gold in zip(idxs, golds, strict=True):
        trace = None if gold is None else await player.play(Subject(taskset[idx], 0, gold), gold)
        results.append(None if trace is None else (trace.reward, _observed(trace)))
    return results
