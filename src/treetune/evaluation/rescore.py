"""Scores saved traces again without the model: plays each recorded answer to the environment in its current form."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np

from treetune.chat.message import text_of
from treetune.config.trust import names_from
from treetune.core.mixture import owner_of
from treetune.core.policy import Completion
from treetune.core.task import Task
from treetune.core.trace import POLICY_FIELDS, Trace
from treetune.errors import ResumeError, TasksetError
from treetune.evaluation.config import Evaluation, TaskCode
from treetune.evaluation.runner import Runner
from treetune.models.scripted import Replay
from treetune.play.rollout import run_rollout, score_together
from treetune.runs.discovery import open_run
from treetune.runs.folder import TRACES, RunFolder, read_traces
from treetune.runs.index import Damage
from treetune.runs.summary import Summary, Tally
from treetune.scorers.judges import JudgeError

MORE = "raise that limit; verdicts that were paid for are kept"


class RescoreSummary(msgspec.Struct):
    before: Summary
    after: Summary
    changed: int
    """Rollouts whose reward changed."""
    diverged: int
    """Rollouts whose environment replied differently than in the recording, so that their later answers may not fit."""
    skipped: int
    """Failed rollouts with nothing to score: they are copied unchanged."""


class Rescorer(Runner):
    """Scores the traces of `source` into `run`. `compare()` returns the result so far, even after an interruption."""

    def __init__(self, evaluation: Evaluation, source: Path, run: RunFolder[Trace] | None, trust: bool = False) -> None:
        """Without `trust`, recorded tasks of a run folder that is not this user's may name only installed code."""
        super().__init__(evaluation, run)
        self._recorded_code = TaskCode(source, trust)
        self._source = source
        self._before = Tally(self._config.pass_threshold)
        self._changed = self._diverged = self._skipped = 0

    def compare(self) -> RescoreSummary:
        before, after = self._before.summary(), self.tally.summary()
        return RescoreSummary(before, after, self._changed, self._diverged, self._skipped)

    async def _wanted(self) -> AsyncIterator[list[Trace]]:
        """The traces, in lists that are scored together: per task if the taskset scores groups, otherwise one each."""
        groups: dict[tuple[str, int], list[Trace]] = {}
        for old in self._recorded():
            self._before.add(old)
            self._refuse_code(old.task)
            if not _has_answers(old):
                self._skipped += 1
                yield [old]
            elif self._taskset.scores_group_of(old.task):
                groups.setdefault((old.uid, old.occurrence), []).append(old)
            else:
                yield [old]
        for group in groups.values():
            yield group

    def _remember_code(self, task: Task) -> None:
        pass  # recorded, perhaps by someone else

    def _refuse_code(self, task: Task) -> None:
        """Raises if a recorded task names code that may not run: one error, instead of one per rollout."""
        if (origin := self._recorded_code.origin_of(task)).trusted:
            return
        owner, task = owner_of(self._taskset, task)
        with names_from(origin):
            if task.env_class is not None:
                owner.environment_class(task.env_class)
            owner.tools_for(task)

    def _recorded(self) -> Iterator[Trace]:
        damage = Damage()
        yield from read_traces(self._source, self._taskset, damage)
        self._before.notes = self.tally.notes = damage.warnings_of(TRACES.file)

    async def _play(self, old_traces: list[Trace]) -> list[Trace]:
        if not _has_answers(old_traces[0]):
            return old_traces
        task = old_traces[0].task
        with names_from(self._recorded_code.origin_of(task)):
            new_traces = [await self._replay(old) for old in old_traces]
            if self._taskset.scores_group_of(task):
                await score_together(self._taskset, task, new_traces, self._config.limits)
        for old, new in zip(old_traces, new_traces, strict=True):
            self._changed += new.reward != old.reward
            self._diverged += [turn.observed for turn in new.turns] != [turn.observed for turn in old.turns]
        return new_traces

    async def _replay(self, old: Trace) -> Trace:
        answers = [
            Completion(text_of(turn.message.get("content")) or "", turn.message, turn.finish_reason or "stop")
            for turn in old.turns
            if turn.message is not None
        ]
        new = await run_rollout(
            self._taskset,
            old.task,
            Replay(answers),
            limits=self._config.limits,
            occurrence=old.occurrence,
            rollout=old.rollout,
            recorded=[turn.calls for turn in old.turns if turn.calls],
        )
        new.tools, score_seconds = old.tools, new.timing.score
        for field in POLICY_FIELDS:  # the model's part is not changed
            setattr(new, field, getattr(old, field))
        new.timing = msgspec.structs.replace(old.timing, score=score_seconds)
        return new


class Rescored(msgspec.Struct):
    """A rollout, and the reward it would have now."""

    at: int
    """Its position in the run."""
    task: int
    rollout: int
    before: float | None
    after: float | None
    why: str
    """The current verdict of the scorer, or why there is no reward."""


class RescorePreview(Rescorer):
    """Rescores the rollouts that a query selects and writes nothing. `rows` has the rewards they would have."""

    def __init__(
        self, evaluation: Evaluation, source: Path, query: str = "", most: int | None = None, trust: bool = False
    ) -> None:
        super().__init__(evaluation, source, None, trust)
        run = open_run(source)
        fitting = np.flatnonzero(run.fits(query))
        self.left = 0 if most is None else max(0, len(fitting) - most)
        """Selected rollouts beyond `most`."""
        self.rows: list[Rescored] = []
        self._shown = set(fitting[:most].tolist())
        groups = run.columns.groups()
        if self._taskset.scores_groups and self._shown:
            self._read = np.flatnonzero(np.isin(groups.task, groups.task[sorted(self._shown)])).tolist()
        else:
            self._read = sorted(self._shown)
        self._previewed, self._at = run, dict[int, int]()

    @property
    def failed(self) -> int:
        """Rollouts that had a reward and would have none."""
        return sum(row.after is None and row.before is not None for row in self.rows)

    @property
    def changed(self) -> int:
        return sum(row.after != row.before for row in self.rows)

    def _recorded(self) -> Iterator[Trace]:
        for at in self._read:
            try:
                trace = self._previewed.trace(self._previewed.columns.entries[at], self._taskset.type_of)
            except TasksetError as error:
                warnings.warn(f"{error.message}; it is left out", stacklevel=2)
                continue
            self._at[id(trace)] = at
            yield trace

    async def _play(self, old_traces: list[Trace]) -> list[Trace]:
        new_traces = await super()._play(old_traces)
        for old, new in zip(old_traces, new_traces, strict=True):
            if (at := self._at.pop(id(old))) in self._shown:
                why = new.failure.message if new.failure is not None else new.explanation or ""
                self.rows.append(Rescored(at, old.task.idx, old.rollout, old.reward, new.reward, why))
        return new_traces


def _has_answers(trace: Trace) -> bool:
    """Whether there are answers to score. A rollout for which a judge gave no verdict has answers, too. The answer
    of an agent says too little if its machine is gone."""
    if trace.agent is not None and trace.agent.on_machine:
        return False
    return trace.failure is None or trace.failure.type == JudgeError.__name__


async def score_again(evaluation: Evaluation, run: RunFolder[Trace], trust: bool = False) -> RescoreSummary:
    """Rescores the rollouts of a run in place. If that is interrupted, the run is unchanged."""
    folder = run.path / ".rescored"
    shutil.rmtree(folder, ignore_errors=True)
    with RunFolder.create(folder, TRACES, evaluation) as fresh:
        rescorer = Rescorer(evaluation, run.path, fresh, trust)
        await rescorer.run_all()
        if (spent := rescorer.tally.stopped) is not None:
            raise ResumeError(f"{spent}, before everything was scored again: {run.path} is unchanged", remedy=MORE)
        run.replace(fresh)
    shutil.rmtree(folder)
    return rescorer.compare()
