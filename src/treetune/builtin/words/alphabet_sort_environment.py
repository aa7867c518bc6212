"""Keep a growing list of names in alphabetical order, over several turns."""

from __future__ import annotations

from treetune.environment import Action, Environment, Step
from treetune.task import Task


class AlphabetSortTask(Task, frozen=True, kw_only=True):
    rounds: list[list[str]] = []
    """The names that arrive in each turn."""


class AlphabetSortEnvironment(Environment):
    MULTI_TURN = True

    task: AlphabetSortTask

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        rounds = getattr(task, "rounds", None) or []
        return ["\n".join(sorted_so_far(rounds, turn)) for turn in range(len(rounds))] or None

    def __init__(self, task: AlphabetSortTask) -> None:
        super().__init__(task)
        self._turn = 0

    async def start(self) -> str:
        return "Sort these names alphabetically. Answer with the sorted list only, one name per line.\n\n" + "\n".join(
            self.task.rounds[0]
        )

    async def step(self, action: Action) -> Step:
        rounds = self.task.rounds
        expected = sorted_so_far(rounds, self._turn)
        given = [line.strip() for line in action.text.splitlines() if line.strip()]
        right = given == expected
        self._turn += 1
        done = self._turn == len(rounds)
        return Step(
            "" if done else "Add these names to the list and sort it again:\n\n" + "\n".join(rounds[self._turn]),
            reward=right / len(rounds),
            done=done,
            info={
                "answer": ", ".join(given),
                "explanation": "in order" if right else f"expected {', '.join(expected)}",
                "metrics": {f"turn_{self._turn}_right": float(right)},
            },
        )


def sorted_so_far(rounds: list[list[str]], turn: int) -> list[str]:
    return sorted(name for names in rounds[: turn + 1] for name in names)
