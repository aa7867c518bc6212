"""RuleTaskset: answers are scored by the taskset's scorer or, where it has none, by the rule."""

from __future__ import annotations

from typing import Any

from treetune.core.draws import ConfigT, TaskT
from treetune.core.score import UNCHECKED, VALID, Verdict, invalid
from treetune.core.taskset import Taskset
from treetune.scorers.scorer import Rule

RULE = "rule"
"""How a row says that the rule scores it: its `scorer`."""


class RuleTaskset(Taskset[TaskT, ConfigT]):
    """A taskset whose answers are scored by the rule, unless it has a scorer."""

    def reward(self, task: TaskT, answer: str) -> Any:
        if self.scorer is not None or task.ground_truth is None:
            return super().reward(task, answer)
        return _RULE.score(answer, task.ground_truth)

    @property
    def asks_scorer(self) -> bool:
        return type(self).reward in (RuleTaskset.reward, Taskset.reward)

    def gold(self, task: TaskT) -> Any:
        if task.env_class is not None or self.scorer is not None:
            return super().gold(task)
        return _RULE.gold(task.ground_truth)

    def validate(self, task: TaskT) -> Verdict:
        if self.scorer is not None and task.env_class is None:
            problem = self.scorer.problem(task.ground_truth, task)
            return VALID if problem is None else invalid(f"the ground truth {problem}")
        return VALID if task.ground_truth is not None and task.messages else UNCHECKED


_RULE = Rule()
