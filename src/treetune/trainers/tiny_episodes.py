"""A tiny model and eight episodes, which can be cut into rows: what `treetune verify-weights` plays through trainers.

rows = cut_rows((2, 1, 1, 1, 1, 1, 1, 1))          # the first episode in two rows
log_probs = TinyModel().log_probs(pad(row.ids for row in rows))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

VOCABULARY, GROUP = 32, 4
LONGEST = 128
"""More tokens than any row has."""
_WIDTH = 16
_TURNS = (5, 5, 3, 5, 1, 2, 4, 3)
_REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 0.5, 0.75)


class TinyModel(torch.nn.Module):  # type: ignore[misc]
    """One layer of causal attention in double precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, _WIDTH), torch.nn.Embedding(LONGEST, _WIDTH)
        self.attention = torch.nn.Linear(_WIDTH, 3 * _WIDTH)
        self.head = torch.nn.Linear(_WIDTH, VOCABULARY)
        self.double()

    def forward(
        self, ids: torch.Tensor, places: torch.Tensor | None = None, attended: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each token attends to those before it, or to those that `attended` marks."""
        seen = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) if places is None else places)
        query, key, value = self.attention(seen).chunk(3, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attended, is_causal=attended is None
        )
        logits: torch.Tensor = self.head(torch.tanh(seen + mixed))
        return logits

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """The log-probability of each token; 0 for the first one."""
        said = self(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(said, (1, 0))

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self.parameters()))])


class TinyRow(NamedTuple):
    """A training row: a prefix of its episode, of which it trains some turns."""

    episode: int
    part: int
    """Its number within the episode."""
    ids: list[int]
    mask: list[int]
    """1 for the tokens that it trains."""
    spans: list[tuple[int, int, int]]
    """The turns that it trains: (turn, first, end)."""

    @property
    def group(self) -> int:
        return self.episode // GROUP

    @property
    def given(self) -> int:
        """The number of tokens before the first one that it trains."""
        return self.mask.index(1)

    @property
    def rewards(self) -> list[float]:
        """The rewards of all turns of its episode."""
        return rewards_of(self.episode)

    @property
    def old_log_probs(self) -> list[float]:
        """Differences between the log-probabilities now and when the tokens were sampled: a token of an episode has the
        same in all of its rows."""
        return [0.3 * math.sin(7 * place + self.episode) for place in range(len(self.ids))]


def rewards_of(episode: int) -> list[float]:
    """Each turn earns something, so that credit by turn differs from credit by outcome."""
    return [0.1 * ((turn + episode) % 3) for turn in range(_TURNS[episode] - 1)] + [_REWARDS[episode]]


@cache
def _episodes() -> list[tuple[list[int], list[tuple[list[int], list[int]]]]]:
    """The prompt of each episode, and its turns: the sampled tokens, and those of the environment."""
    draw = torch.Generator().manual_seed(1)

    def words(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high + 1, (1,), generator=draw))
        found: list[int] = torch.randint(2, VOCABULARY, (count,), generator=draw).tolist()
        return found

    prompts = [words(5, 7) for _ in range(len(_TURNS) // GROUP)]
    return [
        (prompts[episode // GROUP], [(words(2, 8), words(0, 3)) for _ in range(turns)])
        for episode, turns in enumerate(_TURNS)
    ]


def cut_rows(cuts: Sequence[int]) -> list[TinyRow]:
    """Cut each episode into that many rows."""
    return [
        row
        for episode, (pieces, (prompt, turns)) in enumerate(zip(cuts, _episodes(), strict=True))
        for row in _cut(episode, pieces, prompt, turns)
    ]


def _cut(episode: int, pieces: int, prompt: list[int], turns: list[Any]) -> Iterable[TinyRow]:
    bounds = [round(at * len(turns) / pieces) for at in range(pieces + 1)]
    for part, (first, end) in enumerate(pairwise(bounds)):
        row = TinyRow(episode, part, list(prompt), [0] * len(prompt), [])
        for turn, (said, seen) in enumerate(turns[:end]):
            if turn >= first:
                row.spans.append((turn, len(row.ids), len(row.ids) + len(said)))
            row.ids.extend(said)
            row.mask.extend([int(turn >= first)] * len(said))
            if turn < end - 1:
                row.ids.extend(seen)
                row.mask.extend([0] * len(seen))
        yield row


def pad(values: Iterable[Sequence[float]], fill: float = 0) -> torch.Tensor:
    """Return a tensor with a line for each sequence."""
    lines = [list(each) for each in values]
    width = max(map(len, lines))
    return torch.tensor([line + [fill] * (width - len(line)) for line in lines])
