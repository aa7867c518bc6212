"""Checks a taskset: its own `validate`, and that its gold answers are rewarded.

A task is valid where at least one of the two ran and none failed; a taskset that checks nothing is `unchecked`.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from treetune.episode import DeadlinePassed, in_time
from treetune.errors import located
from treetune.evaluation.config import Validation
from treetune.evaluation.runner import run_bounded
from treetune.flaw import Flaw
from treetune.mixture import parts_of
from treetune.policies.scripted import Gold
from treetune.rollout import run_rollout
from treetune.rows.scorer import kind_of
from treetune.runs.folder import Records, RunFolder
from treetune.score import Validity
from treetune.scorers.said import find_unpaid
from treetune.streams import draw_tasks
from treetune.task import Task
from treetune.threads import call
from treetune.tool_schema import lost_for_verl

if TYPE_CHECKING:
    from treetune.validate.rules import Finding

RETRIED = ("gold-failed", "validate-failed")
"""Rules that say of the check, not of the task, that it failed: a resumed run tries these again."""


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
    lost_for_verl: list[str] = []
    """What of its tools' schemas verl's own tools would not tell a model."""
    warning: str | None = None
    """How the gold answer is said that its scorer does not pay: `gold-said-otherwise`."""

    def fail(self, rule: str, reason: str) -> None:
        self.validity, self.rule, self.reason = Validity.INVALID, rule, reason


class CheckSummary(msgspec.Struct):
    tasks: int
    valid: int
    invalid: int
    unchecked: int
    gold_checked: int
    findings: list[Finding]


CHECKS: Records[TaskCheck] = Records("results.jsonl", msgspec.json.encode, msgspec.json.Decoder(TaskCheck).decode)


class TasksetChecker:
    """Checks every task that `run` has no result for yet; results are saved as they come."""

    def __init__(self, validation: Validation, run: RunFolder[TaskCheck]) -> None:
        self._config, self._taskset = validation.config, validation.taskset
        self._run = run
        self._flaws: list[tuple[str, Flaw]] = []
        self._checks = {(check.uid, check.occurrence): check for check in run.read()}

    async def run(self, on_check: Callable[[], None]) -> None:
        unseen = set(self._checks)

        async def unchecked() -> AsyncIterator[tuple[Task, int]]:
            async for task, occurrence in draw_tasks(self._taskset, self._config.num_tasks):
                unseen.discard((task.uid, occurrence))
                if (task.uid, occurrence) not in self._checks:
                    yield task, occurrence

        async def check_one(drawn: tuple[Task, int]) -> None:
            check = await self._check(*drawn)
            self._run.append(check)
            self._checks[check.uid, check.occurrence] = check
            on_check()

        try:
            await run_bounded(unchecked(), check_one, self._config.max_concurrent)
            if unseen:
                gone = "belong to tasks that this taskset no longer gives; moved aside"
                warnings.warn(f"{len(unseen)} saved results {gone}", stacklevel=2)
                self._run.keep(lambda check: (check.uid, check.occurrence) not in unseen)
                for key in unseen:
                    del self._checks[key]
            self._flaws = await call(self._find_flaws)
        finally:
            self._run.write_summary(self.summary())

    def _find_flaws(self) -> list[tuple[str, Flaw]]:
        """What is wrong with rows that are no tasks, or that are not shown as they should be; those that no answer
        solves are found task by task."""
        found = [(part.name, flaw) for part in parts_of(self._taskset) for flaw in part.flaws()]
        return [(name, flaw) for name, flaw in found if flaw.rule != "invalid-task"]

    async def _check(self, task: Task, occurrence: int) -> TaskCheck:
        taskset, limits = self._taskset, self._config.limits
        check = TaskCheck(task.idx, task.uid, occurrence, Validity.UNCHECKED)
        rule = "validate-failed"
        try:
            verdict = await in_time(taskset.check(task), limits)
            check.validity, check.reason = verdict.validity, verdict.reason
            if check.validity is Validity.INVALID:
                check.rule = "invalid-task"
            elif self._config.gold:
                rule = "gold-failed"
                if await in_time(taskset.gold_of(task), limits) is not None:
                    await self._check_gold(task, check)
        except Exception as error:
            check.fail(rule, f"timeout: {error}" if isinstance(error, DeadlinePassed) else located(error))
        return check

    async def _check_gold(self, task: Task, check: TaskCheck) -> None:
        gold = Gold(self._taskset, probability=1.0, name="scripted:gold")
        trace = await run_rollout(self._taskset, task, gold, limits=self._config.limits)
        threshold = self._config.pass_threshold
        check.gold_reward, check.lost_for_verl = trace.reward, lost_for_verl(trace.tools)
        check.validity = Validity.VALID
        if trace.reward is None:
            check.fail("gold-failed", trace.failure.told if trace.failure else trace.outcome.value)
        elif not trace.passed(threshold):
            why = f"; {trace.explanation}" if trace.explanation else ""
            check.fail("gold-not-rewarded", f"the gold answer got {trace.reward:g}, less than {threshold:g}{why}")
        elif (scored := kind_of(self._taskset, task)) and (unpaid := await call(find_unpaid, *scored)) is not None:
            check.warning = f"{unpaid[0]!r} earns nothing: {unpaid[1]}"

    def summary(self) -> CheckSummary:
        from treetune.validate.rules import SHOWN, Finding, Severity  # checks of files take long to load

        checks = sorted(self._checks.values(), key=lambda check: check.idx)
        counts = Counter(check.validity for check in checks)
        by_rule: dict[str, list[TaskCheck]] = defaultdict(list)
        for check in checks:
            if check.rule is not None:
                by_rule[check.rule].append(check)
        findings = []
        for rule, failed in sorted(by_rule.items()):
            first, found = [check.idx for check in failed[:SHOWN]], failed[0].reason or ""
            findings.append(Finding(rule, Severity.ERROR, self._taskset.name, "task", first, len(failed), found))
        if lost := [check for check in checks if check.lost_for_verl]:
            found = f"verl's own tools keep of a property only type, description and enum: {lost[0].lost_for_verl[0]}"
            idxs = [check.idx for check in lost[:SHOWN]]
            findings.append(
                Finding("verl-tool-schema", Severity.WARNING, self._taskset.name, "task", idxs, len(lost), found)
            )
        if warned := [check for check in checks if check.warning is not None]:
            first, found = [check.idx for check in warned[:SHOWN]], warned[0].warning or ""
            rule = "gold-said-otherwise"
            findings.append(Finding(rule, Severity.WARNING, self._taskset.name, "task", first, len(warned), found))
        for name, flaw in self._flaws:
            findings.append(Finding(flaw.rule, Severity.WARNING, name, "row", flaw.rows, flaw.count, str(flaw)))
        return CheckSummary(
            tasks=len(checks),
            valid=counts[Validity.VALID],
            invalid=counts[Validity.INVALID],
            unchecked=counts[Validity.UNCHECKED],
            gold_checked=sum(check.gold_reward is not None for check in checks),
            findings=findings,
        )
