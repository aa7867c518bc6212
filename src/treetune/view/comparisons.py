"""Runs side by side: what changed between the first and each other, task by task."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from treetune.chat.message import text_of
from treetune.evaluation import Run, TaskChange, compare_tasks

_MOST_TASKS = 5000
"""Of a comparison, those that changed first."""
_LONGEST = 20_000
"""Characters of what was said last."""


def compare_runs(before: Run, after: Run, query: str = "") -> dict[str, Any]:
    """Of the tasks of which a rollout fits the query in either run: a choice by one run alone would favour it."""
    only = None if not query.strip() else _keys(before, query) | _keys(after, query)
    comparison, changes = compare_tasks(before, after, only)
    plain = msgspec.to_builtins(comparison)
    for name in ("fixed", "broken"):  # they are in `tasks`
        plain[name] = len(plain[name])
    changes.sort(key=lambda change: -abs(change.change))
    return {
        "comparison": {**plain, "is_loss": comparison.is_loss},
        "verdict": comparison.verdict,
        "tasks": [_describe(change) for change in changes[:_MOST_TASKS]],
        "left": max(0, len(changes) - _MOST_TASKS),
    }


def _keys(run: Run, query: str) -> set[tuple[str, int]]:
    columns = run.columns
    groups = columns.groups()
    firsts = groups.first[np.unique(groups.task[run.fits(query)])]
    texts, codes, occurrences = columns.texts("uid"), columns.codes("uid"), columns.places("occurrence")
    return {(texts[codes[at]], int(occurrences[at])) for at in firsts.tolist()}


def _describe(change: TaskChange) -> dict[str, Any]:
    kind = "fixed" if change.change > 0 else "broken" if change.change < 0 else "unchanged"
    plain: dict[str, Any] = msgspec.to_builtins(change)
    return {**plain, "kind": kind}


def rollouts_of(run: Run, uid: str, occurrence: int) -> list[dict[str, Any]]:
    """Those of one task, with what each said last."""
    columns = run.columns
    if uid not in columns.texts("uid"):
        return []
    code = columns.texts("uid").index(uid)
    found = np.flatnonzero((columns.codes("uid") == code) & (columns.places("occurrence") == occurrence))
    return [_said(run, at) for at in found.tolist()]


def _said(run: Run, at: int) -> dict[str, Any]:
    entry, said = run.columns.entries[at], ""
    for turn in reversed(run.trace_without_tokens(at).turns):
        if turn.message is not None and (text := text_of(turn.message.get("content"))):
            said = text[-_LONGEST:]
            break
    return {
        "at": at,
        "rollout": entry.rollout,
        "reward": entry.reward,
        "outcome": entry.outcome,
        "answer": entry.answer,
        "said": said,
    }
