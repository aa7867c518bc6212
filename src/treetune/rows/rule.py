"""The rule reward: does the answer say what the ground truth says?

The answer is the line after `####`, else what `\\boxed{...}` holds, else, for a number, the last number of the text,
else the whole text; `treetune.answers` has the details. A reply with several different answers earns nothing. Numbers
are compared as numbers (1,000 equals 1000.0); of several ground truths any will do.
"""

from __future__ import annotations

from typing import Any

from treetune.answers import final_number, final_text, read_truth, same, spoken
from treetune.score import UNCHECKED, VALID, Score, Verdict
from treetune.taskset import ConfigT, Taskset, TaskT

RULE = "rule"
"""How a row says that it is scored so: its `scorer`."""


def score(answer: str, ground_truth: Any) -> Score:
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    reply = spoken(answer)
    found = final_number(reply) if all(read_truth(truth) is not None for truth in truths) else final_text(reply)
    right = found.text is not None and any(same(found.text, truth) for truth in truths)
    expected = f"expected {' or '.join(str(truth) for truth in truths)}"
    return Score(float(right), answer=found.text, explanation="right" if right else found.why or expected)


class RuleTaskset(Taskset[TaskT, ConfigT]):
    """A taskset whose answers are scored by the rule."""

    def reward(self, task: TaskT, answer: str) -> Any:
        if task.ground_truth is None:
            return super().reward(task, answer)
        return score(answer, task.ground_truth)

    def gold(self, task: TaskT) -> Any:
        if task.env_class is not None:
            return super().gold(task)
        truth = task.ground_truth
        any_truth = truth[0] if isinstance(truth, list) and truth else truth
        return None if any_truth is None else str(any_truth)

    def validate(self, task: TaskT) -> Verdict:
        return VALID if task.ground_truth is not None and task.messages else UNCHECKED
