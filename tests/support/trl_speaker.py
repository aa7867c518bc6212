"""What speaks for TRL's trainer in fast tests."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from chat_templates import Letters, plain


class Speaker:
    """A trainer that says what it is told to: turn by turn, the same in all episodes."""

    def __init__(self, *says, context=None, logprobs=False, template=plain):
        self.processing_class = Letters(template)
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context))
        self.args = SimpleNamespace(max_completion_length=8)
        self.says, self.logprobs = says, logprobs
        self.calls = []

    def _generate_single_turn(self, prompts, images, fields, num_generations):
        assert (images, fields, num_generations) == (None, {}, 1)
        said = self.processing_class(self.says[len(self.calls)])["input_ids"]
        self.calls.append(prompts)
        return [said] * len(prompts), [[-0.5] * len(said)] * len(prompts) if self.logprobs else None

    def text(self, ids):
        return self.processing_class.decode(ids)


def rollout(tasks, trainer, indices):
    return tasks.rollout([[{"role": "user", "content": "", "task_index": index}] for index in indices], trainer)


@dataclass
class RolloutSample:
    """As TRL's asynchronous trainer takes it; `trl_async_side.py` compares their fields."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None
