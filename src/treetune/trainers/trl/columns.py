"""What a rollout function gives a GRPOTrainer of the games that were played."""

from __future__ import annotations

from typing import Any

from treetune.chat.tokens import TokenSequence
from treetune.trainers.game import Game


def columns_of(games: list[Game], end_token: int) -> dict[str, Any]:
    """What TRL takes: the prompt is what stands before the first sampled token, the rest is the completion."""
    rows = [_tokens_of(game, end_token) for game in games]
    starts = [row.mask.index(1) if 1 in row.mask else len(row.ids) - 1 for row in rows]
    cut = list(zip(rows, starts, strict=True))
    with_logprobs = all(row.logprobs for row in rows)
    return {
        "prompt_ids": [row.ids[:start] for row, start in cut],
        "completion_ids": [row.ids[start:] for row, start in cut],
        "logprobs": [row.logprobs[start:] for row, start in cut] if with_logprobs else None,
        "env_mask": [row.mask[start:] for row, start in cut],
        "task_reward": [game.reward for game in games],
        "num_turns": [game.turns for game in games],
        "turn_rewards": [game.rewards for game in games],
    }


def _tokens_of(game: Game, end_token: int) -> TokenSequence:
    """The tokens to train on. TRL has one row for a prompt: where there are several sequences it is the last."""
    if game.tokens.sequences:
        return game.tokens.sequences[-1]
    # Nothing was said, but TRL wants a token: this one is masked out.
    ids = [*(game.prompt.ids or [end_token]), end_token]
    return TokenSequence(ids=ids, mask=[0] * len(ids), logprobs=[0.0] * len(ids))
