"""Grade-school math, one answer: the number after `####` against the ground truth.

    Task(prompt="2 + 3?", env_class="gsm8k", reward_spec={"ground_truth": "5"})   # "#### 5" earns 1

The number is read as skyrl-gym's strict method reads it: the first `#### ` (four signs, one space) that digits, dots,
commas or a minus follow; commas are dropped and the rest is compared as text. So a ground truth in text has no
thousands separators: "1000", not "1,000".

Differences from skyrl-gym 0.4.0:
- a number as ground truth is compared as its text (42.0 also as `42`); there it scores 0 for ever.
- any other ground truth (a list, null) is a fault that says so; there it scores 0 for ever.
"""

from __future__ import annotations

import re

from treetune.builtin.conversation import Conversation, truth_texts
from treetune.contract import Contract, Kind, Stored
from treetune.environment import Action, Observation, Step
from treetune.task import Task

_NOTHING = Observation()
_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


class Gsm8kEnvironment(Conversation):
    CONTRACT = Contract(
        about="Grade-school math in one answer that ends in `#### number`",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        pattern=r"-?[0-9.]+",
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        return gold_number(cls.CONTRACT, task)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._truths = truth_texts(task.ground_truth)

    async def step(self, action: Action) -> Step:
        answer = final_number(action.text)
        if answer is None:
            return Step(_NOTHING, 0.0, True, {"explanation": "no `#### number`", "success": False})
        right = answer in self._truths
        explanation = "right" if right else f"expected {self._truths[-1]}"
        return Step(_NOTHING, float(right), True, {"answer": answer, "explanation": explanation, "success": right})


def final_number(text: str) -> str | None:
    found = _NUMBER.search(text)
    return found[1].replace(",", "") if found else None


def gold_number(contract: Contract, task: Task) -> str | None:
    """The line that a ground truth is answered with, unless it is none."""
    return None if contract.problem(task.ground_truth) else f"#### {truth_texts(task.ground_truth)[-1]}"
