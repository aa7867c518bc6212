"""Alphabet sort: names arrive over several turns, the list must stay sorted. Finite, multi-turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from treetune.builtin.words.alphabet_sort_environment import AlphabetSortTask, sorted_so_far
from treetune.score import VALID, Verdict, invalid
from treetune.taskset import Taskset, TasksetConfig

_NAMES = [
    "Ada",
    "Alan",
    "Amara",
    "Anouk",
    "Bela",
    "Bruno",
    "Carla",
    "Chidi",
    "Dara",
    "Diego",
    "Edda",
    "Emre",
    "Farah",
    "Felix",
    "Greta",
    "Goran",
    "Hana",
    "Hugo",
    "Ines",
    "Ivo",
    "Jana",
    "Jomo",
    "Kaya",
    "Kofi",
    "Lena",
    "Luca",
    "Maja",
    "Musa",
    "Nadia",
    "Nils",
    "Olga",
    "Omar",
    "Paula",
    "Pia",
    "Quinn",
    "Rafi",
    "Rosa",
    "Sami",
    "Selma",
    "Tariq",
    "Tove",
    "Uma",
    "Ulf",
    "Vera",
    "Viktor",
    "Wanda",
    "Wim",
    "Xenia",
    "Yara",
    "Yusuf",
    "Zoe",
    "Zoran",
]


Positive = Annotated[int, msgspec.Meta(ge=1)]


class AlphabetSortConfig(TasksetConfig, frozen=True, kw_only=True):
    num_tasks: Positive = 100
    """How many tasks there are."""
    turns: Positive = 3
    """How many times names arrive."""
    names_per_turn: Positive = 3
    """How many names arrive each time."""
    seed: int = 0
    """Picks the names."""

    def __post_init__(self) -> None:
        if self.turns * self.names_per_turn > len(_NAMES):
            raise ValueError(f"turns x names_per_turn must be at most {len(_NAMES)}: no name comes twice")


class AlphabetSort(Taskset[AlphabetSortTask, AlphabetSortConfig]):
    def load_tasks(self) -> Iterator[AlphabetSortTask]:
        config = self.config
        drawn = random.Random(f"alphabet-sort {config.seed}")
        for _ in range(config.num_tasks):
            names = drawn.sample(_NAMES, config.turns * config.names_per_turn)
            starts = range(0, len(names), config.names_per_turn)
            rounds = [names[start : start + config.names_per_turn] for start in starts]
            yield AlphabetSortTask(env_class="alphabet-sort", ability="sorting", rounds=rounds)

    def gold(self, task: AlphabetSortTask) -> list[str]:
        return ["\n".join(sorted_so_far(task.rounds, turn)) for turn in range(len(task.rounds))]

    def validate(self, task: AlphabetSortTask) -> Verdict:
        names = [name for names in task.rounds for name in names]
        return VALID if len(set(names)) == len(names) else invalid("a name appears twice: two orders would be right")
