"""Lets SkyRL's trainer count each episode once, however many rows it has, and credit its turns.

    check_credit(config, credit)                     # raises if SkyRL cannot do it with these settings
    trainer = give_credit(trainer, credit)           # in `BasePPOExp.get_trainer`

With `step_wise_trajectories`, each turn is a row: SkyRL takes only the reward of the last one, and its loss divides by
the number of rows. Otherwise an episode is one row, and SkyRL's generator puts rewards at the ends of turns, which its
estimators add up. `TurnRewards` carries those ends to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from treetune.core.contract import Credit
from treetune.core.score import total
from treetune.errors import CreditError
from treetune.trainers.config import get_value
from treetune.trainers.credit import Row, check_loss, row_advantages, row_weight

BY_EPISODE = ("grpo", "rloo", "maxrl")
"""Estimators that take one reward for an episode, and give all its tokens the same advantage."""
BY_TOKEN = ("regular", "dual_clip", "cispo", "sapo", "rollout_is", "dppo")
"""Losses in which each token has its own ratio."""
ENDS = "treetune_turn_ends"
"""The key of SkyRL's metadata for the ends of turns, by row."""


class TurnCredit(NamedTuple):
    """The credit of a training's tasks."""

    credit: Credit = "outcome"
    discount: float = 1.0


class TurnRewards(list[float]):
    """The rewards of a row's tokens, with the ends of its turns."""

    ends: tuple[int, ...] = ()


def check_credit(config: Any, credit: TurnCredit) -> None:
    """Raise if episodes of several rows, or the credit of turns, would be wrong with these settings of SkyRL."""
    rows, turns = get_value(config, "generator.step_wise_trajectories"), credit.credit == "turn"
    for key, why in _find_faults(config, rows, turns) if rows or turns else ():
        what = "credit: turn" if turns else "generator.step_wise_trajectories, which makes a row of each turn"
        raise CreditError(f"{key}={get_value(config, key)} {why}", remedy=f"change it, or train without {what}")
    if rows:
        check_loss(get_value(config, "trainer.algorithm.loss_reduction"))


def _find_faults(config: Any, rows: bool, turns: bool) -> Iterator[tuple[str, str]]:
    algorithm, off_policy = "trainer.algorithm", "trainer.algorithm.off_policy_correction"
    estimators = BY_EPISODE[:1] if turns else BY_EPISODE
    wrong: list[tuple[bool, str, Iterable[Any], str]] = [
        (True, f"{algorithm}.advantage_estimator", estimators, f"cannot be used; use {', '.join(estimators)}"),
        (rows, f"{algorithm}.policy_loss_type", BY_TOKEN, f"is not a loss by token; use {', '.join(BY_TOKEN)}"),
        (rows, f"{algorithm}.use_kl_loss", (False,), "counts the KL by row; use_kl_in_reward counts tokens"),
        (rows, f"{algorithm}.use_entropy_loss", (False,), "counts the entropy by row"),
        (rows, f"{off_policy}.tis_ratio_type", (None, "token"), "is a ratio of a row"),
        (rows, f"{off_policy}.sequence_mask_metric", (None,), "masks by row"),
        (rows, f"{off_policy}.outlier_token_is_threshold_low", (None,), "masks by row"),
        (rows, f"{off_policy}.outlier_token_is_threshold_high", (None,), "masks by row"),
        (rows or turns, "trainer.critic.model.path", (None,), "adds a critic, whose values end with a row"),
        (rows or turns, f"{algorithm}.advantage_batch_normalize", (False,), "normalizes by row"),
        (turns, "generator.chat_template.name_or_path", (None,), "leaves only the reward of the last turn"),
        (turns, "generator.merge_stepwise_output", (False,), "loses the ends of turns"),
        (turns, "generator.zero_reward_on_non_stop", (False,), "loses the ends of turns"),
        (turns, "generator.batched", (False,), "plays single turns"),
    ]
    for applies, key, allowed, why in wrong:
        if applies and get_value(config, key) not in allowed:
            yield key, why


def keep_turn_rewards(generator: Any) -> Any:
    """Let SkyRL's generator return the rewards of all turns, with the ends of turns if it gives rewards to tokens. With
    a chat template of the user, it returns only the reward of the last turn."""
    build = generator._build_per_token_rewards

    def build_with_ends(steps: list[tuple[float, int]], ids: list[int], appended_eos: bool) -> Any:
        built = build(steps, ids, appended_eos)
        if not isinstance(built, list):
            return total(reward for reward, _ in steps)
        rewards = TurnRewards(built)
        rewards.ends = (*(end + 1 for _, end in steps[:-1]), len(ids))
        return rewards

    generator._build_per_token_rewards = build_with_ends
    return generator


def give_credit(trainer: Any, credit: TurnCredit) -> Any:
    """Let SkyRL's trainer compute the advantages of these tasks; each episode counts once."""
    by_step, algorithm = trainer.cfg.generator.step_wise_trajectories, trainer.cfg.trainer.algorithm
    convert, compute = trainer.convert_to_training_input, trainer.compute_advantages_and_returns

    def convert_with_ends(output: Any, uids: list[str]) -> Any:
        batch = convert(output, uids)
        batch.metadata[ENDS] = [getattr(rewards, "ends", ()) for rewards in output["rewards"]]
        return batch

    def compute_with_sums(batch: Any) -> Any:
        """SkyRL reads the reward of the last row of an episode: it is the reward of all of them."""
        for first, end in _episodes(batch.metadata["is_last_step"]):
            batch["rewards"][end - 1, -1] += batch["rewards"][first : end - 1].sum()
        return compute(batch)

    def compute_and_weigh(batch: Any) -> Any:
        """The estimator is SkyRL's own."""
        batch = compute_with_sums(batch)
        tokens = (batch["loss_mask"] > 0).sum(-1).tolist()
        for begin, stop in _mini_batches(batch):
            found = list(_episodes(batch.metadata["is_last_step"][begin:stop]))
            for first, end in found:
                of_episode = sum(tokens[begin + first : begin + end])
                for row in range(begin + first, begin + end) if of_episode else ():
                    share = algorithm.loss_reduction, tokens[row], of_episode, stop - begin, len(found)
                    batch["advantages"][row] *= row_weight(*share)
        return batch

    def compute_turns(batch: Any) -> Any:
        import torch

        rows = list(_rows(batch, credit, by_step))
        batch = compute_with_sums(batch) if by_step else compute(batch)
        for begin, stop in _mini_batches(batch):
            found = row_advantages(
                rows[begin:stop], algorithm.loss_reduction, by_deviation=algorithm.grpo_norm_by_std, epsilon=1e-6
            )
            advantages = batch["advantages"]
            advantages[begin:stop] = torch.tensor(found).to(advantages) * batch["loss_mask"][begin:stop]
        return batch

    if credit.credit == "turn":
        trainer.convert_to_training_input, trainer.compute_advantages_and_returns = convert_with_ends, compute_turns
    elif by_step:
        trainer.compute_advantages_and_returns = compute_and_weigh
    return trainer


def _episodes(is_last: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the first row of each episode, and the one after its last."""
    first = 0
    for end, last in enumerate(is_last, 1):
        if last:
            yield first, end
            first = end


def _mini_batches(batch: Any) -> list[tuple[int, int]]:
    """The rows of each optimizer step, which has all rows of its tasks; rows that pad the batch are in none."""
    found: list[tuple[int, int]] = batch.metadata["policy_mini_batch_boundaries"]
    return found


def _rows(batch: Any, credit: TurnCredit, by_step: bool) -> Iterator[Row]:
    uids, width = batch.metadata["uids"], batch["rewards"].shape[1]
    if by_step:
        for episode, (first, end) in enumerate(_episodes(batch.metadata["is_last_step"])):
            rewards = batch["rewards"][first:end].sum(-1).tolist()
            for turn in range(end - first):
                trained = (batch["loss_mask"][first + turn] > 0).nonzero()[:, 0].tolist()
                spans = [(turn, trained[0], trained[-1] + 1)] if trained else []
                yield Row(uids[first], episode, rewards, spans, width, *credit)
        return
    for episode, ends in enumerate(batch.metadata[ENDS]):
        if not ends:
            raise CreditError("the generator does not return the ends of turns", remedy="use SkyRL's SkyRLGymGenerator")
        before = width - ends[-1]  # rows are aligned on the right
        edges = [0, *(before + end for end in ends[:-1]), width]
        spans = [(turn, *edge) for turn, edge in enumerate(pairwise(edges))]
        rewards = [float(batch["rewards"][episode, first:end].sum()) for _, first, end in spans]
        yield Row(uids[episode], episode, rewards, spans, width, *credit)
