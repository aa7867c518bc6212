"""A server in figures: counted as plain numbers on the hot path, shown to Prometheus and `treetune top` when asked.

    metrics.count_request("sample", seconds)
    metrics.stats()                                   # for `treetune top`
    metrics.render()                                  # for Prometheus

Objects of prometheus_client are made only when it asks: they cost more to count with.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from treetune.serve.host import Scored

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

BOUNDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
"""Seconds up to which each bucket of the latencies goes."""


class Metrics:
    def __init__(self, gauges: Callable[[], dict[str, float]]) -> None:
        """`gauges` gives what is so now: `in_flight`, `queue`, `workers`, and the cursors as `cursor:NAME`."""
        self.gauges = gauges
        self.began = time.time()
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.malformed = 0
        self.sources: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.rewards: dict[str, list[float]] = {}
        """By source: how many were scored, and the sum of their rewards."""
        self.buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
        """By method: how many took so long."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def count_request(self, method: str, seconds: float, kind: str | None = None) -> None:
        self.requests[method] += 1
        self.buckets[method][bisect_left(BOUNDS, seconds)] += 1
        self.seconds[method] += seconds
        if kind is not None:
            self.errors[kind] += 1

    def count_scored(self, traces: Iterable[Scored]) -> None:
        for trace in traces:
            self.outcomes[trace.outcome] += 1
            if trace.reward is not None:
                sums = self.rewards.setdefault(trace.source, [0, 0.0])
                sums[0] += 1
                sums[1] += trace.reward

    def stats(self) -> dict[str, Any]:
        """All of it, as plain values."""
        served = sum(self.sources.values())
        return {
            "uptime": time.time() - self.began,
            "requests": dict(self.requests),
            "errors": dict(self.errors),
            "malformed": self.malformed,
            "outcomes": dict(self.outcomes),
            "sources": {
                name: {"tasks": count, "share": count / served, "mean_reward": self._mean_reward(name)}
                for name, count in self.sources.items()
            },
            "seconds": dict(self.seconds),
            **self.gauges(),
        }

    def _mean_reward(self, source: str) -> float | None:
        count, total = self.rewards.get(source, (0, 0.0))
        return total / count if count else None

    def render(self) -> bytes:
        """All of it, as text for Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        counts, sums = ({source: reward[part] for source, reward in self.rewards.items()} for part in (0, 1))
        for name, label, values, what in (
            ("requests", "method", self.requests, "Requests answered"),
            ("errors", "kind", self.errors, "Requests answered with an error, by its kind"),
            ("tasks", "source", self.sources, "Tasks handed out, by their source"),
            ("rollouts", "outcome", self.outcomes, "Rollouts ended, by their outcome"),
            ("reward_count", "source", counts, "Scored rollouts, by source"),
            ("reward_sum", "source", sums, "The sum of rewards, by source"),
        ):
            family = CounterMetricFamily(f"treetune_{name}", what, labels=[label])
            for key, count in values.items():
                family.add_metric([key], count)
            yield family
        yield GaugeMetricFamily("treetune_uptime", "Seconds since the server began", time.time() - self.began)
        yield CounterMetricFamily("treetune_malformed", "Messages dropped: no request could be read", self.malformed)
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
