"""The summary of a run: mean, standard error, pass@k, per metric, per outcome, per data source.

A failed rollout has no reward. Means are given twice: over the scored rollouts, and over all, with failed ones counted
as 0. If the two differ, the summary warns that the policy may cause the failures.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from treetune.core.trace import Trace

MOST_WARNINGS = 5
"""How many kinds of failures and warnings a summary names."""


class SourceSummary(msgspec.Struct):
    tasks: int
    """The number of different tasks."""
    rollouts: int
    """The number of rollouts."""
    mean_reward: float | None
    """The mean over scored rollouts."""
    mean_reward_all: float | None
    """The mean over all rollouts, with failed ones counted as 0."""
    scored: int
    """The number of rollouts that have a reward."""


class Summary(msgspec.Struct):
    mean_reward: float | None
    """The mean over scored rollouts; None if there are none."""
    mean_reward_all: float | None
    """The mean over all rollouts, with failed ones counted as 0."""
    stderr: float | None
    """The standard error of `mean_reward`, with the rollouts of a task as one cluster."""
    pass_at_k: dict[str, float]
    """The chance that at least one of k rollouts of a task solves it, over scored rollouts."""
    pass_at_k_all: dict[str, float]
    """The same over all rollouts, with failed ones counted as not solved."""
    tasks: int
    """The number of different tasks."""
    rollouts: int
    """The number of rollouts, including failed ones."""
    scored: int
    """The number of rollouts that have a reward."""
    outcomes: dict[str, int]
    """The number of rollouts with each outcome."""
    metrics: dict[str, float]
    """The mean of each metric over the rollouts that have it."""
    data_sources: dict[str, SourceSummary]
    """The same figures for each data source."""
    prompt_tokens: int
    """The tokens of the model's prompts, over all rollouts."""
    completion_tokens: int
    """The tokens that the model sampled, over all rollouts."""
    judge_calls: int
    """The number of judge calls, including repetitions after an unreadable verdict."""
    judge_cache_hits: int
    """Calls answered by the cache, which cost nothing."""
    judge_prompt_tokens: int
    """The prompt tokens of judges, without cached calls."""
    judge_completion_tokens: int
    """The tokens that judges sampled, without cached calls."""
    retries: int
    """How often calls of the model or of judges were retried: 429, 5xx, a dropped connection, a timeout."""
    stopped: str | None
    """The limit that ended the run before all its rollouts had started."""
    seconds_per_rollout: float | None
    """The mean duration of a rollout, including waiting."""
    warnings: list[str]
    """Reasons to doubt the figures, the most common first."""

    @property
    def errors(self) -> int:
        return self.rollouts - self.scored


class TaskTally(msgspec.Struct):
    """The part of one task's rollouts that the summary needs."""

    source: str
    rollouts: int = 0
    rewards: list[float] = []
    passes: list[bool] = []

    @property
    def all_passes(self) -> list[bool]:
        return self.passes + [False] * (self.rollouts - len(self.passes))


_SUMS = (
    *("prompt_tokens", "completion_tokens", "judge_calls", "judge_cache_hits", "judge_prompt_tokens"),
    *("judge_completion_tokens", "retries"),
)
"""The figures of a summary that are sums over its rollouts."""


class Tally:
    """Collects traces one by one and keeps only what the summary needs."""

    def __init__(self, pass_threshold: float = 1.0) -> None:
        self._threshold = pass_threshold
        self._tasks: dict[tuple[str, int], TaskTally] = {}
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._outcomes: Counter[str] = Counter()
        self._sums = dict.fromkeys(_SUMS, 0)
        self._seconds = self._reward_sum = 0.0
        self._uncounted_judge_calls = 0
        self.stopped: str | None = None
        """Why no more rollouts are started."""
        self.notes: list[str] = []
        """Warnings about damaged records."""
        self._failures: Counter[str] = Counter()
        self._said: dict[str, str] = {}
        """The message of the first failure of each kind."""
        self._warnings: Counter[str] = Counter()
        self.rollouts = self.scored = 0
        self.expected: int | None = None
        """The expected number of rollouts, once it is known."""

    def add(self, trace: Trace) -> None:
        task = self._tasks.setdefault((trace.uid, trace.occurrence), TaskTally(trace.task.data_source))
        task.rollouts += 1
        self.rollouts += 1
        self._outcomes[trace.outcome.value] += 1
        self._seconds += trace.timing.total
        sums = self._sums
        sums["prompt_tokens"] += trace.usage.prompt_tokens
        sums["completion_tokens"] += trace.usage.completion_tokens
        sums["retries"] += trace.all_retries
        self._warnings.update(trace.warnings)
        self._add_judgements(trace)
        if trace.failure is not None:
            kind = _describe(trace)
            self._failures[kind] += 1
            if kind not in self._said:
                self._said[kind] = trace.failure.brief
        if trace.reward is None:
            return
        self.scored += 1
        self._reward_sum += trace.reward
        task.rewards.append(trace.reward)
        task.passes.append(trace.passed(self._threshold))
        for name, value in trace.metrics.items():
            self._metrics[name].append(value)

    def _add_judgements(self, trace: Trace) -> None:
        sums = self._sums
        sums["judge_calls"] += len(trace.judgements)
        for judgement in trace.judgements:
            if judgement.cached:
                sums["judge_cache_hits"] += 1
                continue
            usage = judgement.usage
            sums["judge_prompt_tokens"] += usage.prompt_tokens
            sums["judge_completion_tokens"] += usage.completion_tokens
            self._uncounted_judge_calls += bool(judgement.answer) and not (
                usage.prompt_tokens + usage.completion_tokens
            )

    @property
    def retries(self) -> int:
        return self._sums["retries"]

    @property
    def judge_tokens(self) -> int:
        return self._sums["judge_prompt_tokens"] + self._sums["judge_completion_tokens"]

    @property
    def tokens_total(self) -> int:
        return self._sums["prompt_tokens"] + self._sums["completion_tokens"] + self.judge_tokens

    @property
    def mean_reward(self) -> float | None:
        return self._reward_sum / self.scored if self.scored else None

    @property
    def mean_reward_all(self) -> float | None:
        return self._reward_sum / self.rollouts if self.rollouts else None

    @property
    def errors(self) -> int:
        return self.rollouts - self.scored

    def _list_warnings(self) -> list[str]:
        found = list(self.notes)
        if self.mean_reward != self.mean_reward_all:
            means = f"{_figure(self.mean_reward)} over the scored, {_figure(self.mean_reward_all)} over all"
            found.append(f"{self.errors} of {self.rollouts} rollouts have no reward: the mean is {means}")
        if self._uncounted_judge_calls:
            calls = f"{self._uncounted_judge_calls} calls of judges did not report how many tokens they took"
            found.append(f"{calls}: no limit counts them")
        for kind, count in self._failures.most_common(MOST_WARNINGS):
            found.append(f"{count} x {kind}: {self._said[kind]}".removesuffix(": "))
        return found + [f"{count} x {text}" for text, count in self._warnings.most_common(MOST_WARNINGS)]

    def summary(self) -> Summary:
        scored = [task for task in self._tasks.values() if task.rewards]
        by_source: dict[str, list[TaskTally]] = defaultdict(list)
        for task in self._tasks.values():
            by_source[task.source].append(task)
        return Summary(
            mean_reward=self.mean_reward,
            mean_reward_all=self.mean_reward_all,
            stderr=standard_error([task.rewards for task in scored]),
            pass_at_k=pass_at_k([task.passes for task in scored]),
            pass_at_k_all=pass_at_k([task.all_passes for task in self._tasks.values()]),
            tasks=len(self._tasks),
            rollouts=self.rollouts,
            scored=self.scored,
            outcomes=dict(sorted(self._outcomes.items())),
            metrics={name: sum(values) / len(values) for name, values in sorted(self._metrics.items())},
            data_sources={source: _summarise_source(tasks) for source, tasks in sorted(by_source.items())},
            **self._sums,
            stopped=self.stopped,
            seconds_per_rollout=self._seconds / self.rollouts if self.rollouts else None,
            warnings=self._list_warnings(),
        )


def _summarise_source(tasks: Sequence[TaskTally]) -> SourceSummary:
    rewards = [reward for task in tasks for reward in task.rewards]
    rollouts = sum(task.rollouts for task in tasks)
    mean = sum(rewards) / len(rewards) if rewards else None
    return SourceSummary(len(tasks), rollouts, mean, sum(rewards) / rollouts if rollouts else None, len(rewards))


def _describe(trace: Trace) -> str:
    """The kind of a failure, which is the same for similar failures."""
    assert trace.failure is not None
    where = f" at {trace.failure.place}" if trace.failure.place else ""
    return f"{trace.outcome.value} ({trace.failure.phase}): {trace.failure.type}{where}"


def _figure(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.4f}"


def standard_error(clusters: Sequence[Sequence[float]]) -> float | None:
    """The standard error of the mean over all values. Rollouts of one task are not independent, so tasks are the
    clusters; with a single task, its rollouts are the clusters."""
    if len(clusters) == 1:
        clusters = [[value] for value in clusters[0]]
    number = len(clusters)
    if number < 2:
        return None
    total = sum(len(cluster) for cluster in clusters)
    mean = sum(map(sum, clusters)) / total
    spread = sum((sum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters)
    return math.sqrt(number / (number - 1) * spread) / total


def pass_at_k(tries: Sequence[Sequence[bool]]) -> dict[str, float]:
    """The unbiased estimate for k = 1, 2, 4, ..., up to the number of scored rollouts that every task has."""
    fewest = min(map(len, tries), default=0)
    estimates: dict[str, float] = {}
    for k in (2**power for power in range(fewest.bit_length())):
        chances = [1 - math.comb(len(task) - sum(task), k) / math.comb(len(task), k) for task in tries]
        estimates[str(k)] = sum(chances) / len(chances)
    return estimates
