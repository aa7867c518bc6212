"""The samples that AsyncGRPO trains on: those of a group of episodes, with the advantages of their turns."""

from __future__ import annotations

import math
from itertools import starmap
from statistics import pstdev
from typing import Any

from treetune.chat.tokens import Span, TokenSequence
from treetune.trainers.credit import turn_advantages
from treetune.trainers.rollout_log import split_episode
from treetune.trainers.token_episode import TokenEpisode
from treetune.trainers.trl.rollouts import rewards_of

_EPSILON = 1e-8
"""What TRL's asynchronous trainer adds to a standard deviation."""
SEVERAL_SAMPLES = (
    "an episode has several samples: they weigh as much as one only if they are in the same micro-batch (token_budget)"
)


class EpisodeGroup:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._ended = 0
        self.played: list[TokenEpisode] = []

    def add(self, played: TokenEpisode | None) -> None:
        """Add an ended episode. A rollout without a reward does not count in the comparison and is not trained on."""
        self._ended += 1
        if played is not None:
            self.played.append(played)

    @property
    def complete(self) -> bool:
        return self._ended == self.size

    def samples(self) -> list[Any]:
        """Return the `RolloutSample`s: one per token sequence, or with credit by turn one per advantage in it, which
        trains only the turns with this advantage. TRL forwards tokens that samples share once."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        scored = [(played, reward) for played in self.played if (reward := played.reward) is not None]
        spread = pstdev([reward for _, reward in scored]) if scored else 0.0
        samples = []
        for (played, reward), advantages in zip(scored, self._advantages_of(scored), strict=True):
            prompt, completion = split_episode(played)
            metrics = {
                **played.metrics,
                "reward": reward,
                "reward_std": spread,
                "rewards/treetune": reward,
                "num_turns": float(played.turns),
            }
            for sequence in played.tokens.sequences:
                spans: dict[float, list[Span]] = {}
                for span in sequence.spans:
                    if span.end > span.first:
                        spans.setdefault(advantages[span.turn], []).append(span)
                for advantage, trained in spans.items():
                    samples.append(
                        RolloutSample(
                            prompt=prompt,
                            completion=completion,
                            **_arrays(sequence, trained),
                            advantage=advantage,
                            model_version=min(version for version in sequence.versions if version >= 0),
                            group_id=self.number,
                            metrics=metrics,
                        )
                    )
                    metrics = {}  # TRL takes the mean over samples that have them: each episode counts once
        return samples

    def _advantages_of(self, scored: list[tuple[TokenEpisode, float]]) -> list[list[float]]:
        """Return the advantages of the turns of each episode, divided by the deviation that this trainer takes: of a
        population, not of a sample."""
        if not scored:
            return []
        credit, discount = scored[0][0].contract.turn_credit
        size = len(scored)
        ratio = math.sqrt((size - 1) / size) or 1.0
        found = turn_advantages(
            list(starmap(rewards_of, scored)), credit=credit, discount=discount, epsilon=_EPSILON / ratio
        )
        return [[value / ratio for value in own] for own in found]


def _arrays(sequence: TokenSequence, trained: list[Span]) -> dict[str, Any]:
    import numpy as np

    mask = np.zeros(len(sequence.ids), dtype=np.int64)
    for _, first, end in trained:
        mask[first:end] = 1
    return {
        "input_ids": np.asarray(sequence.ids, dtype=np.int64),
        "completion_mask": mask,
        "old_log_probs": np.asarray(sequence.logprobs, dtype=np.float32),
    }
