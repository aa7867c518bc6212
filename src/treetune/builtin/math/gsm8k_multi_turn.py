"""Grade-school math with several attempts, each scored.

    Task(prompt="2 + 3?", env_class="gsm8k_multi_turn", reward_spec={"ground_truth": "5"}, extra_info={"max_turns": 3})

A turn earns 1 for the right number, which ends the episode, 0.2 / max_turns for a wrong one in the right format, and 0
without `#### number`. The number is read and compared as in `gsm8k`.

Differences from skyrl-gym 0.4.0: those of `gsm8k`, and
- a row without `extra_info` has the usual five turns; there it is a KeyError.
- `max_turns` is the row's; there the trainer's setting, where there is one, replaces it.
"""

from __future__ import annotations

from treetune.builtin.conversation import Conversation, truth_texts
from treetune.builtin.math.gsm8k import final_number, gold_number
from treetune.contract import Contract, Kind, Stored
from treetune.environment import Action, Step
from treetune.task import Task

FORMAT_REWARD = 0.2
"""What all turns together earn for the format alone."""

_GO_ON = (
    "Please provide your step-by-step reasoning, "
    "and also include a tentative numeric answer at the end in the exact format: '#### ANSWER'."
)
_LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."


class Gsm8kMultiTurnEnvironment(Conversation):
    CONTRACT = Contract(
        about="Grade-school math in several attempts, each ending in `#### number`",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        pattern=r"-?[0-9.]+",
        needs={"extra_info": "may be empty, but not absent"},
        rewards="each turn: 1 right, 0.2 / max_turns well-formed, 0 otherwise",
        max_turns=5,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        return gold_number(cls.CONTRACT, task)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._truths = truth_texts(task.ground_truth)

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        answer = final_number(action.text)
        right = answer in self._truths
        if right:
            reward, explanation = 1.0, "right"
        elif answer is not None:
            reward, explanation = FORMAT_REWARD / self.max_turns, f"expected {self._truths[-1]}"
        else:
            reward, explanation = 0.0, "no `#### number`"
        done = right or last
        return Step(
            "" if done else _LAST if self.max_turns - self.turns == 1 else _GO_ON,
            reward=reward,
            done=done,
            truncated=last and not right,
            info={"answer": answer, "explanation": explanation, "success": right, "metrics": {"turns": self.turns}},
        )
