"""Checks a taskset: its own `validate`, that its gold answers are rewarded, and that its `reward` can score a wrong
answer.

A task is valid if at least one of the first two ran and none failed. If neither ran, it is `unchecked`.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from treetune.config.trust import CHECK_LINES
from treetune.core.finding import ERROR, SHOWN, WARNING, Finding, Flaw, Severity
from treetune.core.mixture import owner_of, parts_of
from treetune.core.score import NoScoreError, Validity, score_answer
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import Gold as Answer
from treetune.core.tool_schema import lost_for_verl
from treetune.data.rows.scorer import kind_of, reading_of
from treetune.data.validate.rules import RULES
from treetune.errors import InvalidAction, located
from treetune.evaluation.config import Validation
from treetune.evaluation.runner import run_bounded
from treetune.models.scripted import WRONG, Gold
from treetune.play.episode import DeadlinePassed, with_deadline
from treetune.play.rollout import run_rollout
from treetune.play.streams import draw_tasks
from treetune.play.toolbox import find_call_fault
from treetune.runs.folder import Records, RunFolder
from treetune.scorers.scorer import find_form_faults, find_unpaid
from treetune.system.threads import call

RETRIED = ("gold-failed", "validate-failed")
"""Rules that report a failure of the check, not of the task: a resumed run tries these again."""


class TaskCheck(msgspec.Struct):
    """The result of checking one task."""

    idx: int
    uid: str
    occurrence: int
    validity: Validity
    rule: str | None = None
    """The rule that failed: `invalid-task`, `validate-failed`, `gold-failed`, `gold-not-rewarded`, `reward-no-number`.
    """
    reason: str | None = None
    gold_reward: float | None = None
    warnings: dict[str, str] = {}
    """Warnings, by their rule: `answer-form-differs`, `answer-form-unsaid`, `answer-guessed`, `gold-said-otherwise`,
    `gold-tool-error`, `reward-raises`, `verl-tool-schema`."""

    def fail(self, rule: str, reason: str) -> None:
        self.validity, self.rule, self.reason = Validity.INVALID, rule, reason


class CheckSummary(msgspec.Struct):
    tasks: int
    valid: int
    invalid: int
    unchecked: int
    gold_checked: int
    findings: list[Finding]


def _scores_itself(taskset: Taskset[Any, Any], task: Task) -> bool:
    """Whether a task takes one answer, which the taskset's own `reward` or the rule scores."""
    taskset, task = owner_of(taskset, task)
    scores = taskset.overrides("reward") or taskset.default_scorer is not None
    return task.env_class is None and scores and not taskset.overrides("environment")


CHECKS: Records[TaskCheck] = Records(
    CHECK_LINES,
    msgspec.json.encode,
    msgspec.json.Decoder(TaskCheck).decode,
    key=lambda check: (check.uid, check.occurrence),
)


class TasksetChecker:
    """Checks every task that has no result in `run` yet; results are saved as they come."""

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
                gone = "belong to tasks that this taskset no longer has; moved aside"
                warnings.warn(f"{len(unseen)} saved results {gone}", stacklevel=2)
                self._run.keep(lambda check: (check.uid, check.occurrence) not in unseen)
                for key in unseen:
                    del self._checks[key]
            self._flaws = await call(self._find_flaws)
        finally:
            self._run.write_summary(self.summary())

    def _find_flaws(self) -> list[tuple[str, Flaw]]:
        """Faults of rows that are not tasks, or that are not shown correctly. Tasks that no answer solves are found
        when each task is checked."""
        found = [(part.name, flaw) for part in parts_of(self._taskset) for flaw in part.find_flaws()]
        return [(name, flaw) for name, flaw in found if flaw.rule != "invalid-task"]

    async def _check(self, task: Task, occurrence: int) -> TaskCheck:
        taskset, limits = self._taskset, self._config.limits
        check = TaskCheck(task.idx, task.uid, occurrence, Validity.UNCHECKED)
        rule = "validate-failed"
        try:
            verdict = await with_deadline(taskset.check(task), limits)
            check.validity, check.reason = verdict.validity, verdict.reason
            if check.validity is Validity.INVALID:
                check.rule = "invalid-task"
            for broken, found in find_form_faults(*reading_of(taskset, task)):
                check.warnings[broken] = f"{found}: {RULES[broken].remedy}"
            if check.validity is not Validity.INVALID and self._config.gold and taskset.scores_alone(task):
                rule = "gold-failed"
                if (answer := await with_deadline(taskset.gold_of(task), limits)) is not None:
                    await self._check_gold(task, answer, check)
                if check.rule is None and _scores_itself(taskset, task):
                    await self._check_wrong(task, check)
        except Exception as error:
            check.fail(rule, f"timeout: {error}" if isinstance(error, DeadlinePassed) else located(error))
        return check

    async def _check_gold(self, task: Task, answer: Answer, check: TaskCheck) -> None:
        gold = Gold(self._taskset, probability=1.0, name="scripted:gold")
        trace = await run_rollout(self._taskset, task, gold, limits=self._config.limits)
        threshold = self._config.pass_threshold
        check.gold_reward, check.validity = trace.reward, Validity.VALID
        if lost := lost_for_verl(trace.tools):
            kept = "verl's own tools keep only type, description and enum of a property"
            check.warnings["verl-tool-schema"] = f"{kept}: {lost[0]}"
        if (fault := find_call_fault(answer, trace, threshold)) is not None:
            check.warnings["gold-tool-error"] = fault
        if trace.reward is None:
            check.fail("gold-failed", trace.failure.full_message if trace.failure else trace.outcome.value)
        elif not trace.passed(threshold):
            why = f"; {trace.explanation}" if trace.explanation else ""
            enough = " (set --pass-threshold if less is enough)" if trace.reward > 0 else ""
            got = f"the gold answer earned {trace.reward:g}, less than {threshold:g}{enough}{why}"
            check.fail("gold-not-rewarded", got)
        elif (scored := kind_of(self._taskset, task)) and (unpaid := await call(find_unpaid, *scored)) is not None:
            check.warnings["gold-said-otherwise"] = f"{unpaid[0]!r} earns nothing: {unpaid[1]}"

    async def _check_wrong(self, task: Task, check: TaskCheck) -> None:
        """Checks that `reward` returns a number for a wrong answer."""
        try:
            await with_deadline(score_answer(self._taskset, task, WRONG), self._config.limits)
        except InvalidAction:
            pass  # the scorer says that the answer earns nothing
        except NoScoreError as error:
            check.fail("reward-no-number", f"{error.message} for the answer {WRONG!r}")
        except Exception as error:
            check.warnings["reward-raises"] = f"for the answer {WRONG!r}: {located(error)}"

    def summary(self) -> CheckSummary:
        checks = sorted(self._checks.values(), key=lambda check: check.idx)
        counts, name = Counter(check.validity for check in checks), self._taskset.name
        found: dict[tuple[Severity, str], list[tuple[int, str]]] = defaultdict(list)
        for check in checks:
            if check.rule is not None:
                found[ERROR, check.rule].append((check.idx, check.reason or ""))
            for rule, text in check.warnings.items():
                found[WARNING, rule].append((check.idx, text))
        findings = [
            Finding(rule, severity, name, "task", [idx for idx, _ in of[:SHOWN]], len(of), of[0][1], "", "")
            for (severity, rule), of in sorted(found.items())
        ]
        for source, flaw in self._flaws:
            findings.append(Finding(flaw.rule, WARNING, source, "row", flaw.rows, flaw.count, str(flaw), "", ""))
        return CheckSummary(
            tasks=len(checks),
            valid=counts[Validity.VALID],
            invalid=counts[Validity.INVALID],
            unchecked=counts[Validity.UNCHECKED],
            gold_checked=sum(check.gold_reward is not None for check in checks),
            findings=findings,
        )
