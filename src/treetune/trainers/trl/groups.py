"""A Group is the episodes of one task that AsyncGRPO compares with each other, and the samples that it trains on."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

from treetune.chat.message import Message
from treetune.chat.tokens import TokenSequence
from treetune.trainers.token_episode import TokenEpisode

_SMALL = 1e-8


class Group:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._ended = 0
        self._scored: list[tuple[TokenEpisode, float]] = []

    def add(self, played: TokenEpisode | None, reward: float | None) -> None:
        """An episode that has ended. One without a reward is no part of the comparison, and not trained on."""
        self._ended += 1
        if played is not None and reward is not None:
            self._scored.append((played, reward))

    @property
    def complete(self) -> bool:
        return self._ended == self.size

    def samples(self) -> list[Any]:
        """A `RolloutSample` for each sequence of tokens. Those of an episode share its advantage, as in TRL."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        if not self._scored:
            return []
        rewards = [reward for _, reward in self._scored]
        mean, spread = fmean(rewards), pstdev(rewards)
        samples = []
        for played, reward in self._scored:
            prompt, completion = _split(played.messages, played.turns)
            metrics = {
                "reward": reward,
                "reward_std": spread,
                "rewards/treetune": reward,
                "num_turns": float(played.turns),
            }
            for sequence in played.tokens.sequences:
                if not any(sequence.mask):  # nothing was said
                    continue
                samples.append(
                    RolloutSample(
                        prompt=prompt,
                        completion=completion,
                        **_arrays(sequence),
                        advantage=(reward - mean) / (spread + _SMALL),
                        model_version=min(version for version in sequence.versions if version >= 0),
                        group_id=self.number,
                        metrics={**metrics, "num_turns": float(played.turns)},
                    )
                )
        return samples


def _arrays(sequence: TokenSequence) -> dict[str, Any]:
    import numpy as np

    return {
        "input_ids": np.asarray(sequence.ids, dtype=np.int64),
        "completion_mask": np.asarray(sequence.mask, dtype=np.int64),
        "old_log_probs": np.asarray(sequence.logprobs, dtype=np.float32),
    }


def _split(messages: list[Message], turns: int) -> tuple[list[Message], list[Message]]:
    """What the model was shown first, and the rest: from its first answer on."""
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    first = answers[-turns] if turns else len(messages)
    return messages[:first], messages[first:]
