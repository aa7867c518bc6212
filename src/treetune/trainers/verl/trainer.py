"""verl's v1 trainers, in which an episode counts once, and turns have their own advantages.

    trainer.v1.trainer_mode=treetune_sync        # or treetune_colocate_async, treetune_separate_async

A setting makes verl import this module in each of its processes: see `several_rows.py`. A batch in which each episode
is one row, with credit by outcome, takes verl's own way. Otherwise three things differ: advantages are those of
`credit.py`, weighed by verl's `loss_agg_mode`; all rows of an episode are in one optimizer step; and there are as many
steps as with one row for each episode.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from omegaconf import open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from treetune.trainers.credit import Row, row_advantages
from treetune.trainers.verl.several_rows import JOINED, PREFIX, check_rows


class JoinedRows:
    """What comes before one of verl's own trainers in the order of classes."""

    config: Any
    _mode: str
    _steps = _rows = 0
    """The optimizer steps of the batch, and the rows in each; 0 if each episode is one row."""

    def __init__(self, config: Any) -> None:
        check_rows(config)
        actor = config.actor_rollout_ref.actor
        with open_dict(config):
            config.trainer.v1.trainer_mode = self._mode  # verl reads its settings by this name
            config.trainer.v1[JOINED.rpartition(".")[2]] = True
            if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
                actor.loss_scale_factor = config.actor_rollout_ref.rollout.response_length  # else it is the longest row
        super().__init__(config)  # type: ignore[call-arg]

    # As many optimizer steps as there are with one row for each episode, and each episode in one of them

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = Counter(map(_episode_of, batch.keys))
        metrics["treetune/rows_per_episode"] = len(batch.keys) / max(1, len(rows))
        self._steps = self._rows = 0
        if len(rows) == len(batch.keys):
            return super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        self._steps = math.ceil(len(rows) / (actor.ppo_mini_batch_size * n))
        lengths: Counter[str] = Counter()
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            lengths[_episode_of(key)] += tag["seq_len"]
        step_of = _divide(lengths, self._steps)
        self._rows = max(Counter(step_of[_episode_of(key)] for key in batch.keys).values())
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        self._order(batch, step_of)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if not self._steps:
            return super()._get_required_batch_multiple(dp_size)  # type: ignore[misc, no-any-return]
        multiple = math.lcm(
            self.config.actor_rollout_ref.rollout.n, *(dp_size * size for size in self._micro_batches())
        )
        self._dp_size, self._rows = dp_size, math.ceil(self._rows / multiple) * multiple
        return self._steps * self._rows

    def _micro_batches(self) -> Iterator[int]:
        """Sizes of micro-batches in a process: without dynamic ones, verl takes only whole ones."""
        own = self.config.actor_rollout_ref
        yield 1
        if not own.actor.use_dynamic_bsz:
            yield own.actor.ppo_micro_batch_size_per_gpu or 1
        for config in (own.rollout, own.ref):
            if not config.log_prob_use_dynamic_bsz:
                yield config.log_prob_micro_batch_size_per_gpu or 1

    def _order(self, batch: Any, step_of: Mapping[str, int]) -> None:
        """Reorder the rows: each process gets an equal part of the batch, and of that an equal part for each step."""
        steps: list[list[int]] = [[] for _ in range(self._steps)]
        padding = []
        for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding"):
                padding.append(row)
            else:
                steps[step_of[_episode_of(key)]].append(row)
        parts: list[list[int]] = [[] for _ in range(self._dp_size)]
        for own in steps:
            missing = self._rows - len(own)
            own += padding[:missing]
            del padding[:missing]
            lengths = [batch.tags[row]["seq_len"] for row in own]
            for part, chosen in zip(
                parts, get_seqlen_balanced_partitions(lengths, self._dp_size, equal_size=True), strict=True
            ):
                part += [own[at] for at in chosen]
        batch.reorder([row for part in parts for row in part])

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._mini_batches():
            return super()._update_actor(batch, metrics)  # type: ignore[misc]

    @contextlib.contextmanager
    def _mini_batches(self) -> Iterator[None]:
        """Set verl's size of a mini-batch to the rows of a step, which is also what its loss divides by."""
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        own = actor.ppo_mini_batch_size
        try:
            if self._steps:
                actor.ppo_mini_batch_size = self._rows // n
            yield
        finally:
            actor.ppo_mini_batch_size = own

    # Advantages

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        queue, place, tags = trainer_base.tq, {"keys": batch.keys, "partition_id": batch.partition_id}, batch.tags
        extra = list(queue.kv_batch_get(**place, select_fields=["extra_fields"])["extra_fields"])
        credits = [fields.get("turn_credit") for fields in extra]  # rows that other agent loops played have none
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        if not self._steps and not any(each and (each["by"] == "turn" or not each["rewards"]) for each in credits):
            return batch
        data = queue.kv_batch_get(**place, select_fields=["uid", "response_mask", "rm_scores"])
        columns = list(data["uid"]), data["response_mask"].unbind(), data["rm_scores"].unbind()
        rows = [_row(*each) for each in zip(place["keys"], tags, credits, *columns, strict=True)]
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        found = row_advantages(
            rows,
            actor.loss_agg_mode,
            rows=self._rows or 1,
            episodes=actor.ppo_mini_batch_size * n if self._rows else 1,
            by_deviation=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),
        )
        advantages = torch.nested.as_nested_tensor([torch.tensor(row) for row in found], layout=torch.jagged)
        fields = TensorDict({"advantages": advantages, "returns": advantages}, batch_size=len(rows))
        return queue.kv_batch_put(**place, fields=fields)


def _row(key: str, tag: Mapping[str, Any], credit: Mapping[str, Any] | None, group: str, mask: Any, scores: Any) -> Row:
    credit = credit or {"rewards": [float(scores.sum())], "spans": [(0, 0, len(mask))]}
    return Row(
        group=group,
        episode=None
        if tag.get("is_padding")
        else _episode_of(key),  # verl's padding is a copy of a row, fields and all
        rewards=credit["rewards"],
        spans=credit["spans"],
        length=len(mask),
        credit=credit.get("by", "outcome"),
        discount=credit.get("discount", 1.0),
        trained=int(mask.sum()),
    )


def _episode_of(key: str) -> str:
    """The keys of rows are `UID_SESSION_INDEX`."""
    return key.rpartition("_")[0]


def _divide(lengths: Mapping[str, int], steps: int) -> dict[str, int]:
    """Assign episodes to optimizer steps: the same number to each, and about the same number of tokens."""
    most, loads, counts = math.ceil(len(lengths) / steps), [0] * steps, [0] * steps
    found = {}
    for episode in sorted(lengths, key=lambda each: -lengths[each]):
        step = min((at for at in range(steps) if counts[at] < most), key=lambda at: loads[at])
        found[episode] = step
        loads[step] += lengths[episode]
        counts[step] += 1
    return found


for _name, _trainer in list(TRAINER_REGISTRY.items()):
    if not _name.startswith(PREFIX):
        register_trainer(PREFIX + _name)(type(f"Joined{_trainer.__name__}", (JoinedRows, _trainer), {"_mode": _name}))
