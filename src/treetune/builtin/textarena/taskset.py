"""textarena: seeded episodes of any of its games, built one by one as they are drawn (extra `textarena`).

    treetune eval textarena --taskset.game Sudoku-v0 -m scripted:gold -n 5
    treetune eval textarena --taskset.game TicTacToe-v0 --taskset.opponent random -m MODEL -n 100

Games for one player are played as they are; of others the policy is player 0, and an opponent plays the rest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treetune.builtin.textarena.environment import (
    MAX_TURNS,
    TextArenaEnvironment,
    TextArenaTask,
    first_observation,
    load_opponent,
)
from treetune.builtin.textarena.game import MOST_PLAYERS, check
from treetune.errors import ConfigError, TasksetError
from treetune.plugins import absolute_spec
from treetune.taskset import Taskset, TasksetConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]


class TextArenaConfig(TasksetConfig, frozen=True, kw_only=True):
    game: str = "GuessTheNumber-v0"
    """The game's name in textarena."""
    num_tasks: Positive = 1000
    """How many episodes there are; a large number costs nothing, only those that are drawn are built."""
    seed: int = 0
    """Another seed gives other episodes."""
    opponent: str | list[str] = ""
    """Who plays the others: `random`, a list of moves of which a valid one is drawn, or `file.py:function`."""
    players: Annotated[int, msgspec.Meta(ge=1, le=MOST_PLAYERS)] | None = None
    """How many players; absent: the fewest that the game takes."""
    params: dict[str, Any] = {}
    """The game's own settings, such as `{clues: 40}`."""
    max_turns: Positive = MAX_TURNS
    """The most answers of an episode; most games have a lower limit of their own."""


class TextArena(Taskset[TextArenaTask, TextArenaConfig]):
    EXTRA = "textarena"

    def __init__(self, config: TextArenaConfig | None = None) -> None:
        super().__init__(config)
        config = self.config
        self._players = check(config.game, config.params, config.players)
        if self._players > 1 and not config.opponent:
            raise TasksetError(
                f"{config.game} is a game for {self._players} players: the policy is player 0, who are the others?",
                remedy="pass --taskset.opponent random, a list of moves, or file.py:function",
            )
        if self._players == 1 and config.opponent:
            raise ConfigError([("taskset.opponent", f"{config.game} is a game for one player")])
        if isinstance(config.opponent, str) and config.opponent not in ("", "random"):
            # Absolute, for it must be found from any process.
            self.config = msgspec.structs.replace(config, opponent=absolute_spec(config.opponent, [Path.cwd()]))
            load_opponent(str(self.config.opponent))

    def count(self) -> int:
        return self.config.num_tasks

    def task_at(self, index: int) -> TextArenaTask:
        if not 0 <= index < self.config.num_tasks:
            raise IndexError(index)
        # Hashed, not added: seed 7 at index i + 1 must not be seed 8 at index i.
        key = hashlib.blake2b(f"textarena/{self.config.game}/{self.seed}/{index}".encode(), digest_size=8).digest()
        task = TextArenaTask(
            data_source=f"textarena/{self.config.game}",
            env_class="textarena",
            ability="games",
            extra_info={"max_turns": self.config.max_turns},
            game=self.config.game,
            seed=int.from_bytes(key, "little") >> 1,
            players=self._players,
            opponent=self.config.opponent,
            params=self.config.params,
        )
        return msgspec.structs.replace(task, prompt=first_observation(task))

    def gold(self, task: TextArenaTask) -> list[str] | None:
        return TextArenaEnvironment.gold(task)

    def source(self) -> str:
        from importlib.metadata import version

        return f"textarena {version('textarena')}"
