"""Scores saved traces again, without the model: each recorded answer is played to the environment as it is now."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import first_of
from treetune.evaluation.config import Evaluation
from treetune.evaluation.run_folder import TRACES, RunFolder, read_traces
from treetune.evaluation.summary import Summary, Tally
from treetune.policies.scripted import Replay
from treetune.policy import Completion
from treetune.rollout import run_rollout, score_together
from treetune.target import taskset_fingerprint
from treetune.task import text_of
from treetune.trace import POLICY_FIELDS, Trace

_AT_ONCE = 64


class Rescored(msgspec.Struct):
    before: Summary
    after: Summary
    changed: int
    """Rollouts whose reward is another now."""
    diverged: int
    """Rollouts whose environment said something else than was recorded: their later answers may not fit."""
    skipped: int
    """Rollouts that had failed and have nothing to score."""


class Rescorer:
    """Scores the traces of `source` into `run`; `result()` says what there is so far, also after an interruption."""

    def __init__(self, evaluation: Evaluation, source: Path, run: RunFolder[Trace]) -> None:
        self._evaluation = evaluation
        self._source = source
        self._run = run
        threshold = evaluation.config.pass_threshold
        self._before, self._after = Tally(threshold), Tally(threshold)
        self._changed = self._diverged = self._skipped = 0
        self._free = asyncio.Semaphore(_AT_ONCE)

    def result(self) -> Rescored:
        before, after = self._before.summary(), self._after.summary()
        return Rescored(before, after, self._changed, self._diverged, self._skipped)

    async def run(self) -> Rescored:
        taskset = self._evaluation.taskset
        groups: dict[tuple[str, int], list[Trace]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for old in read_traces(self._source, taskset):
                    self._before.add(old)
                    if not old.outcome.scored:
                        self._skipped += 1
                    elif taskset.scores_group_of(old.task):
                        groups.setdefault((old.uid, old.occurrence), []).append(old)
                    else:
                        await self._free.acquire()
                        tasks.create_task(self._score_again([old], grouped=False))
                for group in groups.values():
                    await self._free.acquire()
                    tasks.create_task(self._score_again(group, grouped=True))
        except BaseExceptionGroup as errors:
            error = first_of(errors)
            raise error from error.__cause__
        finally:
            result = self.result()
            self._run.write_summary(result.after)
        return result

    async def _score_again(self, old_traces: list[Trace], grouped: bool) -> None:
        config, taskset = self._evaluation.config, self._evaluation.taskset
        try:
            new_traces = [await _replayed(self._evaluation, old) for old in old_traces]
            if grouped:
                await score_together(taskset, old_traces[0].task, new_traces, config.limits)
        finally:
            self._free.release()
        for old, new in zip(old_traces, new_traces, strict=True):
            self._changed += new.reward != old.reward
            self._diverged += [turn.observed for turn in new.turns] != [turn.observed for turn in old.turns]
            self._run.append(new)
            self._after.add(new)


async def score_again(evaluation: Evaluation, run: RunFolder[Trace]) -> Rescored:
    """Scores what a run has so far again, in its place; where that is interrupted, all of it stays as it was."""
    config, fingerprint = evaluation.resolved(), taskset_fingerprint(evaluation.taskset)
    folder = run.path / ".rescored"
    shutil.rmtree(folder, ignore_errors=True)
    with RunFolder.create(folder, TRACES, config, fingerprint) as fresh:
        result = await Rescorer(evaluation, run.path, fresh).run()
        run.replace(folder / TRACES.file, config, fingerprint)
    shutil.rmtree(folder)
    return result


async def _replayed(evaluation: Evaluation, old: Trace) -> Trace:
    answers = [
        Completion(text=_text(turn.message), message=turn.message, finish_reason=turn.finish_reason or "stop")
        for turn in old.turns
        if turn.message is not None
    ]
    new = await run_rollout(
        evaluation.taskset,
        old.task,
        Replay(answers),
        limits=evaluation.config.limits,
        occurrence=old.occurrence,
        rollout=old.rollout,
    )
    for field in POLICY_FIELDS:  # what the model did stays as it was recorded
        setattr(new, field, getattr(old, field))
    return new


def _text(message: dict[str, Any]) -> str:
    return text_of(message.get("content")) or ""
