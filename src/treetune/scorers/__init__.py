"""Scorers compute the reward of an answer. They are the same in YAML, in rows and in Python.

    from treetune.scorers import choice, includes

    class Capitals(Taskset):
        scorer = includes()

In YAML: `scorer: includes`, or `scorer: {kind: number, tolerance: 0.01}`. See docs/scoring.md for all kinds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from treetune.scorers.scorer import KINDS, make_scorer
from treetune.scorers.scorer import Scorer as Scorer
from treetune.scorers.scorer import read_scorer as read_scorer


def __getattr__(name: str) -> Any:
    """Return a function that makes a scorer: `includes(answer={"after": "####"})`, with keys as in YAML."""
    if name not in KINDS:
        raise AttributeError(f"module 'treetune.scorers' has no attribute {name!r}")
    return partial(make_scorer, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *KINDS])
