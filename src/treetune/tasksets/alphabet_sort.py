"""Alphabet sort: names arrive over several turns, the list must stay sorted. Finite, multi-turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from treetune.core.contract import Contract
from treetune.core.environment import Action, Step
from treetune.core.score import VALID, Verdict, invalid
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.scorers.reading.statements import strip_thinking
from treetune.scorers.reading.wording import list_items
from treetune.tasksets.turns import Positive, TurnEnvironment, part_of_one

NAMES = """
Ada Alan Amara Anouk Bela Bruno Carla Chidi Dara Diego Edda Emre Farah Felix Greta Goran Hana Hugo
Ines Ivo Jana Jomo Kaya Kofi Lena Luca Maja Musa Nadia Nils Olga Omar Paula Pia Quinn Rafi Rosa Sami
Selma Tariq Tove Uma Ulf Vera Viktor Wanda Wim Xenia Yara Yusuf Zoe Zoran
""".split()


class AlphabetSortTask(Task, frozen=True, kw_only=True):
    rounds: list[list[str]] = []
    """The names that arrive in each turn."""


class AlphabetSortConfig(TasksetConfig, frozen=True, kw_only=True):
    num_tasks: Positive = 100
    """The number of tasks."""
    turns: Positive = 3
    """How many times names arrive."""
    names_per_turn: Positive = 3
    """How many names arrive each time."""
    seed: int = 0
    """The seed that picks the names."""

    def __post_init__(self) -> None:
        if self.turns * self.names_per_turn > len(NAMES):
            raise ValueError(f"turns x names_per_turn must be at most {len(NAMES)}: no name appears twice")


class AlphabetSort(Taskset[AlphabetSortTask, AlphabetSortConfig]):
    def load_tasks(self) -> Iterator[AlphabetSortTask]:
        config = self.config
        rng = random.Random(f"alphabet-sort {config.seed}")
        for _ in range(config.num_tasks):
            names = rng.sample(NAMES, config.turns * config.names_per_turn)
            starts = range(0, len(names), config.names_per_turn)
            rounds = [names[start : start + config.names_per_turn] for start in starts]
            yield AlphabetSortTask(env_class="alphabet-sort", ability="sorting", rounds=rounds)

    def validate(self, task: AlphabetSortTask) -> Verdict:
        names = [name for names in task.rounds for name in names]
        return VALID if len(set(names)) == len(names) else invalid("a name appears twice: two orders would be right")


class AlphabetSortEnvironment(TurnEnvironment):
    CONTRACT = Contract()  # as many turns as a task has rounds
    MULTI_TURN = True

    task: AlphabetSortTask

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        rounds = getattr(task, "rounds", None) or []
        return ["\n".join(sort_names(rounds, turn)) for turn in range(len(rounds))] or None

    async def start(self) -> str:
        names = "\n".join(self.task.rounds[0])
        return f"Sort these names alphabetically. Answer with the sorted list only, one name per line.\n\n{names}"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._right = 0

    async def step(self, action: Action) -> Step:
        rounds = self.task.rounds
        expected = sort_names(rounds, self.turns)
        given = list_items(strip_thinking(action.text))
        right = given == expected
        self._right += right
        self.next_turn()
        done = self.turns == len(rounds)
        said = "" if done else "Add these names to the list and sort it again:\n\n" + "\n".join(rounds[self.turns])
        explanation = "in order" if right else f"expected {', '.join(expected)}"
        metrics = {f"turn_{self.turns}_right": float(right)}
        info: dict[str, Any] = {"answer": ", ".join(given), "explanation": explanation, "metrics": metrics}
        if done:
            info["success"] = self._right == len(rounds)
        return Step(said, part_of_one(self._right, len(rounds)) if right else 0.0, done, info)


def sort_names(rounds: list[list[str]], turn: int) -> list[str]:
    """Return all names that have arrived by a turn."""
    return sorted(name for names in rounds[: turn + 1] for name in names)
