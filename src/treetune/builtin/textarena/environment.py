"""A game of textarena: the policy is player 0, all others are played by the opponent.

The policy is shown what is new since its last move. The reward is textarena's own, at the end of the game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from treetune.builtin.conversation import max_turns_of
from treetune.builtin.textarena.game import Game
from treetune.builtin.textarena.gold import gold_of
from treetune.environment import Action, Environment, Step
from treetune.errors import EnvironmentFault, described
from treetune.plugins import load_object
from treetune.task import Task

POLICY = 0
MAX_TURNS = 200
MOST_MOVES = 10_000
"""Of opponents between two of the policy: a game that passes it does not end by itself."""
BRACKETS = re.compile(r"\[[^\[\]\n]{1,60}\]")
"""How games write down the moves that there are."""


class TextArenaTask(Task, frozen=True, kw_only=True):
    game: str = ""
    """Its name in textarena."""
    seed: int = 0
    """What the game begins with."""
    players: int = 1
    opponent: str | list[str] = ""
    """Who plays the others: `random`, a list of moves, or `file.py:function`; nobody where there is one player."""
    params: dict[str, Any] = {}
    """The game's own settings."""


class TextArenaEnvironment(Environment):
    MULTI_TURN = True

    task: TextArenaTask

    def __init__(self, task: TextArenaTask) -> None:
        super().__init__(task)
        self._max_turns = max_turns_of(task, MAX_TURNS)
        self._turns = 0

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        if not isinstance(task, TextArenaTask):
            return None
        return gold_of(task.game, _game_of(task).env)

    def start(self) -> str:
        self._game = _game_of(self.task)
        self._opponent = Opponent(self._game, self.task)
        self._opponent.play()
        observed = self._game.read(POLICY)
        if isinstance(self.task.prompt, str) and observed != self.task.prompt:
            raise EnvironmentFault(
                f"{self.task.game} does not begin as it did when the task was made",
                remedy="use the same version of textarena; an opponent must draw only from the rng that it is given",
            )
        return observed

    def step(self, action: Action) -> Step:
        self._turns += 1
        game = self._game
        done = game.act(action.text) or self._opponent.play()
        if not done:
            last = self._turns >= self._max_turns
            return Step(game.read(POLICY) or "It is your turn.", done=last, truncated=last, info=self._info())
        self._opponent.refuse_forfeit()
        reason = str(game.about(POLICY).get("reason") or "")
        return Step(
            "\n".join(filter(None, [game.read(POLICY), reason])),
            reward=float(game.rewards.get(POLICY, 0.0)),
            done=True,
            info={**self._info(), "explanation": reason},
        )

    def _info(self) -> dict[str, Any]:
        return {"metrics": {"turns": self._turns}}

    async def close(self) -> None:
        return None


def first_observation(task: TextArenaTask) -> str:
    """What the policy sees first: a function of the task's fields."""
    game = _game_of(task)
    Opponent(game, task).play()
    return game.read(POLICY)


def _game_of(task: TextArenaTask) -> Game:
    return Game(task.game, seed=task.seed, players=task.players, params=task.params)


class Opponent:
    """Plays everybody but the policy."""

    def __init__(self, game: Game, task: TextArenaTask) -> None:
        self._game, self._spec = game, task.opponent
        self._rng = random.Random(f"opponent {task.seed}")
        self._seen: dict[int, list[str]] = {}
        """By player, what it was shown."""

    def play(self) -> bool:
        """Move until it is the policy's turn; True where the game is over before."""
        for _ in range(MOST_MOVES):
            if self._game.player == POLICY:
                return False
            seen = self._seen.setdefault(self._game.player, [])
            seen.append(self._game.read(self._game.player))
            if self._game.act(self._move(seen)):
                return True
        raise EnvironmentFault("the opponents play on without end", remedy="use another game or opponent")

    def refuse_forfeit(self) -> None:
        """A game that was won because an opponent broke the rules says nothing of the policy."""
        for player in range(1, self._game.players):
            if self._game.about(player).get("invalid_move"):
                raise EnvironmentFault(
                    f"player {player}, an opponent, lost by an invalid move: {self._game.about(player).get('reason')}",
                    remedy="give an opponent that keeps to the rules of the game",
                )

    def _move(self, seen: list[str]) -> str:
        if isinstance(self._spec, list):
            return self._first_allowed([self._spec])
        if self._spec == "random":
            # What was offered last is tried first; the rules at the beginning name moves too.
            return self._first_allowed([BRACKETS.findall(text) for text in reversed(seen)])
        return self._answer_of(load_opponent(self._spec), "\n".join(seen))

    def _first_allowed(self, offers: list[list[str]]) -> str:
        tried: set[str] = set()
        for offer in offers:
            moves = [move for move in dict.fromkeys(offer) if move not in tried]
            for move in self._rng.sample(moves, len(moves)):
                if self._game.allows(move):
                    return move
            tried.update(moves)
        raise EnvironmentFault(
            f"the opponent knows no valid move; tried: {', '.join(sorted(tried)) or 'none, for it is offered none'}",
            remedy="give the game's moves as a list, or a function: --taskset.opponent file.py:name",
        )

    def _answer_of(self, function: Callable[[str, random.Random], Any], observation: str) -> str:
        try:
            answer = function(observation, self._rng)
        except Exception as error:
            raise EnvironmentFault(f"the opponent {self._spec} failed: {described(error)}") from error
        if not isinstance(answer, str):
            raise EnvironmentFault(
                f"the opponent {self._spec} gave a {type(answer).__name__}", remedy="return the move as text"
            )
        return answer


def load_opponent(spec: str) -> Callable[[str, random.Random], Any]:
    """A function of what the player has seen so far and a random.Random that gives its move."""
    function = load_object(spec)
    if not callable(function):
        raise EnvironmentFault(f"{spec} is no function", remedy="write def opponent(observation, rng): return '[4]'")
    return function  # type: ignore[no-any-return]
