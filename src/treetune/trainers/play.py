"""One game, played to its end by a model that is given tokens and gives tokens: for trainers that sample by themselves.

async def sample(prompt): return Sampled(*await engine.generate(prompt.ids))

game = await play_episode(lambda: episodes.start(scorer, task), chat, hooks, sample, longest_prompt=4096, max_turns=10)
game.reward, game.tokens, game.failure
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from treetune.chat.tokens import ChatTokens, Prompt
from treetune.errors import PolicyError
from treetune.serve import ServeError
from treetune.trainers.game import Game, Hooks
from treetune.trainers.local_episodes import or_error


class Sampled(NamedTuple):
    """What a model said to a prompt."""

    ids: list[int]
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    """The version of the weights that sampled each token."""
    prompt_ids: list[int] | None = None
    """What it was given, where the engine says that it was not quite what it was asked."""


Sample = Callable[[Prompt], Awaitable[Sampled]]
LongestPrompt = int | None | Callable[[Game], int | None]
"""How many tokens a prompt may have: a number, or what follows from the game so far."""


async def play(
    game: Game, sample: Sample, *, longest_prompt: LongestPrompt, max_turns: int, seconds: float | None = None
) -> None:
    """Plays until the environment ends it or a limit does; `seconds` is one that is looked at between turns. A failure
    of the environment or its server is the game's (`game.failure`), and so is a `ServeError` of the sampling, and a
    sample that is refused; what else the sampling raises is raised."""
    now = asyncio.get_running_loop().time
    until = None if seconds is None else now() + seconds
    while game.ready(longest_prompt(game) if callable(longest_prompt) else longest_prompt, max_turns):
        if until is not None and now() >= until:
            return game.cut_off()
        try:
            said = await sample(game.prompt)
        except ServeError as error:
            return game.see(error)
        if said.prompt_ids:
            game.prompt = game.prompt._replace(ids=said.prompt_ids)
        try:
            action = game.take(said.ids, said.logprobs, said.versions)
        except PolicyError as error:
            return game.see(error)
        game.see(await or_error(game.episode.step(action)))


async def play_episode(
    start: Callable[[], Awaitable[Any]],
    chat: ChatTokens,
    hooks: Hooks,
    sample: Sample,
    *,
    longest_prompt: LongestPrompt,
    max_turns: int,
    seconds: float | None = None,
    attempts: int = 2,
) -> Game:
    """Starts an episode, plays it and closes it, whatever happens. One that failed by no doing of the model's is played
    again from its start, `attempts` times in all; the last game has the `failure`. A start that fails is not repeated
    here: `RowEpisodes` does that."""
    for _ in range(attempts):
        episode = await or_error(start())
        if isinstance(episode, ServeError):
            return Game(chat, hooks, episode)
        async with episode:
            game = Game(chat, hooks, episode)
            await play(game, sample, longest_prompt=longest_prompt, max_turns=max_turns, seconds=seconds)
        if game.failure is None:
            break
    return game
