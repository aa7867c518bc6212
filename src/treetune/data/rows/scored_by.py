"""ScoredBy says what scores a row's task. A row holds it as text, in `extra_info.scorer`.

| kind | text |
|---|---|
| `rule` | `rule` |
| `scorer` | `{"scorer":{"kind":"includes"}}` |
| `environment` | `env:gsm8k` |
| `taskset` | `{"id":"my_tasks:Colours","level":2}` |

It is made when tasks are read, by `ScoredBy.read` or `scored_by(taskset, task)`, and used when they are scored, by
`taskset_of`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import msgspec

from treetune.config.interpolation import mark_variables
from treetune.core.task import Task
from treetune.errors import TasksetError
from treetune.scorers.scorer import Rule, Scorer, kind_named

FORMS = 'write text: rule, env:NAME, a scorer as {"scorer": {"kind": ...}}, or a taskset as JSON'

_ENVIRONMENT, _SCORER = "env:", '{"scorer":'

_METHODS = {kind: kind for kind in ("choice", "code", "exact", "f1", "includes", "json", "math", "number")}
_METHODS |= {"math_verify": "math", "math-verify": "math"}
"""The scorer kind that a method names, for all kinds that need no keys. Any other method means the rule."""


class ScoredBy(msgspec.Struct, frozen=True):
    kind: Literal["rule", "scorer", "environment", "taskset"]
    value: str = ""
    """The name of the environment, or the scorer or taskset as JSON."""

    @classmethod
    def read(cls, text: Any) -> ScoredBy | None:
        """Parse the text of a row. Returns None if it holds none."""
        if text is not None and not isinstance(text, str):
            raise TasksetError(f"a row has a scorer that is no text: {text!r:.80}", remedy=FORMS)
        return _read(text) if text else None

    @classmethod
    def of_scorer(cls, scorer: Scorer) -> ScoredBy:
        plain = mark_variables(msgspec.to_builtins(scorer.without_files()))
        if plain == {"kind": "rule"}:
            return BY_RULE
        return cls("scorer", msgspec.json.encode({"scorer": plain}).decode())

    @property
    def text(self) -> str:
        """The text form that a row holds."""
        if self.kind == "rule":
            return "rule"
        return f"{_ENVIRONMENT}{self.value}" if self.kind == "environment" else self.value

    @property
    def by_scorer(self) -> bool:
        """Whether the task is scored by a scorer or the rule, which compare one answer with the ground truth."""
        return self.kind in ("rule", "scorer")


BY_RULE = ScoredBy("rule")


@lru_cache(maxsize=256)
def _read(text: str) -> ScoredBy:
    if text == BY_RULE.text:
        return BY_RULE
    if text.startswith(_ENVIRONMENT):
        return ScoredBy("environment", text.removeprefix(_ENVIRONMENT))
    return ScoredBy("scorer" if text.startswith(_SCORER) else "taskset", text)


def scored_by_row(task: Task) -> ScoredBy | None:
    """Return what scores a row's task, if that follows from its other columns."""
    if task.env_class is not None:
        return ScoredBy("environment", task.env_class)
    if task.ground_truth is None:
        return None
    return ScoredBy.of_scorer(scorer_of_method(task.reward_spec.get("method")) or Rule())


def scorer_of_method(method: Any) -> Scorer | None:
    """Return the scorer that a row's `reward_spec.method` or a config's `reward_method` names; None means the rule."""
    return _scorer_of_method(method) if isinstance(method, str) and method in _METHODS else None


@lru_cache(maxsize=256)
def _scorer_of_method(method: str) -> Scorer:
    return kind_named(_METHODS[method])()
