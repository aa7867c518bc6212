"""Audits a target: draws tasks, plays gold answers, floor policies and a model, and reports the findings of every rule.

report = await Auditor(taskset, AuditConfig(target="arithmetic", num_tasks=50)).run(host)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from treetune.audit import costs, floors, leaks, machines, solvable, traces
from treetune.audit.report import RULES, AuditReport, Family, choose
from treetune.audit.sample import Player, Sample, draw_sample
from treetune.core.contract import Limits
from treetune.core.policy import Sampling
from treetune.core.taskset import Taskset
from treetune.core.trace import Failure, Outcome, Trace
from treetune.errors import TreetuneError, format_error
from treetune.evaluation import run_bounded
from treetune.play.protocol import Host, PlayOptions
from treetune.system.threads import call_apart

Positive = Annotated[int, msgspec.Meta(ge=1)]
OF_PROGRAMS = ("pays-exit", "pays-overwritten-checker", "pays-read-expected")
SPLITS = ("train-val-overlap", "train-val-near")
ON_SERVER = "the tasks are on a server"


class AuditConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: str = ""
    num_tasks: Positive = 50
    """The number of tasks to audit."""
    num_rollouts: Positive = 4
    """How often the model tries each task."""
    max_concurrent: Positive = 16
    """The maximum number of rollouts that run at once."""
    seed: int = 0
    """The seed for choosing tasks and for random policies."""
    model: str = ""
    """The model whose rollouts are examined; by default none."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits(max_turns=100, timeout=120.0)
    """The turn and time limits of one rollout."""
    rules: list[str] = []
    """Rules or families to test; by default all."""
    skip: list[str] = []
    """Rules or families to leave out."""


class Auditor:
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        config: AuditConfig,
        *,
        other: Taskset[Any, Any] | None = None,
        other_name: str = "",
        elsewhere: bool = False,
        on_progress: Callable[[str, int], object] = lambda stage, rollouts: None,
    ) -> None:
        """`other` is the split that must not share a task with this one. `elsewhere`: the tasks are on a server."""
        self._taskset, self._config = taskset, config
        self._other, self._other_name, self._elsewhere = other, other_name, elsewhere
        self._on_progress = on_progress
        self._stage = ""

    async def run(self, host: Host) -> AuditReport:
        """The host supplies the tasks, and its model plays them."""
        config, began = self._config, time.monotonic()
        self.report = report = AuditReport(
            config.target,
            self._taskset.name,
            seed=config.seed,
            model=config.model,
            chosen=choose(config.rules, config.skip),
        )
        self.player = player = Player(self._taskset, config.limits, config.max_concurrent, self._count)
        self._enter("drawing tasks")
        sample = await draw_sample(host, config.num_tasks, config.seed)
        report.tasks, report.num_tasks = sample.idxs, sample.num_tasks
        self._enter("gold answers")
        await solvable.check_validity(sample, player, report)
        await solvable.find_golds(sample, player, report)
        if report.wants(*solvable.FORMS):
            solvable.find_forms(sample, player.taskset, report)
        self._enter("again")
        await solvable.check_again(sample, player, report, elsewhere=self._elsewhere)
        known = await self._read()
        await self._try_floors(sample, known)
        self._enter("leaks")
        leaks.check_prompts(sample, report)
        await machines.look_around(sample, player, report)
        await self._compare_splits(known)
        self._enter("costs")
        played = [subject.first for subject in sample.subjects if subject.first is not None]
        costs.judge_costs(played, report)
        if self._elsewhere:
            report.leave_out("the environments are on a server", "processes-left")
        else:
            await costs.measure_alone(sample, player, report)
        traces.judge_traces(await self._play_model(host, sample), report)
        report.rollouts = player.rollouts + int(report.spread.get("rollouts", 0))
        report.seconds = time.monotonic() - began
        report.leave_out("there is nothing to try it on", *(rule for rule in RULES if rule not in report.not_tried))
        return report

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self._on_progress(stage, self.player.rollouts)

    def _count(self) -> None:
        self._on_progress(self._stage, self.player.rollouts)

    async def _read(self) -> list[leaks.ReadTask]:
        """Tasks that are only read; there are more of these than are played."""
        if self._elsewhere:
            self.report.leave_out(ON_SERVER, "duplicate-tasks", *SPLITS)
            return []
        readers = {*SPLITS, "duplicate-tasks", "truth-in-prompt", *floors.RULES_HERE}
        if self.report.chosen is not None and not readers & self.report.chosen:
            return []
        self._enter("reading")
        try:
            scanned: tuple[list[leaks.ReadTask], bool] = await call_apart(leaks.scan, self._taskset)
            known, whole = scanned
        except TreetuneError as error:
            self.report.leave_out(f"tasks cannot be read: {format_error(error)}", "duplicate-tasks")
            return []
        self.report.facts["tasks_read"] = len(known)
        if not self._taskset.INFINITE:
            leaks.check_duplicates(known, whole, self.report)
        else:
            self.report.leave_out("the taskset is infinite", "duplicate-tasks")
        return known

    async def _try_floors(self, sample: Sample, known: list[leaks.ReadTask]) -> None:
        report, player = self.report, self.player
        if self._elsewhere and self._taskset.scores_groups:
            return report.leave_out("a server scores the group, and only with its own model", *floors.RULES_HERE)
        self._enter("floors")
        sample.truths = leaks.count_truths(known)
        policies = list(floors.text_policies(sample, self._config.seed))
        if not any(policy.rule == "pays-constant" for policy in policies):
            report.leave_out("no two tasks have the same right answer", "pays-constant")
        results = await floors.try_floors(policies, sample, player, report)
        self._enter("programs")
        programs = await floors.try_floors(machines.program_policies(sample), sample, player, report)
        floors.compare_with_gold([*results, *programs], report)
        leaks.check_observations(sample, results, report)
        if not programs:
            for rule in OF_PROGRAMS:
                if rule in report.tried:
                    report.tried.remove(rule)
            report.leave_out("no task expects programs", *OF_PROGRAMS)
        return None

    async def _compare_splits(self, known: list[leaks.ReadTask]) -> None:
        if self._other is None:
            return self.report.leave_out("there is only one split: name the other with --val", *SPLITS)
        if not self.report.wants(*SPLITS):
            return None
        self._enter("comparing splits")
        others, _ = await call_apart(leaks.scan, self._other)
        self.report.facts[f"tasks_read_of_{self._other_name}"] = len(others)
        await call_apart(leaks.check_overlap, known, others, self._other_name, self.report)
        return None

    async def _play_model(self, host: Host, sample: Sample) -> list[Trace]:
        config = self._config
        wanted = self.report.chosen is None or any(RULES[rule].family is Family.SPREAD for rule in self.report.chosen)
        if not config.model or not wanted:
            return []
        self._enter(f"rollouts of {config.model}")
        played: list[Trace] = []

        async def play(item: tuple[Any, int]) -> None:
            subject, number = item
            asked = PlayOptions(
                model=config.model, sampling=config.sampling, limits=config.limits, occurrence=subject.occurrence
            )
            try:
                if self._taskset.scores_group_of(subject.task):
                    played.extend(await host.run_group(subject.task, config.num_rollouts, **asked))
                else:
                    played.append(await host.run_rollout(subject.task, rollout=number, **asked))
            except TreetuneError as error:
                trace = Trace(task=subject.task, uid=subject.task.uid, rollout=number, model=config.model)
                trace.fail(Outcome.ENVIRONMENT_ERROR, Failure.of(error, "host"))
                played.append(trace)
            self._on_progress(self._stage, self.player.rollouts + len(played))

        async def items() -> Any:
            for subject in sample.subjects:
                grouped = self._taskset.scores_group_of(subject.task)
                for number in range(1 if grouped else config.num_rollouts):
                    yield subject, number

        await run_bounded(items(), play, config.max_concurrent)
        return played
