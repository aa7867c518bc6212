"""Drawing 5 of 1,000 textarena episodes, beside building all. Run: python -m benchmarks.textarena_episodes

Not called textarena.py: a script's own folder comes first where modules are looked for.
"""

from __future__ import annotations

from functools import partial

from benchmarks.measure import cost, show
from treetune import Task, build_taskset

GAMES = ("Sudoku-v0", "FrozenLake-v0", "Minesweeper-v0")


def lazily(game: str) -> list[Task]:
    return build_taskset({"id": "textarena", "game": game, "num_tasks": 1000}).select_tasks(5)


def eagerly(game: str) -> list[Task]:
    return list(build_taskset({"id": "textarena", "game": game, "num_tasks": 1000}))[:5]


def main() -> None:
    for game in GAMES:
        assert lazily(game) == eagerly(game), "the five are identical"
        ours, all_of_them = cost(partial(lazily, game)), cost(partial(eagerly, game), repeat=1)
        show(f"{game}: 5 of 1,000 episodes", ours, "build all, take 5", all_of_them, target="80x less")


if __name__ == "__main__":
    main()
