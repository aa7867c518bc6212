"""EpisodeTrainer: a GRPOTrainer in which each episode counts once, and turns get the credit that their task declares.

    EpisodeTrainer("MODEL", args=args, **tasks.trainer_arguments(512))

TRL's loss takes an advantage for each token if a subclass computes them. A lost episode is not a member of its group,
and the loss is not divided by it.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from treetune.trainers.credit import BY_TOKEN, Row, row_advantages, turn_advantages
from treetune.trainers.trl.rollouts import CREDIT, check_settings

_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


class EpisodeTrainer(GRPOTrainer):  # type: ignore[misc]
    def check_turn_credit(self) -> None:
        """Raise if credit by turn is not possible with the settings of this trainer."""
        check_settings(self.args)

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        # Of all processes: a row for each episode, and a column for each reward function.
        self._rewards: torch.Tensor = super()._calculate_rewards(*arguments)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        mine = slice(first, first + len(inputs))
        lost = self._rewards.isnan().all(dim=1)
        played = len(lost) - int(lost.sum())
        rows = self._rows_of(inputs, mine) if CREDIT in inputs[0] else []
        if any(row.credit == "turn" for row in rows):
            advantages = torch.zeros(output["completion_ids"].shape)
            for row, values in zip(advantages, self._advantages_of(rows)[mine], strict=True):
                row[: len(values)] = torch.tensor(values)
            output["advantages"] = advantages.to(output["advantages"].device)
        elif 0 < played < len(lost) and self.loss_type not in (*BY_TOKEN, "vespo"):
            output["advantages"] *= len(lost) / played
        if played < len(lost):
            self._mask(output, lost[mine])
        return output

    def _rows_of(self, inputs: list[dict[str, Any]], mine: slice) -> list[Row]:
        """Return the rows of all processes. What other reward functions or their weights add stands on the last turn,
        as everything does that changes the reward of an episode."""
        totals = (self._rewards[mine] * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        rows: list[Row] = [one[CREDIT] for one in inputs]
        rests = totals.cpu() - torch.tensor([sum(row.rewards) for row in rows])
        rows = [
            row._replace(rewards=[*row.rewards[:-1], row.rewards[-1] + rest]) if row.rewards else row
            for row, rest in zip(rows, rests.tolist(), strict=True)
        ]
        size = self.num_generations if self.model.training else self.num_generations_eval
        return [row._replace(group=at // size, episode=at) for at, row in enumerate(gather_object(rows))]

    def _advantages_of(self, rows: list[Row]) -> list[list[float]]:
        by_group = self.scale_rewards == "group"
        advantages = row_advantages(rows, self.loss_type, by_deviation=by_group, epsilon=_EPSILON)
        if self.scale_rewards != "batch":
            return advantages
        by = _deviation(rows) + _EPSILON
        return [[value / by for value in values] for values in advantages]

    def _mask(self, output: dict[str, Any], lost: torch.Tensor) -> None:
        """Leave out lost episodes where the loss counts tokens."""
        given = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
        output["tool_mask"] = given.masked_fill(lost.unsqueeze(1), 0)
        trained = (output["completion_mask"] * output["tool_mask"]).sum()
        output["num_items_in_batch"] = self.accelerator.gather(trained).sum()


def _deviation(rows: list[Row]) -> float:
    """Return the standard deviation of the returns in a batch, as that of a group is computed."""
    played = [row for row in rows if row.rewards]
    if not played:
        return 0.0
    centred = turn_advantages(
        [row.rewards for row in played],
        credit=played[0].credit,
        discount=played[0].discount,
        by_deviation=False,
    )
    squares = sum(sum(value * value for value in own) / len(own) for own in centred)
    return float((squares / max(1, len(played) - 1)) ** 0.5)
