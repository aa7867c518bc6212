"""textarena: seeded episodes of any of its games, built one by one as they are drawn (extra `textarena`).

    treetune eval textarena --taskset.game Sudoku-v0 -m scripted:gold -n 5
    treetune eval textarena --taskset.game TicTacToe-v0 --taskset.opponent random -m MODEL -n 100

Single-player games are played directly. In others, the policy is player 0, and an opponent plays the rest. The policy
sees only what is new since its last move. The reward is textarena's own, at the end of the game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treetune.config.code_reference import parse_reference
from treetune.config.plugins import absolute_spec, load_object
from treetune.config.structs import CodeName
from treetune.config.trust import Origin, current_origin
from treetune.core.contract import Contract
from treetune.core.environment import Action, Step
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import (
    ConfigError,
    EnvironmentFault,
    InvalidAction,
    TasksetError,
    TreetuneError,
    UnknownNameError,
    format_error,
)
from treetune.tasksets.textarena import TextArenaGame, import_textarena
from treetune.tasksets.turns import Positive, TurnEnvironment, hash_number

POLICY = 0
MOST_PLAYERS = 15
MOST_MOVES = 10_000
"""The maximum number of opponents' moves between two moves of the policy. A game with more moves does not end by
itself."""
BRACKETS = re.compile(r"\[[^\[\]\n]{1,60}\]")
"""How games write the possible moves."""
REMEDY = (
    "install or set what it needs (data of nltk: python -m nltk.downloader NAME, or copy it and set NLTK_DATA; after "
    "a SyntaxError: a newer Python), or use another game"
)


class TextArenaTask(Task, frozen=True, kw_only=True):
    game: str = ""
    """The game's name in textarena."""
    seed: int = 0
    """The seed of the game."""
    players: int = 1
    opponent: str | list[str] = ""
    """Who plays the others: `random`, a list of moves, or `file.py:function`; empty for one player."""
    params: dict[str, Any] = {}
    """The game's own settings."""


class TextArenaEnvironment(TurnEnvironment):
    CONTRACT = Contract(max_turns=200)

    task: TextArenaTask

    def __init__(self, task: TextArenaTask) -> None:
        super().__init__(task)
        self._origin = current_origin()  # the origin of the opponent that the task names

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        return _make_game(task).find_gold() if isinstance(task, TextArenaTask) else None

    def start(self) -> Any:  # neither start nor step is async: they run in a thread
        """Start a game that depends only on the task's fields."""
        self.game = _make_game(self.task)
        self._opponent = Opponent(self.game, self.task, self._origin)
        self._opponent.play()
        observed = self.game.read(POLICY)
        if isinstance(self.task.prompt, str) and observed != self.task.prompt:
            why = f"{self.task.game} does not begin as it did when the task was made"
            raise EnvironmentFault(why, remedy="use the same textarena; an opponent must draw from the given rng only")
        return observed

    def step(self, action: Action) -> Step:
        last = self.next_turn()
        game, info = self.game, {"metrics": {"turns": self.turns}}
        try:
            over = game.act(action.text)
        except TreetuneError:
            raise
        except Exception as error:  # it got nothing but the move
            raise InvalidAction(f"{self.task.game} fails by this move: {format_error(error)[:200]}") from error
        if not over and not self._opponent.play():
            return Step(game.read(POLICY) or "It is your turn.", done=last, truncated=last, info=info)
        self._opponent.refuse_forfeit()
        reason = str(game.info_of(POLICY).get("reason") or "")
        return Step(
            "\n".join(filter(None, [game.read(POLICY), reason])),
            reward=float((game.env.state.rewards or {}).get(POLICY, 0.0)),
            done=True,
            info={**info, "explanation": reason},
        )


class TextArenaConfig(TasksetConfig, frozen=True, kw_only=True):
    game: str = "GuessTheNumber-v0"
    """The game's name in textarena."""
    num_tasks: Positive = 1000
    """How many episodes there are. A large number costs nothing: an episode is built when it is drawn."""
    seed: int = 0
    """The random seed. A different seed gives different episodes."""
    opponent: CodeName | list[str] = ""
    """Who plays the others: `random`, a list of moves from which a valid one is drawn, or `file.py:function`."""
    players: Annotated[int, msgspec.Meta(ge=1, le=MOST_PLAYERS)] | None = None
    """The number of players; by default the fewest that the game allows."""
    params: dict[str, Any] = {}
    """The game's own settings, such as `{clues: 40}`."""
    max_turns: Positive = TextArenaEnvironment.CONTRACT.turns
    """The maximum number of answers in an episode; most games have their own lower limit."""


class TextArena(Taskset[TextArenaTask, TextArenaConfig]):
    EXTRA = "textarena"

    def __init__(self, config: TextArenaConfig | None = None) -> None:
        super().__init__(config)
        config = self.config
        self._players = count_players(config.game, config.params, config.players)
        if self._players > 1 and not config.opponent:
            why = f"{config.game} is a game for {self._players} players: all but the policy need an opponent"
            raise TasksetError(why, remedy="pass --taskset.opponent random, a list of moves, or file.py:function")
        if self._players == 1 and config.opponent:
            raise ConfigError([("taskset.opponent", f"{config.game} is a game for one player")])
        if isinstance(config.opponent, str) and config.opponent not in ("", "random"):
            # Absolute, because any process must find it.
            self.config = msgspec.structs.replace(config, opponent=absolute_spec(config.opponent, [Path.cwd()]))
            load_opponent(str(self.config.opponent), self._origin)

    def count(self) -> int:
        return self.config.num_tasks

    def task_at(self, index: int) -> TextArenaTask:
        config = self.config
        if not 0 <= index < config.num_tasks:
            raise IndexError(index)
        task = TextArenaTask(
            data_source=f"textarena/{config.game}",
            env_class="textarena",
            ability="games",
            extra_info={"max_turns": config.max_turns},
            game=config.game,
            seed=hash_number(f"textarena/{config.game}/{self.seed}/{index}") >> 1,
            players=self._players,
            opponent=config.opponent,
            params=config.params,
        )
        return msgspec.structs.replace(task, prompt=TextArenaEnvironment(task).start())

    def source(self) -> str:
        return f"textarena {version('textarena')}"


def count_players(name: str, params: dict[str, Any], players: int | None) -> int:
    """Return how many players a game has. Raises an error that says why it cannot be played here."""
    textarena = import_textarena()
    known = textarena.envs.registration.ENV_REGISTRY
    if name not in known:
        raise UnknownNameError.of("textarena game", name, known, remedy="use TextArena's names, such as Sudoku-v0")
    refusal: Exception | None = None
    for number in range(1, MOST_PLAYERS + 1) if players is None else [players]:
        try:
            game = TextArenaGame(name, seed=0, players=number, params=params)
        except TreetuneError:
            raise
        except Exception as error:
            refusal = refusal or error
            continue
        # Some games for several players would start with one, who would play alone.
        if players is not None or game.players > 1 or isinstance(game.env.state, textarena.SinglePlayerState):
            return game.players
    assert refusal is not None
    why = format_error(refusal)
    if players is not None:
        raise ConfigError([("taskset.players", f"{name} does not start with {players}: {why}")])
    if params and isinstance(refusal, TypeError | AssertionError | ValueError):
        raise ConfigError([("taskset.params", f"{name} refuses them: {why}")])
    raise TasksetError(f"{name} does not start: {why}", remedy=REMEDY)


def _make_game(task: TextArenaTask) -> TextArenaGame:
    return TextArenaGame(task.game, seed=task.seed, players=task.players, params=task.params)


class Opponent:
    """Plays every player except the policy."""

    def __init__(self, game: TextArenaGame, task: TextArenaTask, origin: Origin) -> None:
        self.game, self._spec, self._origin = game, task.opponent, origin
        self._rng = random.Random(f"opponent {task.seed}")
        self._seen: dict[int, list[str]] = {}
        """The texts that each player was shown."""

    def play(self) -> bool:
        """Move until it is the policy's turn; True if the game ends before."""
        for _ in range(MOST_MOVES):
            if self.game.player == POLICY:
                return False
            seen = self._seen.setdefault(self.game.player, [])
            seen.append(self.game.read(self.game.player))
            if self.game.act(self._move(seen)):
                return True
        raise EnvironmentFault("the opponents keep playing", remedy="use another game or opponent")

    def refuse_forfeit(self) -> None:
        """Raise an error if an opponent broke the rules: such a win says nothing about the policy."""
        for player in range(1, self.game.players):
            info = self.game.info_of(player)
            if info.get("invalid_move"):
                why = f"player {player}, an opponent, lost by an invalid move: {info.get('reason')}"
                raise EnvironmentFault(why, remedy="use an opponent that follows the rules of the game")

    def _move(self, seen: list[str]) -> str:
        if isinstance(self._spec, list):
            return self._draw_allowed([self._spec])
        if self._spec == "random":
            # The latest offered moves are tried first; the rules at the beginning name moves too.
            return self._draw_allowed([BRACKETS.findall(text) for text in reversed(seen)])
        try:
            answer = load_opponent(self._spec, self._origin)("\n".join(seen), self._rng)
        except Exception as error:
            raise EnvironmentFault(f"the opponent {self._spec} failed: {format_error(error)}") from error
        if not isinstance(answer, str):
            raise EnvironmentFault(f"{self._spec} returned a {type(answer).__name__}", remedy="return the move as text")
        return answer

    def _draw_allowed(self, offers: list[list[str]]) -> str:
        tried: set[str] = set()
        for offer in offers:
            moves = [move for move in dict.fromkeys(offer) if move not in tried]
            for move in self._rng.sample(moves, len(moves)):
                if self.game.allows(move):
                    return move
            tried.update(moves)
        why = (
            "the opponent found no valid move; tried: "
            f"{', '.join(sorted(tried)) or 'none, because the game offers none'}"
        )
        raise EnvironmentFault(why, remedy="name the moves, or a function: --taskset.opponent file.py:name")


def load_opponent(spec: str, origin: Origin) -> Callable[[str, random.Random], Any]:
    """Return a function that chooses a move, from what the player has seen so far and a random.Random."""
    function = load_object(parse_reference(spec), origin)
    if not callable(function):
        raise EnvironmentFault(f"{spec} is not a function", remedy="write def opponent(observation, rng): return '[4]'")
    return function  # type: ignore[no-any-return]
