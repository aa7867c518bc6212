"""One game of textarena, with its own random numbers, and the moves that win it.

    game = TextArenaGame("TicTacToe-v0", seed=7, players=2, params={})
    game.player, game.read(0)    # whose turn it is; what player 0 has not seen yet
    game.act("[4]")              # True when the game is over

textarena's games draw from the global `random` (two from numpy's). Each call into a game swaps in that game's state and
then restores the previous state, so that neither side sees the other's draws. Only one game runs at a time.
"""

from __future__ import annotations

import copy
import importlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from treetune.errors import EnvironmentFault, MissingExtraError, TreetuneError

WAIT_SECONDS = 120.0
"""How many seconds a game waits for another one to return. Only a game that hangs takes that long."""


class TextArenaGame:
    def __init__(self, name: str, *, seed: int, players: int, params: dict[str, Any]) -> None:
        self._name = name
        self._random = _Random(seed)
        template = _load_template(name, msgspec.json.encode(params, order="sorted"))
        with self._random.use():
            # A copy of a game that was never played: some games do not reset fully a second time.
            self._env = _copy(template)
            self._env.reset(num_players=players, seed=seed)

    @property
    def env(self) -> Any:
        """textarena's own environment, without the wrappers that repeat the whole conversation in each observation."""
        return _unwrap(self._env)

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        return int(self.env.state.current_player_id)

    @property
    def players(self) -> int:
        return int(self.env.state.num_players)

    def info_of(self, player: int) -> Any:
        """Return what textarena reports about a player at the end: `reason`, `invalid_move`, `turn_count`."""
        return self.env.state.game_info.get(player, {})

    def read(self, player: int) -> str:
        """Return the text that a player has not seen yet, without the player's own words."""
        textarena, state = import_textarena(), self.env.state
        if player == self.player:
            with self._random.use():
                _, seen = self.env.get_observation()
        else:
            seen, state.observations[player] = state.observations.get(player, []), []
        if isinstance(seen, str):
            return seen
        lines = []
        for sender, message, kind in seen:
            if (sender, kind) != (player, textarena.ObservationType.PLAYER_ACTION):
                role = state.role_mapping.get(sender, f"Player {sender}")
                lines.append(str(message) if sender == textarena.GAME_ID else f"[{role}] {message}")
        return "\n".join(lines)

    def act(self, text: str) -> bool:
        """Play a move; return True if the game is over."""
        with self._random.use():
            done, _ = self._env.step(action=text)
        return bool(done)

    def allows(self, text: str) -> bool:
        """Whether the game accepts this as a valid move, tried on a copy."""
        trial = copy.copy(self)
        trial._random = copy.copy(self._random)
        trial._env = _copy(self._env)
        trial.env.state.set_invalid_move = None  # games call this to refuse a move; now it fails
        try:
            trial.act(text)
        except TreetuneError:
            raise
        except Exception:
            return False
        return True

    def find_gold(self) -> list[str] | None:
        """Return the moves that win, from the start; None if they are unknown. The policy never sees them."""
        find = GOLD.get(self._name.partition("-")[0])
        return None if find is None else [f"[{move}]" for move in find(self.env)]


def _pick_best(env: Any) -> list[str]:
    draws = env.state.game_state["draws"]
    return ["continue"] * draws.index(max(draws)) + ["accept"]


def _fill_grid(env: Any) -> list[str]:
    cells = [(row, column) for row in range(9) for column in range(9) if env.game_board[row][column] == 0]
    return [f"{row + 1} {column + 1} {env.full_grid[row][column]}" for row, column in cells]


def _move_tower(count: int, source: str, target: str, spare: str) -> list[str]:
    if count == 0:
        return []
    before, after = _move_tower(count - 1, source, spare, target), _move_tower(count - 1, spare, target, source)
    return [*before, f"{source} {target}", *after]


GOLD: dict[str, Callable[[Any], list[str]]] = {
    "GuessTheNumber": lambda env: [str(env.game_number)],
    "Mastermind": lambda env: [" ".join(map(str, env.state.game_state["secret_code"]))],
    "Secretary": _pick_best,
    "Sudoku": _fill_grid,
    "ThreeCardMonte": lambda env: [str(env.ball_pos)],
    "TowerOfHanoi": lambda env: _move_tower(env.num_disks, "A", "C", "B"),
    "Wordle": lambda env: [str(env.state.game_state["secret_word"])],
}
"""The way to win a game, read from its state."""


def _unwrap(env: Any) -> Any:
    while isinstance(env, import_textarena().Wrapper):
        env = env.env
    return env


def _copy(env: Any) -> Any:
    # The English dictionary is only read, and slow to copy.
    dictionary = vars(_unwrap(env)).get("dictionary")
    return copy.deepcopy(env, {id(dictionary): dictionary})


def import_textarena() -> Any:
    try:
        return importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        if error.name != "textarena":
            raise
        raise MissingExtraError.of("textarena", "textarena") from None


@lru_cache(maxsize=16)
def _load_template(name: str, params: bytes) -> Any:
    """Return a game that is never played; some read long word lists when they are created."""
    with _Random(0).use():
        return import_textarena().make(name, **msgspec.json.decode(params))


busy = threading.Lock()


class _Random:
    """The state of the global generators that belongs to one game."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    @contextmanager
    def use(self) -> Iterator[None]:
        # Both come with textarena.
        nltk: Any = importlib.import_module("nltk")
        numpy: Any = importlib.import_module("numpy").random
        if not busy.acquire(timeout=WAIT_SECONDS):
            why = f"another game of textarena has not returned for {WAIT_SECONDS:.0f} seconds"
            raise EnvironmentFault(why, remedy="a game that hangs blocks the others in its process; leave it out")
        download, before = nltk.download, (random.getstate(), numpy.get_state())
        try:
            # Each new game would download word lists, even existing ones. A missing list is an error instead.
            nltk.download = lambda *args, **kwargs: True
            random.setstate(self._python)
            numpy.set_state(self._numpy or numpy.RandomState(self._seed % 2**32).get_state())
            yield
        finally:
            self._python, self._numpy = random.getstate(), numpy.get_state()
            random.setstate(before[0])
            numpy.set_state(before[1])
            nltk.download = download
            busy.release()
