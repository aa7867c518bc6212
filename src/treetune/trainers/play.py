"""One game, played to its end by a model that is given tokens and gives tokens: for trainers that sample by themselves.

async def sample(prompt): return Sampled(*await engine.generate(prompt.ids))

async with await episodes.start(0) as episode:
    game = Game(chat, hooks, episode)
    await play(game, sample, longest_prompt=4096, max_turns=10)
game.reward, game.tokens, game.failure
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from treetune.tokens import Prompt
from treetune.trainers.game import Game
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


async def play(game: Game, sample: Sample, *, longest_prompt: int | None, max_turns: int) -> None:
    """Plays until the environment ends it or a limit does. A failure of the environment or its server is the game's
    (`game.failure`); what the sampling raises is raised."""
    while game.ready(longest_prompt, max_turns):
        said = await sample(game.prompt)
        if said.prompt_ids:
            game.prompt = game.prompt._replace(ids=said.prompt_ids)
        action = game.take(said.ids, said.logprobs, said.versions)
        game.see(await or_error(game.episode.step(action)))
