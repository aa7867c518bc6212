"""Compares two runs: pairs them by task and tests the difference against chance.

    found = compare(Run("runs/a"), Run("runs/b"))
    found.difference, found.p_value, found.broken

Tasks are paired by their uid, and equal tasks also by their occurrence. A task counts once, however many rollouts it
has. Failures have no reward: the difference is given over the scored rollouts, and over all rollouts, counting failed
ones as 0.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from treetune.core.fingerprint import config_differences
from treetune.errors import UsageError
from treetune.runs.run import Run

Key = tuple[str, int]
"""Identifies a task: its uid, and its occurrence among equal tasks."""
_NOT_COMPARED = ("max_concurrent", "endpoint", "num_tasks")
"""Keys of a config that do not change the result of a task."""
_FEWEST_TASKS = 6
"""With fewer tasks, no pattern of signs is rarer than one in 20."""
_SURE = 0.05
"""A p-value below this counts as more than chance."""
_EXACT, _DRAWN, _DRAWS, _SHUFFLES = 16, 64, 40_000, 10_000
_DETECTED = 1.959964 + 0.841621
"""The difference, in standard errors, that a test detects four times out of five."""
_ALMOST = 1e-12
"""Sums of the same numbers in different orders differ by less than this."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class TaskChange(msgspec.Struct):
    """A task that is in both runs."""

    uid: str
    occurrence: int
    task: int
    source: str
    before: float | None
    """The mean reward of its scored rollouts."""
    after: float | None
    solved_before: float
    """The share of its rollouts that solved it."""
    solved_after: float

    @property
    def change(self) -> float:
        """The change in the share of rollouts that solved it."""
        return self.solved_after - self.solved_before


class Difference(msgspec.Struct):
    """The difference between the mean rewards of two runs, over the tasks that both have."""

    tasks: int
    before: float
    after: float
    difference: float
    stderr: float | None
    p_value: float
    """The probability of a difference at least this large if nothing changed."""
    by: str
    """The units that the test permutes: the `tasks`, or their `rollouts` if there are few tasks."""
    detectable: float | None
    """The smallest difference that this many tasks detect four times out of five."""
    tasks_to_settle: int | None
    """How many tasks would detect this difference four times out of five; None if these do."""

    @property
    def significant(self) -> bool:
        return self.p_value < _SURE

    @property
    def is_loss(self) -> bool:
        return self.significant and self.difference < 0


class Comparison(msgspec.Struct):
    before: str
    after: str
    models: tuple[str, str]
    scored: Difference | None
    """The difference over the scored rollouts; None if no task was scored in both runs."""
    over_all: Difference
    """The difference with failed rollouts counted as 0."""
    sources: dict[str, Difference]
    """The difference over the scored rollouts of each source, if there are several sources."""
    fixed: list[TaskChange]
    """Tasks that are solved more often in the second run, the largest change first."""
    broken: list[TaskChange]
    unchanged: int
    only_before: int
    """Tasks that the other run does not have."""
    only_after: int
    config: list[str]
    """The differences between the two configs."""

    @property
    def is_loss(self) -> bool:
        """Whether the second run is worse by more than chance explains, over the scored rollouts or over all."""
        return self.over_all.is_loss or (self.scored is not None and self.scored.is_loss)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        seen = self.scored or self.over_all
        if self.over_all.is_loss and not seen.is_loss:
            return "The second is worse where failed rollouts count as 0: more of them failed."
        if seen.significant:
            return f"The second is {'better' if seen.difference > 0 else 'worse'}, by more than chance explains."
        if not seen.difference:
            return "No difference."
        sentence = "The difference may be chance"
        if seen.tasks_to_settle is not None:
            sentence += f": about {seen.tasks_to_settle:,} tasks would be needed to confirm one of this size"
        if seen.detectable is not None:
            sentence += f"; these {seen.tasks:,} can detect one of {seen.detectable:.3f}"
        return sentence + "."


class _TaskRollouts(msgspec.Struct):
    """The rollouts of one task in a run."""

    idx: int
    source: str
    rollouts: int
    scored: list[float]
    """The rewards of its scored rollouts."""
    solved: float

    @property
    def rewards(self) -> list[float]:
        """The rewards of all its rollouts, with failed ones counted as 0."""
        return self.scored + [0.0] * (self.rollouts - len(self.scored))


def _tasks(run: Run) -> dict[Key, _TaskRollouts]:
    columns, groups = run.columns, run.columns.groups()
    uids, sources = columns.texts("uid"), columns.texts("source")
    known = zip(
        *(columns.codes("uid")[groups.first].tolist(), columns.places("occurrence")[groups.first].tolist()),
        *(columns.numbers("task")[groups.first].tolist(), columns.codes("source")[groups.first].tolist()),
        *(groups.split(columns.reward, ~np.isnan(columns.reward)), groups.split(run.solved())),
        strict=True,
    )
    return {
        (uids[uid], occurrence): _TaskRollouts(
            int(idx), sources[source], len(solved), scored, sum(solved) / len(solved)
        )
        for uid, occurrence, idx, source, scored, solved in known
    }


def compare(before: Run, after: Run, only: Container[Key] | None = None) -> Comparison:
    """Compares two runs; `only` restricts it to these tasks."""
    return compare_tasks(before, after, only)[0]


def compare_tasks(before: Run, after: Run, only: Container[Key] | None = None) -> tuple[Comparison, list[TaskChange]]:
    """Like `compare`; also returns the change of every task that both runs have."""
    old, new = _tasks(before), _tasks(after)
    if only is not None:
        old, new = ({key: task for key, task in tasks.items() if key in only} for tasks in (old, new))
    common = [key for key in old if key in new]
    if not common:
        raise UsageError(
            f"{before.path} and {after.path} have no task in common", remedy="compare runs of the same tasks"
        )
    changes = [_change(key, old[key], new[key]) for key in common]
    pairs = {key: (old[key].scored, new[key].scored) for key in common if old[key].scored and new[key].scored}
    full = [(old[key].rewards, new[key].rewards) for key in common]
    over_scored = _difference(list(pairs.values())) if pairs else None
    over_all = over_scored if over_scored is not None and full == list(pairs.values()) else _difference(full)
    by_source: dict[str, list[Key]] = {}
    for key in pairs:
        by_source.setdefault(old[key].source, []).append(key)
    sources = sorted(by_source.items()) if len(by_source) > 1 else []
    comparison = Comparison(
        str(before.path),
        str(after.path),
        (before.model, after.model),
        over_scored,
        over_all,
        {name: _difference([pairs[key] for key in keys]) for name, keys in sources},
        sorted((task for task in changes if task.change > 0), key=lambda task: -task.change),
        sorted((task for task in changes if task.change < 0), key=lambda task: task.change),
        sum(task.change == 0 for task in changes),
        len(old) - len(common),
        len(new) - len(common),
        config_differences(_compared_keys(before), _compared_keys(after)),
    )
    return comparison, changes


def _compared_keys(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in _NOT_COMPARED}


def _change(key: Key, old: _TaskRollouts, new: _TaskRollouts) -> TaskChange:
    before, after = (_mean(task.scored) if task.scored else None for task in (old, new))
    return TaskChange(*key, new.idx, new.source, before, after, old.solved, new.solved)


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards)


def _difference(pairs: Sequence[tuple[list[float], list[float]]]) -> Difference:
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    before, after = (np.array([_mean(rewards) for rewards in side]) for side in (old, new))
    paired = Paired(after - before)
    many = len(paired) >= _FEWEST_TASKS
    p_value = paired.p_value if many else shuffled_p_value(old, new)
    settled = p_value < _SURE
    return Difference(
        len(paired),
        float(before.mean()),
        float(after.mean()),
        paired.mean,
        paired.stderr,
        p_value,
        "tasks" if many else "rollouts",
        paired.detectable,
        None if settled else paired.tasks_to_settle(),
    )


class Paired:
    """Tests whether the mean of paired differences is larger than chance explains, and how much data would settle it.

        Paired([0.0, 1.0, 0.5, ...]).p_value      # one difference for each task

    The test flips the sign of each difference: if nothing changed, both signs are equally likely. It is exact for few
    nonzero differences, drawn at random (with a fixed seed) for somewhat more, and normal for many. With too few tasks
    for that, the rollouts of each task swap sides instead (`shuffled_p_value`)."""

    def __init__(self, differences: Sequence[float] | Floats) -> None:
        self.differences = np.asarray(differences, np.float64)

    def __len__(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def stderr(self) -> float | None:
        if len(self) < 2:
            return None
        return float(self.differences.std(ddof=1) / math.sqrt(len(self)))

    @cached_property
    def p_value(self) -> float:
        """The probability of a mean at least this far from 0 if nothing changed."""
        changed = self.differences[self.differences != 0]
        if not len(changed):
            return 1.0
        seen = abs(changed.sum())
        if len(changed) <= _EXACT:
            return float((np.abs(_flip(changed)) >= seen - _ALMOST).mean())
        if len(changed) <= _DRAWN:
            drawn = np.zeros(_DRAWS)
            random = np.random.default_rng(0)
            for start in range(0, len(changed), 8):  # a random byte holds eight signs, which have 256 possible sums
                eight = changed[start : start + 8]
                drawn += _flip(eight)[random.integers(0, 2 ** len(eight), _DRAWS)]
            # The observed mean is one of the draws, so no p-value is 0.
            return float(((np.abs(drawn) >= seen - _ALMOST).sum() + 1) / (_DRAWS + 1))
        return math.erfc(seen / math.sqrt(2 * float(changed @ changed)))

    @property
    def detectable(self) -> float | None:
        """The smallest difference that this many tasks detect four times out of five."""
        return None if self.stderr is None else _DETECTED * self.stderr

    def tasks_to_settle(self) -> int | None:
        """How many tasks would detect this difference four times out of five; None if there is no difference."""
        if self.stderr is None or not self.mean:
            return None
        spread = float(self.differences.std(ddof=1))
        return max(2, math.ceil((_DETECTED * spread / self.mean) ** 2))


def _flip(differences: Floats) -> Floats:
    """The sums of the differences with every pattern of signs."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def shuffled_p_value(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """The p-value for few tasks: if nothing changed, each rollout of a task could belong to either run."""
    random = np.random.default_rng(0)
    seen, drawn = 0.0, np.zeros(_SHUFFLES)
    for old, new in zip(before, after, strict=True):
        pooled = np.array([*old, *new], np.float64)
        seen += pooled[len(old) :].mean() - pooled[: len(old)].mean()
        mixed = random.permuted(np.broadcast_to(pooled, (_SHUFFLES, len(pooled))), axis=1)
        drawn += mixed[:, len(old) :].mean(axis=1) - mixed[:, : len(old)].mean(axis=1)
    return float(((np.abs(drawn) >= abs(seen) - _ALMOST).sum() + 1) / (_SHUFFLES + 1))
