"""Runs in verl's virtual environment: examples/turn_credit by verl's v1 trainer, until 90 % of the answers are right.

    python verl_luck_side.py luck [--seeds 10] [--first 0]      # a JSON line for each training

verl's own trainer, with ours before it, computes advantages, divides mini-batches and names what its loss divides by;
the loss is verl's. A dictionary stands for TransferQueue, and for its workers a loop in this process, which samples
from the model and takes the optimizer steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass

from treetune.core.environment import Action
from treetune.trainers.verl import weights

EXAMPLE = Path(__file__).parents[2] / "examples" / "turn_credit"
sys.path.insert(0, str(EXAMPLE))

import luck  # noqa: E402
from tiny import make_model, make_tokenizer  # noqa: E402

PROMPTS, GROUP, RATE, MOST, ENOUGH, MEAN_OF = 8, 8, 2e-3, 400, 0.9, 3
"""As in the example: tasks of a step, episodes of a task, the learning rate, and when a training ends."""
KEYS = (
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "trainer.v1.trainer_mode=treetune_sync",
)


class Workers:
    """What verl's workers would do, in this process."""

    def __init__(self, queue: Any, config: Any, seed: int) -> None:
        self.queue, self.config = queue, config.actor_rollout_ref.actor
        self._dispatch_info = {"actor": [0]}
        torch.manual_seed(seed)
        random.seed(seed)
        self.tokenizer = make_tokenizer()
        self.model = make_model(self.tokenizer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01)

    def play(self, tasks: list[Any], credit: str) -> tuple[dict[str, dict[str, Any]], float]:
        """Play each task in a group, and return the rows by key, with the share of right answers."""
        encode, decode = self.tokenizer.convert_tokens_to_ids, self.tokenizer.convert_ids_to_tokens
        games = [luck.Game(task) for task in tasks for _ in range(GROUP)]
        ids = torch.tensor([[encode(game.start())] for game in games])
        paid: list[list[float]] = [[] for _ in games]
        right = []
        for _ in range(luck.TURNS):
            with torch.no_grad():
                said = torch.multinomial(self.model(input_ids=ids).logits[:, -1].softmax(-1), 1)
            steps = [game.step(Action.of(decode(int(token)))) for game, token in zip(games, said, strict=True)]
            for rewards, step in zip(paid, steps, strict=True):
                rewards.append(step.reward)
            right += [step.info["metrics"]["right"] for step in steps if step.done]
            ids = torch.cat([ids, said], 1)
            if not steps[0].done:
                ids = torch.cat([ids, torch.tensor([[encode(step.observation.content)] for step in steps])], 1)
        mask = torch.tensor([1, 0] * luck.TURNS)[:-1]
        spans = [(turn, 2 * turn, 2 * turn + 1) for turn in range(luck.TURNS)]
        rows = {}
        for number, (row, rewards) in enumerate(zip(ids, paid, strict=True)):
            scores = torch.zeros(len(mask))
            scores[0::2] = torch.tensor(rewards)
            rows[f"task{number // GROUP}_{number % GROUP}_0"] = {
                "uid": f"task{number // GROUP}", "prompts": row[:1], "responses": row[1:], "input_ids": row,
                "position_ids": torch.arange(len(row)), "response_mask": mask, "loss_mask": mask, "rm_scores": scores,
                "extra_fields": {
                    "turn_credit": {"by": credit, "discount": 1.0, "rewards": rewards, "spans": spans},
                },
            }  # fmt: skip
        return rows, sum(right) / len(right)

    def update_actor(self, batch: Any) -> dict[str, Any]:
        size = batch.extra_info["mini_batch_size"]
        for first in range(0, len(batch.keys), size):
            rows = [self.queue.rows[key] for key in batch.keys[first : first + size]]
            ids, mask = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "loss_mask"))
            now = self.model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            actor = omega_conf_to_dataclass(self.config)
            actor.global_batch_info.update(
                dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=batch.extra_info["global_batch_size"]
            )
            loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
                old_log_prob=now.detach(),
                log_prob=now,
                advantages=torch.stack([row["advantages"] for row in rows]),
                response_mask=mask.bool(),
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
            )
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor.grad_clip)
            self.optimizer.step()
        return {"metrics": {"mfu": 0.0}}


def train(task: str, credit: str, seed: int, most: int) -> dict[str, Any]:
    began, right = time.process_time(), []
    queue, config = weights._Queue(), deepcopy(weights._compose(KEYS))
    workers = Workers(queue, config, seed)
    trainer_base.tq = padding_utils.tq = queue
    trainer = get_trainer_cls("treetune_sync")(config)
    trainer.actor_rollout_wg, trainer.tokenizer, trainer.global_steps = workers, workers.tokenizer, 1
    trainer.distillation_config = None
    tasks = list(getattr(luck, task.capitalize())().load_tasks())
    while len(right) < most and (len(right) < MEAN_OF or sum(right[-MEAN_OF:]) / MEAN_OF < ENOUGH):
        first = PROMPTS * len(right) % len(tasks)
        rows, share = workers.play(tasks[first : first + PROMPTS], credit)
        right.append(round(share, 4))
        queue.rows = rows
        tags = [{"seq_len": len(row["input_ids"])} for row in rows.values()]
        batch = trainer._balance_batch(KVBatchMeta(list(rows), tags, "train"), {})
        trainer._update_actor(trainer._compute_advantage(batch, {}), {})
    seconds = round(time.process_time() - began, 1)
    found = {"trainer": "verl v1", "task": task, "credit": credit, "seed": seed, "steps": len(right)}
    return {**found, "seconds": seconds, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["luck", "final", "quiz"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=MOST)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    for seed in range(args.first, args.first + args.seeds):
        for credit in ("turn", "outcome"):
            print(json.dumps(train(args.task, credit, seed, args.most)), flush=True)


if __name__ == "__main__":
    main()
