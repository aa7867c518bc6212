"""Scores saved traces again, without the model: each recorded answer is played to the environment as it is now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from treetune.evaluate.config import Evaluation
from treetune.evaluate.run_folder import RunFolder, read_traces
from treetune.evaluate.summary import Summary, Tally
from treetune.policies.scripted import Replay
from treetune.policy import Completion
from treetune.rollout import run_rollout, score_together
from treetune.trace import Trace

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


async def rescore(evaluation: Evaluation, source: Path, run: RunFolder[Trace]) -> Rescored:
    taskset, threshold = evaluation.taskset, evaluation.config.pass_threshold
    before, after = Tally(threshold), Tally(threshold)
    changed = diverged = skipped = 0
    free = asyncio.Semaphore(_AT_ONCE)

    async def score_again(old_traces: list[Trace]) -> None:
        nonlocal changed, diverged
        try:
            new_traces = [await _replayed(evaluation, old) for old in old_traces]
            if taskset.scores_group_of(old_traces[0].task):
                await score_together(taskset, old_traces[0].task, new_traces)
        finally:
            free.release()
        for old, new in zip(old_traces, new_traces, strict=True):
            changed += new.reward != old.reward
            diverged += [turn.observed for turn in new.turns] != [turn.observed for turn in old.turns]
            run.append(new)
            after.add(new)

    groups: dict[tuple[str, int], list[Trace]] = {}
    async with asyncio.TaskGroup() as tasks:
        for old in read_traces(source, taskset):
            before.add(old)
            if not old.outcome.scored:
                skipped += 1
            elif taskset.scores_group_of(old.task):
                groups.setdefault((old.uid, old.occurrence), []).append(old)
            else:
                await free.acquire()
                tasks.create_task(score_again([old]))
        for group in groups.values():
            await free.acquire()
            tasks.create_task(score_again(group))
    summary = after.summary()
    run.write_summary(summary)
    return Rescored(before.summary(), summary, changed, diverged, skipped)


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
    # What the model did stays as it was recorded.
    new.model, new.usage, new.tokens, new.timing = old.model, old.usage, old.tokens, old.timing
    return new


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
