"""A difficulty curriculum: sums that grow harder as they are solved.

    treetune serve examples/curriculum.py:Sums --zmq tcp://127.0.0.1:5555

Each level has endless tasks of its own. The task at a position is fixed; the curriculum only chooses the next position,
so a task that was handed out is found again by its `idx`, and its whole state is a few numbers.
"""

from __future__ import annotations

from typing import Any

from treetune import Score, Task, Taskset
from treetune.builtin.arithmetic import Arithmetic, ArithmeticConfig

LEVELS = 5


class Sums(Taskset):
    INFINITE = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._levels = [Arithmetic(ArithmeticConfig(level=level + 1, seed=self.seed)) for level in range(LEVELS)]

    def task_at(self, index: int) -> Task:
        number, level = divmod(index, LEVELS)
        return self._levels[level].task_at(number)

    def reward(self, task: Task, answer: str) -> Score:
        return self._levels[0].reward(task, answer)

    def gold(self, task: Task) -> str:
        return str(task.ground_truth)

    def curriculum(self) -> Ladder:
        return Ladder()


class Ladder:
    """Moves one level up where the mean reward of the latest rollouts is high, and down where it is low."""

    def __init__(self) -> None:
        self.level = 0
        self.mean = 0.5
        self.drawn = [0] * LEVELS

    def draw(self, index: int) -> int:
        number = self.drawn[self.level]
        self.drawn[self.level] += 1
        return number * LEVELS + self.level

    def observe(self, task: Task, reward: float) -> None:
        if task.idx % LEVELS != self.level:
            return  # a late answer to a task of another level
        self.mean += 0.1 * (reward - self.mean)
        if self.mean > 0.8 and self.level < LEVELS - 1:
            self.level, self.mean = self.level + 1, 0.5
        elif self.mean < 0.2 and self.level > 0:
            self.level, self.mean = self.level - 1, 0.5

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "mean": self.mean, "drawn": list(self.drawn)}

    def restore(self, state: dict[str, Any]) -> None:
        self.level, self.mean, self.drawn = state["level"], state["mean"], list(state["drawn"])
