"""One step of GRPO in plain torch, for what gives rollouts but is no trainer.

    python policy_step.py MODEL GROUP LEARNING_RATE < rollouts.json

Rollouts are token ids, which of them were sampled, their logprobs and the reward, one group after another. The model's
folder has the new weights afterwards. Prints the mean reward, the largest difference between the engine's logprobs and
the model's own, and how many of its tensors have moved.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(place: str, group: int, learning_rate: float) -> None:
    torch.set_num_threads(1)
    rollouts = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rewards = torch.tensor([rollout["reward"] for rollout in rollouts]).view(-1, group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    largest = 0.0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        ids = torch.tensor([rollout["ids"]])
        sampled = torch.tensor(rollout["mask"])[1:].bool()
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][sampled]
        theirs = torch.tensor(rollout["logprobs"])[1:][sampled]
        largest = max(largest, (logprobs.detach() - theirs).abs().max().item())
        (-advantage * logprobs.mean() / len(rollouts)).backward()
    optimizer.step()
    model.save_pretrained(place)
    moved = sum(not torch.equal(old, new.detach()) for old, new in zip(before, model.parameters(), strict=True))
    print(json.dumps({"reward": rewards.mean().item(), "difference": largest, "moved": moved}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
