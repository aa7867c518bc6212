"""The metrics of a server: plain counters on the hot path, rendered for Prometheus and `treetune top` on request.

    metrics.count_request("sample", seconds)
    metrics.stats()                                   # for `treetune top`
    metrics.render()                                  # for Prometheus

Objects of prometheus_client are created only on request, because counting with them is slower.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.serve.host import Scored
from treetune.system import prometheus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

BOUNDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
"""The upper bounds of the latency buckets, in seconds."""
RECENT = 60
"""How many recent rewards the page at `/` shows."""

COUNTS = {
    "stragglers": "Rollouts cancelled because their group was complete",
    "groups_without_variance": "Groups for which different rewards were requested, but whose rewards were all the same",
    "dropped_groups": "Groups with equal rewards that were dropped",
    "refilled_groups": "Groups with equal rewards that were repeated",
    "marked_stale": "Rollouts that ended with weights too far ahead, and were marked",
    "pauses": "Pauses of a model",
    "expired_pauses": "Pauses that expired",
    "aborted_calls": "Model calls aborted by a pause or by the model's server",
}
"""Counters for the options of asynchronous trainers. Stale rollouts are counted as the outcome `stale`."""


class SourceCounts(msgspec.Struct):
    """The outcomes and rewards of one source's rollouts and episodes."""

    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    scored: int = 0
    rewards: float = 0.0
    """The sum of the rewards."""

    def add(self, one: Scored) -> None:
        self.outcomes[one.outcome] += 1
        if one.reward is not None:
            self.scored += 1
            self.rewards += one.reward

    @property
    def mean_reward(self) -> float | None:
        return self.rewards / self.scored if self.scored else None


class Metrics:
    def __init__(self, gauges: Callable[[], dict[str, float]]) -> None:
        """`gauges` returns current values: `in_flight`, `queue`, `workers`, and the cursors as `cursor:NAME`."""
        self.gauges = gauges
        self.began = time.time()
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.malformed = 0
        self.sources: Counter[str] = Counter()
        """Tasks handed out, by source."""
        self.ended: defaultdict[str, SourceCounts] = defaultdict(SourceCounts)
        """Finished rollouts and episodes, by source."""
        self.recent: deque[tuple[str, str, float | None]] = deque(maxlen=RECENT)
        """The most recent ones: source, outcome and reward."""
        self.counts: Counter[str] = Counter()
        """Effects of trainers' requests: stragglers, pauses, dropped groups."""
        self._reported: dict[str, SourceCounts] = {}
        """The counts that the log has already reported."""
        self.buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
        """The number of requests in each bucket, by method."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def count_request(self, method: str, seconds: float, kind: str | None = None) -> None:
        self.requests[method] += 1
        self.buckets[method][bisect_left(BOUNDS, seconds)] += 1
        self.seconds[method] += seconds
        if kind is not None:
            self.errors[kind] += 1

    def count_scored(self, scored: Iterable[Scored]) -> None:
        for one in scored:
            self.ended[one.source].add(one)
            self.recent.append((one.source, one.outcome, one.reward))

    @property
    def outcomes(self) -> Counter[str]:
        return sum((ended.outcomes for ended in self.ended.values()), Counter())

    def report_ended(self) -> list[str]:
        """Describes what has ended since the last report, with one line per source."""
        lines = []
        for source, ended in self.ended.items():
            reported = self._reported.get(source, SourceCounts())
            if news := ended.outcomes - reported.outcomes:
                scored = ended.scored - reported.scored
                outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(news.items()))
                mean = f", mean reward {(ended.rewards - reported.rewards) / scored:.3f}" if scored else ""
                lines.append(f"{source}: {news.total()} ended ({outcomes}){mean}")
                self._reported[source] = SourceCounts(Counter(ended.outcomes), ended.scored, ended.rewards)
        return lines

    def stats(self) -> dict[str, Any]:
        """All metrics as plain values."""
        served, scored = sum(self.sources.values()), sum(ended.scored for ended in self.ended.values())
        return {
            "uptime": time.time() - self.began,
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "malformed": self.malformed,
            "outcomes": dict(self.outcomes),
            "mean_reward": sum(ended.rewards for ended in self.ended.values()) / scored if scored else None,
            "recent": [dict(zip(("source", "outcome", "reward"), one, strict=True)) for one in self.recent],
            "counts": dict(self.counts),
            "sources": {
                name: {
                    "tasks": self.sources[name],
                    "share": self.sources[name] / max(1, served),
                    "mean_reward": self.ended[name].mean_reward if name in self.ended else None,
                    "outcomes": dict(self.ended[name].outcomes) if name in self.ended else {},
                }
                for name in dict.fromkeys([*self.sources, *self.ended])
            },
            "seconds": dict(self.seconds),
            **self.gauges(),
        }

    def render(self) -> bytes:
        """All metrics as text for Prometheus."""
        return prometheus.render(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics as objects of prometheus_client."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        outcomes = {
            (source, outcome): count
            for source, ended in self.ended.items()
            for outcome, count in ended.outcomes.items()
        }
        counts = {source: ended.scored for source, ended in self.ended.items()}
        sums = {source: ended.rewards for source, ended in self.ended.items()}
        counters: list[tuple[str, str, Mapping[Any, float], str]] = [
            ("requests", "method", self.requests, "Requests answered"),
            ("errors", "kind", self.errors, "Requests answered with an error, by its kind"),
            ("tasks", "source", self.sources, "Tasks handed out, by their source"),
            ("rollouts", "source outcome", outcomes, "Rollouts and episodes that ended, by source and outcome"),
            ("reward_count", "source", counts, "Scored rollouts and episodes, by source"),
            ("reward_sum", "source", sums, "The sum of rewards, by source"),
        ]
        for name, labels, values, what in counters:
            family = CounterMetricFamily(f"treetune_{name}", what, labels=labels.split())
            for key, count in values.items():
                family.add_metric([key] if isinstance(key, str) else list(key), count)
            yield family
        for name, what in COUNTS.items():
            yield CounterMetricFamily(f"treetune_{name}", what, self.counts[name])
        yield GaugeMetricFamily("treetune_uptime", "Seconds since the server started", time.time() - self.began)
        yield CounterMetricFamily(
            "treetune_malformed", "Messages dropped because no request could be read", self.malformed
        )
        latency = HistogramMetricFamily("treetune_seconds", "Seconds from a request to its answer", labels=["method"])
        for method, counted in self.buckets.items():
            buckets = zip([*map(str, BOUNDS), "+Inf"], accumulate(counted), strict=True)
            latency.add_metric([method], list(buckets), self.seconds[method])
        yield latency
        cursors = GaugeMetricFamily("treetune_cursor", "The next index of each stream", labels=["stream"])
        for name, value in self.gauges().items():
            if name.startswith("cursor:"):
                cursors.add_metric([name.removeprefix("cursor:")], value)
            else:
                yield GaugeMetricFamily(f"treetune_{name}", name.replace("_", " "), value)
        yield cursors
