"""What slime makes of the samples of an episode: our two functions, its own losses, and its schedule of steps.

This is one process without Megatron's groups, and the tiny model stands for Megatron's.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from slime.backends.megatron_utils import cp_utils, loss
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.ppo_utils import compute_cispo_loss, compute_policy_loss

from treetune.core.contract import Contract, Credit
from treetune.errors import CreditError
from treetune.trainers.slime.credit import BY_GROUP, BY_SAMPLE, BY_TURN, CREDIT, check_credit, group_rewards
from treetune.trainers.slime.rollouts import settings_of
from treetune.trainers.slime.samples import HERE
from treetune.trainers.tiny_episodes import TinyModel, TinyRow, cut_rows, pad
from treetune.trainers.weights import Case, Outcome

cp_utils.mpu = loss.mpu = Namespace(
    get_context_parallel_world_size=lambda: 1, get_context_parallel_rank=lambda: 0, is_pipeline_last_stage=lambda: True
)

torch.compiler.set_stance("force_eager")  # to compile slime's losses takes minutes


def cases() -> Iterator[Case]:
    for estimator in (name for name in BY_GROUP if name not in BY_SAMPLE):
        for credit in ("outcome", "turn") if estimator in BY_TURN else ("outcome",):
            for by_token in (False, True):
                name = f"{estimator}, calculate_per_token_loss" if by_token else estimator
                yield Case(name, credit, partial(play, credit=credit, estimator=estimator, by_token=by_token))
    for estimator in BY_SAMPLE:
        yield Case(estimator, "outcome", partial(play, credit="outcome", estimator=estimator))


def play(cuts: Sequence[int], *, credit: Credit, estimator: str, by_token: bool = False) -> Outcome:
    """Take the optimizer steps of a batch."""
    ours = f"{HERE}.advantages" if credit == "turn" else None
    args = Namespace(
        advantage_estimator=estimator, rewards_normalization=True, grpo_std_normalization=True, treetune=None,
        custom_reward_post_process_path=f"{HERE}.group_rewards", custom_advantage_function_path=ours,
        use_rollout_logprobs=False, kl_coef=0.0, use_opd=False, normalize_advantages=False, micro_batch_size=1,
        use_dynamic_batch_size=False, balance_data=False, balance_by_flops=False, eps_clip=0.2,
        eps_clip_high=0.2,
    )  # fmt: skip
    if settings_of(args).rewrites == "keep":
        raise CreditError(f"{estimator} keeps an episode in one sample")
    check_credit(args, Contract(credit=credit))
    rows = cut_rows(cuts)
    _, rewards = group_rewards(args, [_sample(row, credit) for row in rows])
    totals: dict[int, int] = defaultdict(int)
    for row in rows:
        totals[row.episode] += sum(row.mask)
    model = TinyModel()
    now = model.log_probs(pad(row.ids for row in rows).long())
    lengths = [(len(row.ids), len(row.ids) - row.given) for row in rows]
    log_probs = [line[row.given : len(row.ids)] for line, row in zip(now, rows, strict=True)]
    data: dict[str, Any] = {
        "rewards": pickle.loads(pickle.dumps(rewards)),  # between slime's processes
        "log_probs": [each.detach() for each in log_probs],
        "loss_masks": [torch.tensor(row.mask[row.given :]) for row in rows],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
    }
    loss.compute_advantages_and_returns(args, data)
    kl = torch.cat([torch.tensor(row.old_log_probs[row.given :]).double() for row in rows])
    advantages = torch.cat(data["advantages"]).double()
    said = torch.cat(log_probs)
    kl = kl + said.detach() - said  # old - new
    if estimator == "cispo":
        values, _ = compute_cispo_loss(kl, said, advantages, args.eps_clip, args.eps_clip_high)
    else:
        values, _ = compute_policy_loss(kl, advantages, args.eps_clip, args.eps_clip_high, eps_clip_c=None)
    sums = [torch.tensor(float(totals[row.episode])) for row in rows]
    masks = data["loss_masks"]
    reduce = cp_utils.get_sum_of_sample_mean(
        *(data[f"{name}_lengths"] for name in ("total", "response")), masks, sums, by_token
    )
    divisor = sum(totals.values()) if by_token else len(cuts)
    parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    *_, steps = build_dp_schedule(
        args,
        parallel,
        data["total_lengths"],
        global_batch_size=len(cuts),
        rollout_indices=[row.episode for row in rows],
    )
    by_turn = {
        (row.episode, turn): float(line[first - row.given])
        for row, line in zip(rows, data["advantages"], strict=True)
        for turn, first, _ in row.spans
    }
    return Outcome(by_turn, model.gradient(reduce(values) / divisor), len(steps))


def _sample(row: TinyRow, credit: Credit) -> Namespace:
    spans = [(turn, first - row.given, end - row.given) for turn, first, end in row.spans]
    carried = {"by": credit, "discount": 1.0, "rewards": row.rewards, "spans": spans}
    return Namespace(
        index=row.episode,
        rollout_id=row.episode,
        group_index=row.group,
        metadata={CREDIT: carried},
        get_reward_value=lambda _: sum(row.rewards),
    )
