"""What wins a game of textarena, for games whose state tells it.

    gold_of("GuessTheNumber-v0", game.env)    # ["[17]"]

It is there to see that episodes can be won, and none of it reaches the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def gold_of(name: str, env: Any) -> list[str] | None:
    """The moves, from the start of the game; None where they are not known."""
    find = FINDERS.get(name.partition("-")[0])
    return None if find is None else [f"[{move}]" for move in find(env)]


def _number(env: Any) -> list[str]:
    return [str(env.game_number)]


def _code(env: Any) -> list[str]:
    return [" ".join(map(str, env.state.game_state["secret_code"]))]


def _cup(env: Any) -> list[str]:
    return [str(env.ball_pos)]


def _word(env: Any) -> list[str]:
    return [str(env.state.game_state["secret_word"])]


def _best_candidate(env: Any) -> list[str]:
    draws = env.state.game_state["draws"]
    return ["continue"] * draws.index(max(draws)) + ["accept"]


def _grid(env: Any) -> list[str]:
    places = [(row, column) for row in range(9) for column in range(9)]
    return [
        f"{row + 1} {column + 1} {env.full_grid[row][column]}"
        for row, column in places
        if env.game_board[row][column] == 0
    ]


def _towers(env: Any) -> list[str]:
    def moved(count: int, source: str, target: str, spare: str) -> list[str]:
        if count == 0:
            return []
        before, after = moved(count - 1, source, spare, target), moved(count - 1, spare, target, source)
        return [*before, f"{source} {target}", *after]

    return moved(env.num_disks, "A", "C", "B")


FINDERS: dict[str, Callable[[Any], list[str]]] = {
    "GuessTheNumber": _number,
    "Mastermind": _code,
    "Secretary": _best_candidate,
    "Sudoku": _grid,
    "ThreeCardMonte": _cup,
    "TowerOfHanoi": _towers,
    "Wordle": _word,
}
