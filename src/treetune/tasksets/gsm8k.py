"""Grade-school math: the number after `####` against the ground truth, in one answer or in several attempts.

    Task(prompt="2 + 3?", env_class="gsm8k", ground_truth="5")   # "#### 5" earns 1
    Task(prompt="2 + 3?", env_class="gsm8k_multi_turn", ground_truth="5", extra_info={"max_turns": 3})

The number after the last `####` counts, with or without a unit (`$5`, `5%`, `5 apples`), and is compared as a number. A
reply with several different answers earns nothing. With `extra_info.strict: false`, it is read as in skyrl-gym's strict
method: the first `#### ` followed by digits, dots, commas or a minus, compared as text without commas.
"""

from __future__ import annotations

import re

import msgspec

from treetune.core.contract import Contract
from treetune.core.environment import Action, Kind, Step, Stored, TaskRequirements
from treetune.core.task import Task
from treetune.errors import EnvironmentFault
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import read_amount, read_truth
from treetune.scorers.reading.statements import Extraction
from treetune.scorers.scorer import explain
from treetune.tasksets.turns import TurnEnvironment, list_answers

FORMAT_REWARD = 0.2
"""The total reward of all turns of a multi-turn episode for the format alone."""
_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_GO_ON = (
    "Please provide your step-by-step reasoning, "
    "and also include a tentative numeric answer at the end in the exact format: '#### ANSWER'."
)
_LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."


class Gsm8kEnvironment(TurnEnvironment):
    REQUIREMENTS = TaskRequirements(
        about="Grade-school math in one answer that ends in `#### number`",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        pattern=r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)",
    )

    ANSWER = AnswerFormat(hash=True)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._answers = list_answers(task.ground_truth)
        self._value = read_truth(self._answers[0])
        if self._value is None and self.strict:
            why = f"{task.env_class}: the ground truth {self._answers[0]!r:.60} is not a number, so no answer is right"
            raise EnvironmentFault(why, remedy="write the number alone, such as 72, or leave the row out")

    async def step(self, action: Action) -> Step:
        answer, right, explanation = self.judge(action.text)
        return self.end(float(right), explanation, answer=answer)

    def judge(self, text: str) -> tuple[str | None, bool, str]:
        """Return the number in a text, whether it is right, and if not why."""
        if self.strict:
            return self.compare(extract(text, self.ANSWER, read_amount))
        found = _NUMBER.search(text)
        if found is None:
            return None, False, "no `#### number`"
        answer = found[1].replace(",", "")
        right = answer in self._answers
        return answer, right, "right" if right else f"expected {self._answers[0]}"

    def compare(self, found: Extraction) -> tuple[str | None, bool, str]:
        if found.text is None:
            return None, False, found.why
        right = found.value == self._value
        return found.text, right, explain(found, "" if right else f"expected {self._answers[0]}")


class Gsm8kMultiTurnEnvironment(Gsm8kEnvironment):
    """Grade-school math in several attempts.

    The right number earns 1 and ends the episode. A wrong one in the right format earns 0.2 / max_turns, a turn without
    `#### number` earns 0.
    """

    REQUIREMENTS = msgspec.structs.replace(
        Gsm8kEnvironment.REQUIREMENTS,
        about="Grade-school math in several attempts, each ending in `#### number`",
        needs={"extra_info": "may be empty, but not absent"},
        rewards="each turn: 1 right, 0.2 / max_turns well-formed, 0 otherwise",
    )
    CONTRACT = Contract(max_turns=5)

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        answer, right, explanation = self.judge(action.text)
        done = right or last
        return Step(
            "" if done else _LAST if self.max_turns - self.turns == 1 else _GO_ON,
            reward=1.0 if right else 0.0 if answer is None else FORMAT_REWARD / self.max_turns,
            done=done,
            truncated=last and not right,
            info={"answer": answer, "explanation": explanation, "success": right, "metrics": {"turns": self.turns}},
        )
