"""Checks a taskset: its own `validate`, and that its gold answers are rewarded.

A task is valid where at least one of the two ran and none failed; a taskset that checks nothing is `unchecked`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import msgspec

from treetune.episode import DeadlinePassed, in_time
from treetune.errors import described
from treetune.evaluation.config import ValidateConfig
from treetune.evaluation.run_folder import Records, RunFolder
from treetune.evaluation.runner import run_bounded
from treetune.policies.scripted import Gold
from treetune.rollout import run_rollout
from treetune.score import Validity
from treetune.streams import draw_tasks
from treetune.task import Task
from treetune.taskset import Taskset
from treetune.validate.rules import SHOWN, Finding, Severity


class TaskCheck(msgspec.Struct):
    """What was found of one task."""

    idx: int
    uid: str
    occurrence: int
    validity: Validity
    rule: str | None = None
    """The rule that failed: `invalid-task`, `gold-not-rewarded`, `gold-failed`, `validate-failed`."""
    reason: str | None = None
    gold_reward: float | None = None


class CheckSummary(msgspec.Struct):
    tasks: int
    valid: int
    invalid: int
    unchecked: int
    gold_checked: int
    findings: list[Finding]


CHECKS: Records[TaskCheck] = Records("results.jsonl", msgspec.json.encode, msgspec.json.Decoder(TaskCheck).decode)
RETRIED = ("gold-failed", "validate-failed")
"""Rules that say of the check, not of the task, that it failed: a resumed run tries these again."""


async def check_taskset(
    taskset: Taskset[Any, Any], config: ValidateConfig, run: RunFolder[TaskCheck], on_check: Callable[[], None]
) -> CheckSummary:
    """Checks every task that `run` has no result for yet; results are saved as they come."""
    checks = {(check.uid, check.occurrence): check for check in run.read()}
    unseen = set(checks)

    async def unchecked() -> AsyncIterator[tuple[Task, int]]:
        async for task, occurrence in draw_tasks(taskset, config.num_tasks):
            unseen.discard((task.uid, occurrence))
            if (task.uid, occurrence) not in checks:
                yield task, occurrence

    async def check_one(drawn: tuple[Task, int]) -> None:
        check = await _check(taskset, *drawn, config)
        run.append(check)
        checks[check.uid, check.occurrence] = check
        on_check()

    try:
        await run_bounded(unchecked(), check_one, config.max_concurrent)
        if unseen:
            warnings.warn(
                f"{len(unseen)} saved results belong to tasks that this taskset no longer gives; moved aside",
                stacklevel=2,
            )
            run.keep(lambda check: (check.uid, check.occurrence) not in unseen)
            checks = {key: check for key, check in checks.items() if key not in unseen}
    finally:
        summary = summarise_checks(checks.values(), taskset.name)
        run.write_summary(summary)
    return summary


async def _check(taskset: Taskset[Any, Any], task: Task, occurrence: int, config: ValidateConfig) -> TaskCheck:
    check = TaskCheck(task.idx, task.uid, occurrence, Validity.UNCHECKED)
    rule = "validate-failed"
    try:
        verdict = await in_time(taskset.check(task), config.limits)
        check.validity, check.reason = verdict.validity, verdict.reason
        if check.validity is Validity.INVALID:
            check.rule = "invalid-task"
        elif config.gold:
            rule = "gold-failed"
            if await in_time(taskset.gold_of(task), config.limits) is not None:
                await _check_gold(taskset, task, config, check)
    except Exception as error:
        check.validity, check.rule = Validity.INVALID, rule
        check.reason = f"timeout: {error}" if isinstance(error, DeadlinePassed) else described(error)
    return check


async def _check_gold(taskset: Taskset[Any, Any], task: Task, config: ValidateConfig, check: TaskCheck) -> None:
    gold = Gold(taskset, probability=1.0, name="scripted:gold")
    trace = await run_rollout(taskset, task, gold, limits=config.limits)
    check.gold_reward = trace.reward
    if trace.reward is None:
        check.validity, check.rule = Validity.INVALID, "gold-failed"
        check.reason = trace.failure.message if trace.failure else trace.outcome.value
    elif not trace.passed(config.pass_threshold):
        check.validity, check.rule = Validity.INVALID, "gold-not-rewarded"
        check.reason = f"the gold answer got {trace.reward:g}, less than {config.pass_threshold:g}"
    else:
        check.validity = Validity.VALID


def summarise_checks(checks: Collection[TaskCheck], name: str) -> CheckSummary:
    counts = Counter(check.validity for check in checks)
    by_rule: dict[str, list[TaskCheck]] = {}
    for check in sorted(checks, key=lambda check: check.idx):
        if check.rule is not None:
            by_rule.setdefault(check.rule, []).append(check)
    return CheckSummary(
        tasks=len(checks),
        valid=counts[Validity.VALID],
        invalid=counts[Validity.INVALID],
        unchecked=counts[Validity.UNCHECKED],
        gold_checked=sum(check.gold_reward is not None for check in checks),
        findings=[
            Finding(
                rule=rule,
                severity=Severity.ERROR,
                file=name,
                unit="task",
                rows=[check.idx for check in failed[:SHOWN]],
                count=len(failed),
                found=failed[0].reason or "",
            )
            for rule, failed in sorted(by_rule.items())
        ],
    )
