"""What AReaL makes of the rows of an episode: those of our workflow, its own actor and its own losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from areal.trainer.ppo.actor import PPOActor
from areal.utils.data import concat_padded_tensors
from areal.utils.functional import ppo_actor_loss_fn, sapo_loss_fn

from treetune.chat.tokens import Span, TokenSequence
from treetune.core.contract import Credit
from treetune.trainers.areal.__main__ import check_config, read_config
from treetune.trainers.areal.launch import CONFIG
from treetune.trainers.areal.workflow import EPSILON, trajectory_of
from treetune.trainers.credit import turn_advantages
from treetune.trainers.tiny_episodes import GROUP, TinyModel, TinyRow, cut_rows, rewards_of
from treetune.trainers.weights import Case, Outcome

REFUSED = {
    "reward_norm": "actor.reward_norm={mean_level: group, std_level: group, group_size: 4}",
    "gspo": "+actor.importance_sampling_level=sequence",
    "gae": "+actor.gae_lambda=0.95",
    "mini-batches": "actor.ppo_n_minibatches=4",
}


def cases() -> Iterator[Case]:
    credits: tuple[Credit, ...] = ("outcome", "turn")
    for loss in ("ppo", "sapo"):
        for credit in credits:
            yield Case(loss, credit, partial(play, credit=credit, loss=loss))
    for name, override in REFUSED.items():
        yield Case(name, "turn", partial(play, credit="turn", overrides=(override,)))


def play(cuts: Sequence[int], *, credit: Credit, loss: str = "ppo", overrides: tuple[str, ...] = ()) -> Outcome:
    """Take an optimizer step."""
    config = read_config(["--config", str(CONFIG), *overrides])
    check_config(config, credit)
    by_episode: dict[int, list[TinyRow]] = defaultdict(list)
    for row in cut_rows(cuts):
        by_episode[row.episode].append(row)
    groups = [range(first, first + GROUP) for first in range(0, len(cuts), GROUP)]
    advantages = [
        found
        for group in groups
        for found in turn_advantages(list(map(rewards_of, group)), credit=credit, epsilon=EPSILON)
    ]
    made = [
        trajectory_of([_sequence(row) for row in rows], advantages[episode], credit)
        for episode, rows in by_episode.items()
    ]
    batch = PPOActor(config.actor, None)._compute_advantages(concat_padded_tensors([each for each in made if each]))
    model = TinyModel()
    now = torch.roll(model.log_probs(batch["input_ids"].long()), -1, -1)  # as AReaL's mask
    old, mask = now.detach() + batch["logprobs"].double(), batch["loss_mask"].bool()
    values = batch["advantages"].double()
    if loss == "sapo":
        found, _ = sapo_loss_fn(now, old, values, config.actor.sapo_tau_pos, config.actor.sapo_tau_neg, mask)
    else:
        found, _ = ppo_actor_loss_fn(now, old, old, values, config.actor.eps_clip, mask)
    return Outcome(_by_turn(by_episode, batch, credit), model.gradient(found), config.actor.ppo_n_minibatches)


def _sequence(row: TinyRow) -> TokenSequence:
    logprobs = [value * mine for value, mine in zip(row.old_log_probs, row.mask, strict=True)]
    return TokenSequence(row.ids, row.mask, logprobs, [-1] * len(row.ids), spans=[Span(*span) for span in row.spans])


def _by_turn(
    by_episode: dict[int, list[TinyRow]], batch: dict[str, Any], credit: Credit
) -> dict[tuple[int, int], float]:
    """The advantages of turns, whose tokens AReaL has one place earlier."""
    rows = [
        (row.episode, spans)
        for own in by_episode.values()
        for row in own
        for spans in ([[span] for span in row.spans] if credit == "turn" else [row.spans])
    ]
    return {
        (episode, turn): float(batch["advantages"][at, first - 1])
        for at, (episode, spans) in enumerate(rows)
        for turn, first, _ in spans
    }
