"""Profiles for tests: pass rates that are known, and how far draws are from what a schedule promises."""

from __future__ import annotations

import json
import math
from collections import Counter


def write_rates(path, rates, column="avg@8_m", **further):
    """A profile with a pass rate for each uid."""
    path.write_text("".join(json.dumps({"uid": uid, column: rate, **further}) + "\n" for uid, rate in rates.items()))
    return str(path)


def total_variation(drawn, target):
    """Between what was drawn and the shares that were promised."""
    counts, total = Counter(drawn), len(drawn)
    return sum(abs(counts[key] / total - target.get(key, 0.0)) for key in counts.keys() | target.keys()) / 2


def gaussian_target(rates, draws, *, start, end, width, over):
    """The share of each pass rate in the first draws of a Gaussian schedule, worked out draw by draw."""
    target = Counter()
    for index in range(draws):
        mean = start + (end - start) * min(1, index / over)
        weights = {rate: math.exp(-(((rate - mean) / width) ** 2) / 2) for rate in rates}
        whole = sum(weights.values()) * draws
        for rate, weight in weights.items():
            target[rate] += weight / whole
    return target
