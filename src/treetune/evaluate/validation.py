"""Checks a taskset: its own `validate`, and that its gold answers are rewarded.

A task is valid where at least one of the two ran and none failed; a taskset that checks nothing is `unchecked`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from treetune.evaluate.run_folder import Records, RunFolder
from treetune.evaluate.runner import drawn
from treetune.offload import call
from treetune.policies.scripted import Gold
from treetune.rollout import Limits, run_rollout
from treetune.score import Validity
from treetune.task import Task
from treetune.taskset import Taskset

_REASONS = 10
"""How many tasks a finding names."""


class ValidateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    taskset: dict[str, Any]
    """What to check: `id` (or `custom_cls`) and the taskset's own keys."""
    num_tasks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """How many tasks; absent: all of a finite taskset."""
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] = 64
    """The most checks under way at once."""
    pass_threshold: float = 1.0
    """The reward that a gold answer must reach."""
    gold: bool = True
    """Run each task with its gold answer too."""
    limits: Limits = Limits(timeout=600.0)
    """Turns and seconds of one gold rollout."""


class Check(msgspec.Struct):
    """What was found of one task."""

    idx: int
    uid: str
    occurrence: int
    validity: Validity
    rule: str | None = None
    """The rule that failed: `invalid-task`, `gold-not-rewarded`, `gold-failed`, `validate-failed`."""
    reason: str | None = None
    gold_reward: float | None = None


class Finding(msgspec.Struct):
    """One rule that failed, and where."""

    rule: str
    severity: str
    file: str
    rows: list[int]
    """The first ten tasks, by idx."""
    count: int
    message: str


class ValidationSummary(msgspec.Struct):
    tasks: int
    valid: int
    invalid: int
    unchecked: int
    gold_checked: int
    findings: list[Finding]


CHECKS: Records[Check] = Records("results.jsonl", msgspec.json.encode, msgspec.json.Decoder(Check).decode)


async def validate_taskset(
    taskset: Taskset[Any, Any], config: ValidateConfig, run: RunFolder[Check], on_check: Callable[[Check], None]
) -> ValidationSummary:
    """Checks every task that `run` has no result for yet; results are saved as they come."""
    checks = list(run.read())
    done = {(check.uid, check.occurrence) for check in checks}
    free = asyncio.Semaphore(config.max_concurrent)

    async def check_one(task: Task, occurrence: int) -> None:
        try:
            check = await _check(taskset, task, occurrence, config)
        finally:
            free.release()
        run.append(check)
        checks.append(check)
        on_check(check)

    try:
        async with asyncio.TaskGroup() as group:
            async for task, occurrence in drawn(taskset, config.num_tasks):
                if (task.uid, occurrence) not in done:
                    await free.acquire()
                    group.create_task(check_one(task, occurrence))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        summary = summarise_checks(checks, taskset.name)
        run.write_summary(summary)
    return summary


async def _check(taskset: Taskset[Any, Any], task: Task, occurrence: int, config: ValidateConfig) -> Check:
    check = Check(task.idx, task.uid, occurrence, Validity.UNCHECKED)
    try:
        verdict = await taskset.check(task)
    except Exception as error:
        check.validity, check.rule = Validity.INVALID, "validate-failed"
        check.reason = f"{type(error).__name__}: {error}"
        return check
    check.validity, check.reason = verdict.validity, verdict.reason
    if check.validity is Validity.INVALID:
        check.rule = "invalid-task"
        return check
    if config.gold and await call(taskset.gold, task) is not None:
        await _check_gold(taskset, task, config, check)
    return check


async def _check_gold(taskset: Taskset[Any, Any], task: Task, config: ValidateConfig, check: Check) -> None:
    gold = Gold(taskset, probability=1.0, name="scripted:gold")
    trace = await run_rollout(taskset, task, gold, limits=config.limits)
    check.gold_reward = trace.reward
    if not trace.outcome.scored:
        check.validity, check.rule = Validity.INVALID, "gold-failed"
        check.reason = trace.failure.message if trace.failure else trace.outcome.value
    elif not trace.passed(config.pass_threshold):
        check.validity, check.rule = Validity.INVALID, "gold-not-rewarded"
        check.reason = f"the gold answer got {trace.reward:g}, less than {config.pass_threshold:g}"
    else:
        check.validity = Validity.VALID


def summarise_checks(checks: list[Check], name: str) -> ValidationSummary:
    counts = Counter(check.validity for check in checks)
    by_rule: dict[str, list[Check]] = {}
    for check in sorted(checks, key=lambda check: check.idx):
        if check.rule is not None:
            by_rule.setdefault(check.rule, []).append(check)
    return ValidationSummary(
        tasks=len(checks),
        valid=counts[Validity.VALID],
        invalid=counts[Validity.INVALID],
        unchecked=counts[Validity.UNCHECKED],
        gold_checked=sum(check.gold_reward is not None for check in checks),
        findings=[
            Finding(
                rule=rule,
                severity="error",
                file=name,
                rows=[check.idx for check in failed[:_REASONS]],
                count=len(failed),
                message=failed[0].reason or "",
            )
            for rule, failed in sorted(by_rule.items())
        ],
    )
