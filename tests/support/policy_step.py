"""Steps of GRPO in plain torch, for what gives rollouts but is not a trainer.

    python policy_step.py MODEL GROUP LEARNING_RATE

A line of its input is the rollouts of one step, as JSON, one group after another: the reward, and `branches`, each with
token ids, which of them were sampled, and their logprobs. The model's folder has the new weights afterwards, and a line
is printed: the mean reward, the largest difference between the engine's logprobs and the model's own, and how many
tensors have moved.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


class Policy:
    def __init__(self, place: str, group: int, learning_rate: float) -> None:
        self.place, self.group = place, group
        self.model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, rollouts: list[dict]) -> dict:
        rewards = torch.tensor([rollout["reward"] for rollout in rollouts]).view(-1, self.group)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        largest = 0.0
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            sampled = [self._logprobs(branch) for branch in rollout["branches"]]
            largest = max(largest, *((ours.detach() - theirs).abs().max().item() for ours, theirs in sampled))
            logprobs = torch.cat([ours for ours, _ in sampled])
            (-advantage * logprobs.mean() / len(rollouts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.save_pretrained(self.place)
        moved = sum(not torch.equal(old, new) for old, new in zip(before, self.model.parameters(), strict=True))
        return {"reward": rewards.mean().item(), "difference": largest, "moved": moved}

    def _logprobs(self, branch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the tokens that were sampled: the model's own, and those that the engine gave."""
        ids = torch.tensor([branch["ids"]])
        sampled = torch.tensor(branch["mask"])[1:].bool()
        logprobs = self.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logprobs[sampled], torch.tensor(branch["logprobs"])[1:][sampled]


def main(place: str, group: str, learning_rate: str) -> None:
    torch.set_num_threads(1)
    policy = Policy(place, int(group), float(learning_rate))
    for line in sys.stdin:
        print(json.dumps(policy.step(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
