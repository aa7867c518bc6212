r"""Multiplication in several attempts: the number in \boxed{...}."""

import re

from treetune import Action, Contract, Environment, Step, Task
from treetune.core.environment import Kind, Stored, TaskRequirements

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class Multiply(Environment):
    """1 for the right product; until then it says what was wrong with an answer, `max_turns` times at the most."""

    REQUIREMENTS = TaskRequirements(
        about=r"Multiplication, answered with `\boxed{number}` in several attempts",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
    )
    CONTRACT = Contract(max_turns=5)

    @classmethod
    def gold(cls, task: Task) -> str:
        return f"It is \\boxed{{{task.ground_truth}}}."

    async def start(self) -> list[dict[str, str]]:
        self.turns = 0
        return self.task.messages

    async def step(self, action: Action) -> Step:
        self.turns += 1
        found = BOXED.findall(action.text)
        answer = found[-1].replace(",", "").strip() if found else None
        right = answer == str(self.task.ground_truth)
        last = self.turns >= self.task.extra_info.get("max_turns", 5)
        feedback = f"{answer} is not right. Try again." if found else r"Put your answer in \boxed{answer}."
        return Step(
            "" if right or last else feedback,
            reward=float(right),
            done=right or last,
            truncated=last and not right,
            info={"answer": answer, "success": right, "metrics": {"attempts": self.turns}},
        )
