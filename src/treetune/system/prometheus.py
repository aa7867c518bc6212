"""Writes figures as text for Prometheus. Its package is loaded only on request, because counting with it is slower."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


def render(collector: Collector) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class Figures:
    """Plain figures: `render(Figures("treetune_gateway", gauges, counts))`."""

    def __init__(self, prefix: str, gauges: dict[str, int], counts: dict[str, int]) -> None:
        self.prefix, self.gauges, self.counts = prefix, gauges, counts

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self.gauges.items():
            yield GaugeMetricFamily(f"{self.prefix}_{name}", name.replace("_", " "), value)
        for name, count in self.counts.items():
            yield CounterMetricFamily(f"{self.prefix}_{name}", name.replace("_", " "), count)
