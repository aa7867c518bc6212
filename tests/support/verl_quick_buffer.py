"""verl's replay buffer, which asks more often whether the episodes of a step have ended: verl waits for 2 seconds."""

from __future__ import annotations

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickBuffer(ReplayBuffer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, poll_interval=0.02)
