"""Advantages in slime: each episode counts once in its group, however many samples it gave, and turns have their own.

    --custom-reward-post-process-path treetune.trainers.slime.group_rewards    (in the rollout manager: sees groups)
    --custom-advantage-function-path treetune.trainers.slime.advantages        (in the actors: sees tokens)

slime's own rule takes the whole batch for one group if its number of samples is not that of full groups. Its loss
divides by episode, because the samples of one have the same `rollout_id`. From the manager to the actors, it passes one
number for each sample: a `TurnReward` also carries the advantages of turns.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from treetune.core.contract import Contract
from treetune.errors import CreditError
from treetune.trainers.credit import turn_advantages
from treetune.trainers.slime.samples import HERE, episode_of

CREDIT = "treetune_credit"
"""The metadata key for the credit of a sample's turns: the credit, its discount, the rewards of all turns of the
episode, and the turns of the sample, `(turn, first, end)` in its response."""
BY_GROUP = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""slime's estimators that centre rewards within their group."""
BY_TURN = ("grpo", "cispo")
"""Those that can take advantages by turn."""
BY_SAMPLE = ("gspo", "ppo", "reinforce_plus_plus")
"""Those that cannot join the samples of an episode: their ratio, values or returns end with a sample."""


class TurnReward(float):
    """The mean advantage of a sample, which slime logs, with that of each of its turns: `(first, end, value)`."""

    turns: tuple[tuple[int, int, float], ...]

    def __new__(cls, turns: Sequence[tuple[int, int, float]]) -> TurnReward:
        made = super().__new__(cls, statistics.fmean([value for _, _, value in turns]) if turns else 0.0)
        made.turns = tuple(turns)
        return made

    def __reduce__(self) -> Any:
        return TurnReward, (self.turns,)


def check_credit(args: Any, contract: Contract) -> None:
    """Raise if slime cannot credit turns with these arguments."""
    if contract.turn_credit[0] == "outcome":
        return
    wanted = {
        "advantage_estimator": BY_TURN,
        "rewards_normalization": (True,),
        "custom_reward_post_process_path": (f"{HERE}.group_rewards",),
        "custom_advantage_function_path": (f"{HERE}.advantages",),
    }
    for name, values in wanted.items():
        if (value := getattr(args, name, None)) not in values:
            option = f"--{name.replace('_', '-')}"
            remedy = f"pass {option} {' or '.join(map(str, values))}; `treetune train slime` does"
            if values == (True,):
                remedy = f"leave --disable-{name.replace('_', '-')} out"
            raise CreditError(f"the tasks declare credit: turn, and {option} is {value}", remedy=remedy)


def group_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Return the rewards, raw and as advantages within their group by slime's own rule, in which each episode counts
    once. Lost episodes are in no group."""
    raw = [sample.get_reward_value(args) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if not (estimator in BY_GROUP and getattr(args, "rewards_normalization", True)):
        return raw, raw
    by_deviation = estimator != "reinforce_plus_plus_baseline" and getattr(args, "grpo_std_normalization", True)
    groups: dict[Any, dict[Any, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for at, (sample, reward) in enumerate(zip(samples, raw, strict=True)):
        if reward is not None:
            groups[sample.group_index][episode_of(sample)].append((at, reward))
    shaped = [0.0] * len(samples)
    for episodes in groups.values():
        credits = [samples[own[0][0]].metadata.get(CREDIT) for own in episodes.values()]
        by_turn = all(credit is not None and credit["by"] == "turn" for credit in credits)
        rewards = [
            credit["rewards"] if by_turn else [own[0][1]]
            for credit, own in zip(credits, episodes.values(), strict=True)
        ]
        chosen = {"credit": "turn", "discount": credits[0]["discount"]} if by_turn else {}
        found = turn_advantages(rewards, by_deviation=by_deviation, **chosen)
        for advantages, own in zip(found, episodes.values(), strict=True):
            for at, _ in own:
                spans = samples[at].metadata[CREDIT]["spans"] if by_turn else ()
                turns = [(first, end, advantages[turn]) for turn, first, end in spans]
                shaped[at] = TurnReward(turns) if by_turn else advantages[0]
    return raw, shaped


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set the advantages of tokens: those of their turns, or of the whole sample as slime does."""
    import torch
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    made = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for reward, kl, (total, response) in zip(rollout_data["rewards"], rollout_data["kl"], lengths, strict=True):
        line = torch.zeros(response, dtype=kl.dtype, device=kl.device)
        for first, end, value in getattr(reward, "turns", [(0, response, reward)]):
            line[first:end] = value
        made.append(slice_log_prob_with_cp(line, total, response))
    rollout_data["advantages"] = rollout_data["returns"] = made
