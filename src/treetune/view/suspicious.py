"""Finds suspicious rollouts of a run, by the audit rules that need only traces.

    Suspicions().answer(shown)["rows"]

The most likely rollouts come first: those that were rewarded although they were cut off or said little, then all other
rewarded ones, then the rest. Rollouts for which the first call has no time are counted as `left` and checked in the
background.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import numpy as np

from treetune.audit import OF_ONE, OF_SCORED, RULES, SAME_TASKS, answer_and_truth, suspicions
from treetune.errors import TreetuneError
from treetune.runs.columns import Codes, Columns
from treetune.runs.run import Run
from treetune.view.run_list import ShownRun

SAME = "same-answer-paid"
_SAME_TRIED, _SAME_READ = 20, 50
"""How many answers are examined for this rule, and how many rollouts of each are read."""
_MOST_ROWS = 2000
_FEW_TOKENS = 4
_FIRST_SECONDS, _SLICE_SECONDS, _IDLE_SECONDS = 1.0, 0.2, 30.0


class SuspicionSearch:
    def __init__(self) -> None:
        self.asked = 0.0
        """When a page asked last."""
        self.is_running = False
        """Whether a thread continues the search."""
        self._begin(None)

    def _begin(self, columns: Columns | None) -> None:
        self._columns = columns
        self._order: Codes = np.zeros(0, np.int64)
        self._done = self._known = 0
        self._found: list[tuple[int, str, str]] = []
        self._same: list[tuple[int, str, str]] = []

    def search(self, run: Run, seconds: float) -> None:
        """Checks more of the rollouts, for about `seconds`."""
        until = time.monotonic() + seconds
        if self._columns is not run.columns:  # another file replaced the one that was searched
            self._begin(run.columns)
        if self._known < len(run):
            new = _order(run, self._known)
            self._order = np.concatenate([self._order[self._done :], new])
            self._done, self._known = 0, len(run)
            self._same = _same_answers(run)
        threshold = run.pass_threshold
        while self._done < len(self._order) and time.monotonic() < until:
            at = int(self._order[self._done])
            self._done += 1
            try:
                found = suspicions(run.trace_without_tokens(at), threshold)
            except TreetuneError:
                continue  # a damaged line proves nothing
            self._found += [(at, one.rule, one.found) for one in found]

    @property
    def left(self) -> int:
        return len(self._order) - self._done

    def answer(self, run: Run) -> dict[str, Any]:
        found = [*self._found, *self._same]
        counts = Counter(rule for _, rule, _ in found)
        rules = [
            {"rule": name, "means": RULES[name].expected, "remedy": RULES[name].remedy, "count": counts[name]}
            for name in (*OF_ONE, *OF_SCORED, SAME)
        ]
        left = self.left
        rows = [_row(run, *one) for one in sorted(found, key=lambda one: one[0])[:_MOST_ROWS]]
        return {"rules": rules, "rows": rows, "checked": len(run) - left, "left": left}


def _row(run: Run, at: int, rule: str, why: str) -> dict[str, Any]:
    entry = run.columns.entries[at]
    return {"at": at, "task": entry.idx, "rollout": entry.rollout, "rule": rule, "why": why, "reward": entry.reward}


def _order(run: Run, start: int) -> Codes:
    """The scored rollouts from `start` on, those first that may break a rule according to the index."""
    columns = run.columns
    paid, scored = run.solved(), ~np.isnan(columns.reward)
    outcomes = columns.texts("outcome")
    cut = columns.codes("outcome") == (outcomes.index("truncated") if "truncated" in outcomes else -2)
    little = (columns.numbers("tokens") <= _FEW_TOKENS) | (columns.codes("answer") < 0)
    likely = np.where(paid & (cut | little), 0, np.where(paid, 1, 2))
    rows = np.flatnonzero(scored)
    rows = rows[rows >= start]
    return rows[np.argsort(likely[rows], kind="stable")]


def _same_answers(run: Run) -> list[tuple[int, str, str]]:
    """Texts that solve several tasks with different right answers. Only texts that the index shows may be equal are
    read."""
    columns = run.columns
    answers, of_task = columns.codes("answer"), columns.groups().task
    tasks: dict[int, dict[int, int]] = defaultdict(dict)
    for at in np.flatnonzero(run.solved() & (answers >= 0)).tolist():
        tasks[int(answers[at])].setdefault(int(of_task[at]), at)
    found: list[tuple[int, str, str]] = []
    for by_task in sorted(tasks.values(), key=len, reverse=True)[:_SAME_TRIED]:
        if len(by_task) < SAME_TASKS:
            break
        by_text: dict[str, dict[str, int]] = defaultdict(dict)
        for at in list(by_task.values())[:_SAME_READ]:
            with suppress(TreetuneError):
                text, truth = answer_and_truth(run.trace_without_tokens(at))
                by_text[text].setdefault(truth, at)
        for text, truths in by_text.items():
            if len(truths) >= SAME_TASKS:
                why = f"{text[:60]!r} earns a reward on {len(truths)} tasks with different right answers"
                found += [(at, SAME, why) for at in truths.values()]
    return found


class Suspicions:
    """The searches of a list of runs. A search continues as long as pages ask for it."""

    def __init__(self) -> None:
        self._searches: dict[int, SuspicionSearch] = defaultdict(SuspicionSearch)

    def answer(self, shown: ShownRun) -> dict[str, Any]:
        search = self._searches[shown.id]
        search.asked = time.monotonic()
        with shown.open() as run:
            search.search(run, _FIRST_SECONDS)
            found = search.answer(run)
            if found["left"] and not search.is_running:
                search.is_running = True
                threading.Thread(target=_search_on, args=(search, shown), name="treetune view", daemon=True).start()
        return found


def _search_on(search: SuspicionSearch, shown: ShownRun) -> None:
    try:
        with suppress(TreetuneError):
            while search.left and time.monotonic() - search.asked < _IDLE_SECONDS:
                with shown.open(follow=False) as run:
                    search.search(run, _SLICE_SECONDS)
                time.sleep(_SLICE_SECONDS / 4)  # other threads need the run, too
    finally:
        search.is_running = False
