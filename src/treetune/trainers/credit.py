"""What each turn of an episode is worth, and what each of its training rows weighs: the same in every trainer.

    turn_advantages([[0.0, 1.0], [0.0]], credit="turn")       # by episode, the advantage of each turn
    row_weight("seq-mean-token-mean", row_tokens=3, episode_tokens=12, rows=9, episodes=8)

    G[t] = r[t] + discount * G[t + 1]                      what was earned from turn t on
    b[t] = the mean over the group of G[min(t, last)]      an episode that is over keeps its last return
    A[t] = (G[t] - b[t]) / s                               s^2 = sum over episodes of mean_t (G - b)^2 / (n - 1)

An episode is one member of its group, however many turns and rows it has. If only last turns are paid and the discount
is 1, this is GRPO's own advantage, and so is `credit: outcome` always.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import fsum
from typing import NamedTuple

from treetune.core.contract import Contract, Credit
from treetune.errors import CreditError, did_you_mean

BY_TOKEN = ("token-mean", "token-sum", "dapo", "bnpo", "cispo", "token_mean", "prompt_mean")
"""Losses that add up over the tokens of a batch, in the words of verl, TRL and SkyRL."""
BY_ROW_SUM = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "dr_grpo", "seq_mean_token_sum_norm")
"""Losses that add up the tokens of a row, and divide by the number of rows."""
BY_ROW_MEAN = ("seq-mean-token-mean", "grpo", "sapo", "sequence_mean")
"""Losses that take the mean over the tokens of a row, and divide by the number of rows."""
NOT_BY_TURN = {
    "gspo": "its ratio is one for a row",
    "geo_mean": "its ratio is one for a row",
    "vespo": "its weight is one for a row",
    "luspo": "its ratio is one for a row",
    "token_mean_legacy": "it takes a mean over each micro-batch",
}
"""Losses that cannot join the rows of an episode, and why."""


def turn_advantages(
    group: Sequence[Sequence[float]],
    *,
    credit: Credit = "outcome",
    discount: float = 1.0,
    by_deviation: bool = True,
    epsilon: float = 1e-6,
) -> list[list[float]]:
    """Return the advantages of the turns of each episode of a group, given the rewards of its turns. Leave out lost
    episodes. A group of one and an episode without a turn have no advantage."""
    credit, discount = Contract(credit=credit, credit_discount=discount).turn_credit
    if credit == "outcome":
        group = [[0.0] * (len(rewards) - 1) + [fsum(rewards)] * bool(rewards) for rewards in group]
    returns = [_returns(rewards, discount) for rewards in group]
    members = [own for own in returns if own]
    count = len(members)
    if count < 2:
        return [[0.0] * len(own) for own in returns]
    baseline = [fsum(own[min(turn, len(own) - 1)] for own in members) / count for turn in range(max(map(len, members)))]
    centred = [[value - mean for value, mean in zip(own, baseline, strict=False)] for own in returns]
    if not by_deviation:
        return centred
    variance = fsum(fsum(value * value for value in own) / len(own) for own in centred if own) / (count - 1)
    return [[value / (variance**0.5 + epsilon) for value in own] for own in centred]


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    found, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + discount * ahead
        found.append(ahead)
    return found[::-1]


def check_loss(loss: str) -> None:
    """Raise if rows of an episode cannot be weighed in this loss."""
    if loss in NOT_BY_TURN:
        remedy = f"use one of {', '.join(BY_TOKEN[:1] + BY_ROW_MEAN[:1])}, or the like of your trainer"
        raise CreditError(f"{loss} does not add up over the rows of an episode: {NOT_BY_TURN[loss]}", remedy=remedy)
    known = BY_TOKEN + BY_ROW_SUM + BY_ROW_MEAN
    if loss not in known:
        raise CreditError(f"what a row weighs in the loss {loss!r} is not known{did_you_mean(loss, known)}")


def row_weight(loss: str, row_tokens: int, episode_tokens: int, rows: float, episodes: float) -> float:
    """Return what the advantages of a row are multiplied by, so that its episode counts as if it were one row.
    `rows` is the number that the loss divides by, and `episodes` the number of played episodes among them."""
    check_loss(loss)
    if loss in BY_TOKEN:
        return 1.0
    share = row_tokens / episode_tokens if loss in BY_ROW_MEAN else 1.0
    return share * rows / episodes


class Row(NamedTuple):
    """A training row, with what its advantages need."""

    group: Hashable
    episode: Hashable
    """Rows of one episode have the same, which no other episode of the batch has; None for padding."""
    rewards: Sequence[float]
    """The rewards of all turns of its episode; empty if the episode was lost."""
    spans: Sequence[tuple[int, int, int]]
    """The turns sampled in this row: (turn, first, end). They may end beyond its length."""
    length: int
    credit: Credit = "outcome"
    discount: float = 1.0
    trained: int | None = None
    """The number of trained tokens, if the trainer has masked some of those that were sampled."""

    @property
    def tokens(self) -> int:
        sampled = sum(max(0, min(end, self.length) - first) for _, first, end in self.spans)
        return sampled if self.trained is None else self.trained


def row_advantages(
    batch: Sequence[Row],
    loss: str,
    *,
    rows: int | None = None,
    episodes: int | None = None,
    by_deviation: bool = True,
    epsilon: float = 1e-6,
) -> list[list[float]]:
    """Return the weighed advantages of the tokens of each row. The loss divides by `rows`, and would divide by
    `episodes` if each episode were one row; by default, these are the numbers of both in the batch."""
    members: dict[Hashable, dict[Hashable, Row]] = defaultdict(dict)
    tokens: dict[Hashable, int] = defaultdict(int)
    for row in batch:
        if row.episode is not None and row.rewards:
            members[row.group][row.episode] = row
            tokens[row.episode] += row.tokens
    advantages: dict[Hashable, list[float]] = {}
    for group in members.values():
        any_row = next(iter(group.values()))
        found = turn_advantages(
            [row.rewards for row in group.values()],
            credit=any_row.credit,
            discount=any_row.discount,
            by_deviation=by_deviation,
            epsilon=epsilon,
        )
        advantages |= zip(group, found, strict=True)
    count = len({row.episode for row in batch} - {None})
    divisor = len(batch) if rows is None else rows
    played = (count if episodes is None else episodes) * len(advantages) / max(1, count)
    made = []
    for row in batch:
        values = [0.0] * row.length
        if row.episode in advantages and row.tokens:
            weight = row_weight(loss, row.tokens, tokens[row.episode], divisor, played)
            for turn, first, end in row.spans:
                end = min(end, row.length)
                values[first:end] = [advantages[row.episode][turn] * weight] * max(0, end - first)
        made.append(values)
    return made
