"""What SkyRL makes of the rows of an episode: its trainer's methods with ours around them, and its own losses.

By turn, SkyRL has one row for an episode or, with `step_wise_trajectories`, one for each turn: a cut means the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.trainer import RayPPOTrainer

from treetune.core.contract import Credit
from treetune.trainers.skyrl.credit import BY_TOKEN, TurnCredit, TurnRewards, check_credit, give_credit
from treetune.trainers.tiny_episodes import GROUP, LONGEST, TinyModel, TinyRow, cut_rows, pad
from treetune.trainers.weights import Case, Outcome

REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
REFUSED = {
    "gspo": "trainer.algorithm.policy_loss_type=gspo",
    "token_mean_legacy": "trainer.algorithm.loss_reduction=token_mean_legacy",
    "a KL loss": "trainer.algorithm.use_kl_loss=true",
    "an entropy loss": "trainer.algorithm.use_entropy_loss=true",
    "gae": "trainer.algorithm.advantage_estimator=gae",
    "ratios of sequences": "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
}


def cases() -> Iterator[Case]:
    credits: tuple[Credit, ...] = ("outcome", "turn")
    for reduction in REDUCTIONS:
        for credit in credits:
            yield Case(reduction, credit, partial(play, credit=credit, reduction=reduction))
    for policy in BY_TOKEN[1:]:
        yield Case(f"{policy}, sequence_mean", "turn", partial(play, credit="turn", policy=policy))
    for name, override in REFUSED.items():
        yield Case(name, "outcome", partial(play, credit="outcome", overrides=(override,)))


def play(
    cuts: Sequence[int],
    *,
    credit: Credit,
    reduction: str = "sequence_mean",
    policy: str = "regular",
    overrides: tuple[str, ...] = (),
) -> Outcome:
    """Take an optimizer step."""
    by_step = any(pieces > 1 for pieces in cuts) or credit == "outcome"
    rows = cut_rows(cuts)
    if credit == "turn" and by_step:
        turns = {row.episode: len(row.rewards) for row in rows}
        rows = cut_rows([turns[episode] for episode in range(len(cuts))])
    config = SkyRLTrainConfig.from_cli_overrides(
        [
            f"generator.step_wise_trajectories={str(by_step).lower()}",
            "trainer.algorithm.use_kl_loss=false",
            f"trainer.algorithm.loss_reduction={reduction}",
            f"trainer.algorithm.policy_loss_type={policy}",
            f"trainer.algorithm.max_seq_len={LONGEST}",
            f"generator.n_samples_per_prompt={GROUP}",
            f"trainer.train_batch_size={len(cuts) // GROUP}",
            f"trainer.policy_mini_batch_size={len(cuts) // GROUP}",
            *overrides,
        ]
    )
    chosen = TurnCredit(credit)
    check_credit(config, chosen)
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics = config, {}
    trainer.tokenizer, trainer.dispatch = SimpleNamespace(pad_token_id=0), SimpleNamespace(get_lcm_dp_size=lambda: 4)
    trainer = give_credit(trainer, chosen)
    uids = [f"task{row.group}" for row in rows]
    batch = trainer.convert_to_training_input(_output(rows, by_step), uids)
    batch["values"], batch["rewards"] = None, batch["rewards"].double()
    batch["loss_mask"] = batch["loss_mask"].double()
    batch = trainer.compute_advantages_and_returns(batch)
    advantages = _by_turn(rows, batch["advantages"]) if reduction in ("token_mean", "prompt_mean") else {}
    boundaries = batch.metadata["policy_mini_batch_boundaries"]
    batch = trainer._normalize_advantages(batch, boundaries, batch.metadata["policy_prompt_boundaries"])
    model = TinyModel()
    now = model.log_probs(pad(row.ids for row in rows).long())
    old = now.detach() + pad(row.old_log_probs for row in rows)
    values, mask = (_from_the_left(rows, batch[name]) for name in ("advantages", "loss_mask"))
    loss, _ = PolicyLossRegistry.get(policy)(now, old, values, config.trainer.algorithm, mask, old)
    return Outcome(advantages, model.gradient(loss), len(boundaries))


def _output(rows: list[TinyRow], by_step: bool) -> dict[str, Any]:
    """What SkyRL's generator returns: the whole row is the response, and each turn has its reward at its end."""
    rewards = []
    for row in rows:
        line = TurnRewards([0.0] * len(row.ids))
        for turn, first, end in row.spans:
            line[max(first, end - 1)] = row.rewards[turn]
        line.ends = (*(end for _, _, end in row.spans[:-1]), len(row.ids))
        rewards.append(line)
    last = [at + 1 == len(rows) or rows[at + 1].episode != row.episode for at, row in enumerate(rows)]
    return {
        "prompt_token_ids": [[0] for _ in rows],
        "response_ids": [row.ids for row in rows],
        "rewards": rewards,
        "loss_masks": [row.mask for row in rows],
        "is_last_step": last if by_step else None,
    }


def _from_the_left(rows: list[TinyRow], values: torch.Tensor) -> torch.Tensor:
    """SkyRL aligns rows on the right, and pads the batch with further rows."""
    return pad(line[len(line) - len(row.ids) :].tolist() for row, line in zip(rows, values, strict=False)).double()


def _by_turn(rows: list[TinyRow], advantages: torch.Tensor) -> dict[tuple[int, int], float]:
    found = _from_the_left(rows, advantages)
    return {(row.episode, turn): float(found[at, first]) for at, row in enumerate(rows) for turn, first, _ in row.spans}
