"""What verl makes of the rows of an episode: its trainer with ours before it, and its own losses.

A dictionary stands for TransferQueue, and the tiny model for the workers; all else is verl's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from hydra import compose, initialize_config_module  # type: ignore[import-not-found,unused-ignore]
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass

import treetune.trainers.verl.trainer  # noqa: F401  registers the trainers
from treetune.core.contract import Credit
from treetune.trainers.tiny_episodes import GROUP, TinyModel, TinyRow, cut_rows, pad
from treetune.trainers.verl.several_rows import SHOWN
from treetune.trainers.weights import Case, Outcome

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def cases() -> Iterator[Case]:
    credits: tuple[Credit, ...] = ("outcome", "turn")
    for mode in MODES:
        for credit in credits:
            yield Case(mode, credit, partial(play, credit=credit, loss_agg_mode=mode))
    for policy in SHOWN[1:]:
        for mode in ("token-mean", "seq-mean-token-mean"):
            yield Case(f"{policy}, {mode}", "turn", partial(play, credit="turn", policy=policy, loss_agg_mode=mode))
    for name, override in REFUSED.items():
        yield Case(name, "turn", partial(play, credit="turn", overrides=tuple(override.split())))


REFUSED = {
    "gspo": "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
    "geo_mean": "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
    "rloo": "algorithm.adv_estimator=rloo",
    "gae": "algorithm.adv_estimator=gae",
    "sequence-level importance sampling": "+algorithm.rollout_correction.rollout_is=sequence",
    "an entropy bonus in seq-mean-token-mean": "actor_rollout_ref.actor.entropy_coeff=0.01 "
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "a KL loss in seq-mean-token-sum": "actor_rollout_ref.actor.use_kl_loss=true "
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
}


def play(
    cuts: Sequence[int],
    *,
    credit: Credit,
    policy: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    overrides: tuple[str, ...] = (),
    prompts: int = 2,
    processes: int = 1,
) -> Outcome:
    """Take the optimizer steps of a batch, with this many prompts in a mini-batch."""
    queue = _Queue()
    rows = {f"task{row.group}_{row.episode}_{row.part}": row for row in cut_rows(cuts)}
    for key, row in rows.items():
        queue.rows[key] = _fields(row, credit)
    keys = (
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={policy}",
        f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "trainer.v1.trainer_mode=treetune_sync",
    )
    config = deepcopy(_compose(keys + overrides))
    workers = _Workers(queue, config, rows, processes)
    trainer_base.tq = padding_utils.tq = queue
    trainer = get_trainer_cls("treetune_sync")(config)
    trainer.actor_rollout_wg, trainer.global_steps = workers, 1
    trainer.tokenizer = type("Tokenizer", (), {"eos_token_id": 0})
    trainer.distillation_config = None
    lengths = [{"seq_len": len(row.ids)} for row in rows.values()]
    batch = trainer._balance_batch(KVBatchMeta(list(rows), lengths, "train"), {})
    batch = trainer._compute_advantage(batch, {})
    trainer._update_actor(batch, {})
    return Outcome(_advantages(queue, rows, loss_agg_mode), workers.gradient, workers.steps)


@lru_cache(maxsize=1)
def _compose(overrides: tuple[str, ...]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def _fields(row: TinyRow, credit: Credit) -> dict[str, Any]:
    """What verl's worker puts into the queue."""
    ids, mask = torch.tensor(row.ids), torch.tensor(row.mask[row.given :])
    spans = [(turn, first - row.given, end - row.given) for turn, first, end in row.spans]
    scores = torch.zeros(len(mask))
    scores[-1] = sum(row.rewards)
    return {
        "uid": f"task{row.group}",
        "prompts": ids[: row.given],
        "responses": ids[row.given :],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": scores,
        "extra_fields": {"turn_credit": {"by": credit, "discount": 1.0, "rewards": row.rewards, "spans": spans}},
    }


def _advantages(queue: _Queue, rows: dict[str, TinyRow], loss: str) -> dict[tuple[int, int], float]:
    """By episode and turn. Where rows have weights, only those of token losses are the advantages themselves."""
    if not loss.startswith("token"):
        return {}
    return {
        (row.episode, turn): float(queue.rows[key]["advantages"][first - row.given])
        for key, row in rows.items()
        for turn, first, _ in row.spans
    }


class _Queue:
    """What verl's trainer asks of TransferQueue."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        names = select_fields or list(self.rows[keys[0]])
        known = [name for name in names if all(name in self.rows[key] for key in keys)]
        columns = {name: [self.rows[key][name] for key in keys] for name in known}
        return TensorDict({name: _join(values) for name, values in columns.items()}, batch_size=[len(keys)])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict, tags: Any = None) -> Any:
        for name in fields.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            values = fields[name].unbind() if isinstance(fields[name], torch.Tensor) else list(fields[name])
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return KVBatchMeta(keys, tags or [{} for _ in keys], partition_id)


def _join(values: list[Any]) -> Any:
    """Rows have lengths of their own, also where all have the same."""
    tensors = isinstance(values[0], torch.Tensor)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)


class _Workers:
    """What verl's workers do with a batch: each process takes its part in mini-batches, and gradients are averaged."""

    def __init__(self, queue: _Queue, config: Any, rows: dict[str, TinyRow], processes: int) -> None:
        self._queue, self._rows, self._processes = queue, rows, processes
        self._dispatch_info = {"actor": list(range(processes))}
        self._actor = config.actor_rollout_ref.actor
        self._model = TinyModel()
        self.gradient: Any = 0
        self.steps = 0
        self.episodes: list[set[int]] = []
        """The episodes in each step."""

    def update_actor(self, batch: Any) -> dict[str, Any]:
        size = batch.extra_info["mini_batch_size"] // self._processes
        part = len(batch.keys) // self._processes
        for first in range(0, part, size):
            parts = [batch.keys[each * part + first :][:size] for each in range(self._processes)]
            tokens = sum(int(self._queue.rows[key]["loss_mask"].sum()) for keys in parts for key in keys)
            divisor = batch.extra_info["global_batch_size"]
            self.gradient += sum(self._gradient(keys, tokens, divisor) for keys in parts) / self._processes
            self.steps += 1
            self.episodes.append({self._rows[key].episode for keys in parts for key in keys if key in self._rows})
        return {"metrics": {"mfu": 0.0}}

    def _gradient(self, keys: list[str], tokens: int, divisor: int) -> Any:
        own = [key for key in keys if key in self._rows]
        if not own:
            return 0
        rows = [self._rows[key] for key in own]
        advantages = pad(
            [0.0] * row.given + self._queue.rows[key]["advantages"].tolist() for key, row in zip(own, rows, strict=True)
        )
        actor = omega_conf_to_dataclass(self._actor)
        actor.global_batch_info.update(
            dp_size=self._processes,
            batch_num_tokens=tokens,
            global_batch_size=divisor,
            loss_scale_factor=self._actor.loss_scale_factor,
        )
        now = self._model.log_probs(pad(row.ids for row in rows).long())
        loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            old_log_prob=now.detach() + pad(row.old_log_probs for row in rows),
            log_prob=now,
            advantages=advantages.double(),
            response_mask=pad(row.mask for row in rows).bool(),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        return self._model.gradient(loss)
