"""The figures of a run, for the list of runs and for the run's own page. Pure functions of its columns.

    overview(run)["mean"], details(run)["sources"]

JSON has no NaN, so unknown values are None.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from treetune.config.structs import defaults_of, dump_yaml
from treetune.config.trust import CONFIG, FINGERPRINT
from treetune.core.fingerprint import find_differences
from treetune.evaluation import EvalConfig
from treetune.runs.columns import Codes, Columns, Mask, Numbers
from treetune.runs.plain_files import UNREADABLE, read_regular
from treetune.runs.run import Run, read_summary
from treetune.runs.summary import pass_at_k, standard_error
from treetune.system.digest import digest

_SLICES = 24
_BINS = 20
_MOST_TURNS = 40
_MOST_ON_TIMELINE = 2000
_MOST_FAILURES = 50
FLAGS = {"all 0": "all0", "all 1": "all1", "mixed": "mixed", "failed": "failed"}
"""The flags of groups, with the names that the pages use for them."""


def plain(value: Any) -> Any:
    """Converts a number to one that JSON can hold; None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def mean_of(values: Numbers) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def first_of(values: Numbers) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.min()) if len(values) else None


def overview(run: Run) -> dict[str, Any]:
    """The line of a run in the list of runs."""
    about = {"taskset": run.taskset, "model": run.model, "fingerprint": _fingerprint(run)}
    return {**about, **_overview(run.columns, run.solved())}


def _overview(columns: Columns, solved: Mask) -> dict[str, Any]:
    groups, reward = columns.groups(), columns.reward
    scored = ~np.isnan(reward)
    began = first_of(columns.numbers("began"))
    return {
        "mean": mean_of(reward),
        "stderr": standard_error(list(filter(None, groups.split(reward, scored)))),
        "pass_at": pass_at_k(list(filter(None, groups.split(solved, scored)))),
        "tasks": len(groups),
        "rollouts": len(columns),
        "scored": int(scored.sum()),
        "outcomes": _count(columns, "outcome"),
        "prompt_tokens": int(np.nansum(columns.numbers("prompt_tokens"))),
        "completion_tokens": int(np.nansum(columns.numbers("tokens"))),
        "retries": int(np.nansum(columns.numbers("retries"))),
        "seconds": None
        if began is None
        else plain(np.nanmax(columns.numbers("began") + columns.numbers("seconds")) - began),
        "began": began,
        "spark": [mean_of(part) for part in np.array_split(reward, min(_SLICES, len(reward)) or 1) if len(part)],
        "steps": bool((~np.isnan(columns.numbers("step"))).any()),
        "metrics": columns.metrics,
    }


def _fingerprint(run: Run) -> str | None:
    """A fingerprint that is equal for two runs with the same taskset, by its code, config and data."""
    try:
        return digest(msgspec.json.decode(read_regular(run.folder / FINGERPRINT))["taskset"], 4)
    except (OSError, KeyError, TypeError, *UNREADABLE):
        return None


def _count(columns: Columns, name: str) -> dict[str, int]:
    texts = columns.texts(name)
    counts = np.bincount(columns.codes(name) + 1, minlength=len(texts) + 1)[1:]
    return {text: int(count) for text, count in sorted(zip(texts, counts, strict=True)) if count}


def details(run: Run) -> dict[str, Any]:
    """The figures on the page of a run that are not in the list."""
    columns, summary, flags = run.columns, read_summary(run.folder), Counter(run.groups().flags())
    return {
        **_config(run),
        "warnings": [*run.warnings, *(summary.warnings if summary is not None else ())],
        "histogram": _histogram(columns.reward),
        "sources": _sources(columns),
        "metrics": [_metric(name, columns.numbers(name)[~np.isnan(columns.reward)]) for name in columns.metrics],
        "by_turns": _by_turns(columns),
        "by_tokens": _by_tokens(columns),
        "timeline": timeline(columns),
        "failures": _failures(columns),
        "steps": steps_of(columns),
        "group_flags": {**{name: flags[flag] for flag, name in FLAGS.items()}, "other": flags["same"]},
    }


def _config(run: Run) -> dict[str, Any]:
    try:
        text = read_regular(run.folder / CONFIG).decode(errors="replace")
    except OSError:
        return {"config": dump_yaml(run.config) if run.config else "", "overridden": {}}
    changed = find_differences(defaults_of(EvalConfig), run.config)
    overridden = {path: value for path, _, value in changed if value not in (None, [], {})}
    return {"config": text, "overridden": overridden}


def _histogram(reward: Numbers) -> dict[str, list[float]]:
    reward = reward[~np.isnan(reward)]
    if not len(reward):
        return {"edges": [], "counts": []}
    low, high = min(0.0, float(reward.min())), max(1.0, float(reward.max()))
    counts, edges = np.histogram(reward, _BINS, (low, high))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _sources(columns: Columns) -> list[dict[str, Any]]:
    groups, codes = columns.groups(), columns.codes("source")
    reward = columns.reward
    found = []
    for code, name in enumerate(columns.texts("source")):
        own = codes == code
        scored = own & ~np.isnan(reward)
        tasks = np.unique(groups.task[own])
        clusters = list(filter(None, groups.split(reward, scored)))
        found.append(
            {
                "name": name,
                "tasks": len(tasks),
                "rollouts": int(own.sum()),
                "scored": int(scored.sum()),
                "mean": mean_of(reward[own]),
                "stderr": standard_error(clusters),
            }
        )
    return sorted(found, key=lambda source: str(source["name"]))


def _metric(name: str, values: Numbers) -> dict[str, Any]:
    values = values[~np.isnan(values)]
    low, high = (plain(values.min()), plain(values.max())) if len(values) else (None, None)
    return {"name": name, "mean": mean_of(values), "count": len(values), "low": low, "high": high}


def _by_turns(columns: Columns) -> list[dict[str, Any]]:
    numbers, places = np.unique(columns.numbers("turns"), return_inverse=True)
    found = zip(numbers.tolist(), *_means(places, columns.reward, len(numbers)), strict=True)
    return [{"turns": int(turns), "rollouts": count, "mean": mean} for turns, count, mean in found][:_MOST_TURNS]


def _by_tokens(columns: Columns) -> list[dict[str, Any]]:
    """The mean reward by tokens, in up to ten bins with about the same number of rollouts."""
    tokens = columns.numbers("tokens")
    if not len(tokens) or not tokens.max():
        return []
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, 11), method="nearest"))
    lows, highs = (edges[:-1], edges[1:]) if len(edges) > 1 else (edges, edges)
    means = _means(np.searchsorted(lows, tokens, side="right") - 1, columns.reward, len(lows))
    found = zip(lows.tolist(), highs.tolist(), *means, strict=True)
    return [{"low": low, "high": high, "rollouts": count, "mean": mean} for low, high, count, mean in found]


def timeline(columns: Columns) -> list[dict[str, Any]]:
    """The start of each rollout, in seconds after the first, and its duration; an even sample if there are many."""
    number = len(columns)
    if not number:
        return []
    chosen = sorted({number * part // min(number, _MOST_ON_TIMELINE) for part in range(min(number, _MOST_ON_TIMELINE))})
    names = ("began", "seconds", "reward", "retries", "policy", "environment")
    numbers = {name: columns.numbers(name)[chosen] for name in names}
    first = first_of(columns.numbers("began"))
    numbers["began"] = numbers["began"] - (first or 0.0)
    outcomes, texts = columns.codes("outcome")[chosen], columns.texts("outcome")
    lines = zip(*(map(plain, numbers[name].tolist()) for name in names), strict=True)
    return [
        {"at": at, "outcome": texts[outcome], **dict(zip(names, line, strict=True))}
        for at, outcome, line in zip(chosen, outcomes.tolist(), lines, strict=True)
    ]


def _failures(columns: Columns) -> list[dict[str, Any]]:
    codes, texts = columns.codes("failure"), columns.texts("failure")
    outcomes, names = columns.codes("outcome"), columns.texts("outcome")
    found = []
    for code, count in Counter(codes[codes >= 0].tolist()).most_common(_MOST_FAILURES):
        at = int(np.argmax(codes == code))
        found.append({"failure": texts[code], "count": count, "at": at, "outcome": names[outcomes[at]]})
    return found


def steps_of(columns: Columns) -> list[dict[str, Any]]:
    """The mean reward at each step of a training, and the mean of each source."""
    step, reward = columns.numbers("step"), columns.reward
    known = ~np.isnan(step)
    if not known.any():
        return []
    steps, places = np.unique(step[known], return_inverse=True)
    sources, names = columns.codes("source")[known], columns.texts("source")
    reward = reward[known]
    of_source = {
        name: _means(places[sources == code], reward[sources == code], len(steps))[1] for code, name in enumerate(names)
    }
    return [
        {
            "step": int(step),
            "rollouts": count,
            "mean": mean,
            "sources": {name: means[at] for name, means in of_source.items() if means[at] is not None},
        }
        for at, (step, count, mean) in enumerate(zip(steps, *_means(places, reward, len(steps)), strict=True))
    ]


def _means(places: Codes, reward: Numbers, number: int) -> tuple[list[int], list[float | None]]:
    """The number of rollouts for each value of `places`, and their mean reward."""
    scored = ~np.isnan(reward)
    counts = np.bincount(places[scored], minlength=number)
    sums = np.bincount(places[scored], reward[scored], minlength=number)
    means = [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    return np.bincount(places, minlength=number).tolist(), means


NOTHING = {"taskset": "", "model": "", "fingerprint": None, **_overview(Columns(), np.zeros(0, bool))}
"""The overview of a run about which nothing is known."""
