"""Runs in verl's virtual environment, and says in JSON what our trainer makes of traps: see `test_verl_rows.py`."""

from __future__ import annotations

import json
from typing import Any

import torch

from treetune.trainers import tiny_episodes
from treetune.trainers.credit import turn_advantages
from treetune.trainers.tiny_episodes import rewards_of
from treetune.trainers.verl import weights
from treetune.trainers.weights import CUTS

ONE, TWO = CUTS["1"], CUTS["2"]
fields, workers = weights._fields, weights._Workers
seen: list[Any] = []


class Watched(workers):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        seen.append(self)

    def update_actor(self, batch):
        self.rows = batch.extra_info["mini_batch_size"]
        return super().update_actor(batch)


weights._Workers = Watched


def play(cuts, change=None, credit="outcome", **options):
    """What the trainer made of it; `change` may change the fields of each row before."""

    def changed(row, credit):
        found = fields(row, credit)
        if change is not None:
            change(row, found)
        return found

    weights._fields = changed
    return weights.play(cuts, credit=credit, **options), seen[-1]


def forget_last(row, found):
    """The second row of the first episode was cut off before its first sampled token."""
    if (row.episode, row.part) == (0, 1):
        found["response_mask"] = found["loss_mask"] = torch.zeros_like(found["response_mask"])


def lose(row, found):
    if row.episode == 1:
        found["extra_fields"]["turn_credit"] |= {"rewards": [], "spans": []}
        found["response_mask"] = found["loss_mask"] = torch.zeros_like(found["response_mask"])


def play_otherwise(row, found):
    """The first group is played by verl's own agent loops, which know of no turns."""
    if row.group == 0:
        del found["extra_fields"]["turn_credit"]


def apart(one, other):
    return float((one - other).norm() / other.norm())


def first_of(done, episode=0):
    return done.advantages[episode, 0]


def main() -> None:
    answer: dict[str, Any] = {}
    answer["steps"] = {
        name: [sorted(step) for step in play(cuts, prompts=1)[1].episodes] for name, cuts in CUTS.items()
    }
    whole, several = play(ONE, credit="turn"), play(CUTS["unequal"], credit="turn", processes=2)
    answer["processes"] = apart(several[0].gradient, whole[0].gradient)
    micro = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5", "actor_rollout_ref.actor.use_dynamic_bsz=false")
    answer["rows"] = play(TWO, processes=2, overrides=micro)[1].rows
    answer["whole"], answer["without"] = (first_of(play(TWO, change)[0]) for change in (None, forget_last))
    answer["others"] = first_of(play(TWO, play_otherwise)[0])
    _, worker = play(TWO)
    rows = worker._queue.rows
    answer["padding"] = [float(row["advantages"].abs().max()) for key, row in rows.items() if key.startswith("pad")]
    answer["lost"] = first_of(play(TWO, lose, loss_agg_mode="token-mean")[0])
    played = [rewards_of(episode) for episode in (0, 2, 3)]
    answer["expected"] = turn_advantages(played)[0][0]
    tiny_episodes.rewards_of = lambda episode: [0.0] * (len(rewards_of(episode)) - 1) + rewards_of(episode)[-1:]
    by_verl, by_turn = play(ONE)[0], play(ONE, credit="turn")[0]
    answer["final"] = max(abs(by_turn.advantages[turn] - value) for turn, value in by_verl.advantages.items())
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
