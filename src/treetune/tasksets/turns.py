"""What built-in environments share: a checked ground truth, a turn count, the last step, and small functions.

    async def step(self, action):       # of a TurnEnvironment
        last = self.next_turn()
        right = action.text == self.task.ground_truth
        return self.end(float(right), "repeated", answer=action.text) if right or last else Step("Again!")

`start` and `close` are coroutines, so that an environment that only compares text needs no thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from treetune.core.contract import Contract
from treetune.core.environment import Environment, Step, TaskRequirements
from treetune.core.task import Task
from treetune.errors import EnvironmentFault
from treetune.system.threads import call, limit_to_cores

Positive = Annotated[int, msgspec.Meta(ge=1)]


class TurnEnvironment(Environment):
    """Shows the task's prompt, then takes one answer per turn, for at most `max_turns` turns."""

    CONTRACT = Contract(max_turns=1)

    @classmethod
    def gold(cls, task: Task) -> str | list[str] | None:
        if cls.REQUIREMENTS is None or cls.ANSWER is None:
            return None
        try:
            return str(cls.ANSWER.fill(list_answers(require_truth(task, cls.REQUIREMENTS))[0]))
        except EnvironmentFault:
            return None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if self.REQUIREMENTS is not None:
            require_truth(task, self.REQUIREMENTS)
        self.strict = is_strict(task)
        self.turns = 0
        self.said: list[str] = []
        """The texts of the turns that `take_turn` counted."""
        self.max_turns = self.CONTRACT.of_task(task).turns

    async def start(self) -> Any:
        if self.REQUIREMENTS is not None and self.REQUIREMENTS.sandbox:
            from treetune.sandbox import require  # here, because only environments that run code need it

            async with limit_to_cores():
                await call(require)
        return self.task.messages

    def next_turn(self) -> bool:
        """Count a turn; return True if it is the last."""
        self.turns += 1
        return self.turns >= self.max_turns

    def take_turn(self, text: str, tag: str) -> tuple[bool, bool]:
        """Count a turn and store its text. Return whether the text has the tag that ends the episode, and whether this
        turn is the last."""
        self.said.append(text)
        over = self.next_turn()
        answered = f"<{tag}>" in text and f"</{tag}>" in text
        return answered, answered or over

    def end(
        self,
        reward: float,
        explanation: str,
        *,
        observation: str = "",
        answer: Any = None,
        truncated: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> Step:
        """Return the last step; it is a success if the reward is 1."""
        info: dict[str, Any] = {"answer": answer, "explanation": explanation, "success": reward == 1.0}
        if metrics is not None:
            info["metrics"] = metrics
        return Step(observation, reward, True, info, truncated)

    async def close(self) -> None:
        return None


def require_truth(task: Task, requirements: TaskRequirements) -> Any:
    """Return the ground truth, if it is of a kind that the requirements accept; otherwise raise."""
    problem = requirements.problem(task.ground_truth)
    if problem is not None:
        remedy = f"set reward_spec.ground_truth to {' or '.join(requirements.takes)}"
        raise EnvironmentFault(f"{task.env_class}: the ground truth {problem}", remedy=remedy)
    return task.ground_truth


def list_answers(truth: Any) -> list[str]:
    """Return the texts that may answer a ground truth, the usual one first: 42.0 is `42` and `42.0`."""
    if isinstance(truth, int | float):
        return [str(int(truth)), str(truth)] if float(truth).is_integer() else [str(truth)]
    answers = truth.get("target") if isinstance(truth, dict) else truth
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(answer, str) for answer in answers):
        remedy = 'write "Paris", ["Paris", "paris"] or {"target": ["Paris"]}'
        raise EnvironmentFault(f"the ground truth must contain texts, got {answers!r:.100}", remedy=remedy)
    return list(answers)


def is_strict(task: Task) -> bool:
    """Whether answers are read as everywhere in Treetune; `extra_info.strict: false` reads them as skyrl-gym does."""
    strict = task.extra_info.get("strict", True)
    if not isinstance(strict, bool):
        raise EnvironmentFault(f"extra_info.strict is {strict!r}", remedy="write true or false, or leave it out")
    return strict


def part_of_one(number: int, total: int) -> float:
    """Return what the n-th of `total` equal parts adds to those before it. Their sum is exactly 1: six times 1/6 is
    0.9999999999999999."""
    return number / total - (number - 1) / total


def hash_number(text: str) -> int:
    """Return 64 bits derived from a text such as `SEED/INDEX`. Never add the two: seed 7 at index i + 1 must not equal
    seed 8 at index i."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
