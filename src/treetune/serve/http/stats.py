"""The figures of a task server over HTTP, as `EnvClient.stats` gives them over ZMQ: read from its `/metrics`.

stats = await read_stats(HttpTransport("http://127.0.0.1:5000"))
"""

from __future__ import annotations

from typing import Any

from treetune.errors import MissingExtraError
from treetune.serve.errors import ServeError
from treetune.serve.http.client import INFO
from treetune.serve.http.transport import HttpTransport

METRICS = "/metrics"

_COUNTED = {"requests": "requests", "errors": "errors", "rollouts": "outcomes", "tasks": "tasks"}
"""What Prometheus calls counters by label, and what they are called here."""


async def read_stats(link: HttpTransport, seconds: float = 10.0) -> dict[str, Any]:
    info = (await link.ask("GET", INFO, None, seconds)).read(dict[str, Any])
    answer = await link.ask("GET", METRICS, None, seconds)
    if answer.status == 404:
        raise ServeError(f"{link.url} shows no {METRICS}", remedy="`treetune serve TARGET --http :PORT` does")
    if not answer.good:
        raise answer.error()
    return {"name": str(info.get("name", link.url)), **stats_of(answer.body.decode())}


def stats_of(text: str) -> dict[str, Any]:
    """The figures in a text for Prometheus."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingExtraError.of("prometheus_client", "serve") from None

    counts: dict[str, dict[str, Any]] = {name: {} for name in [*_COUNTED.values(), "seconds", "sums", "scored"]}
    gauges: dict[str, Any] = {"malformed": 0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("treetune_").removesuffix("_total")
            label = next(iter(sample.labels.values()), None)
            if name in _COUNTED and label is not None:
                counts[_COUNTED[name]][label] = int(sample.value)
            elif name == "seconds_sum" and label is not None:
                counts["seconds"][label] = sample.value
            elif name in ("reward_sum", "reward_count") and label is not None:
                counts["sums" if name == "reward_sum" else "scored"][label] = sample.value
            elif name == "cursor":
                gauges[f"cursor:{label}"] = int(sample.value)
            elif label is None:
                gauges[name] = sample.value if name == "uptime" else int(sample.value)
    tasks, sums, scored = counts.pop("tasks"), counts.pop("sums"), counts.pop("scored")
    sources = {
        name: {
            "tasks": count,
            "share": count / sum(tasks.values()),
            "mean_reward": sums[name] / scored[name] if scored.get(name) else None,
        }
        for name, count in tasks.items()
    }
    return {**counts, "sources": sources, **gauges}
