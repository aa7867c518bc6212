"""How a GRPOTrainer samples: what fits into the model, and all processes in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treetune.errors import UsageError

Generate = Callable[[list[list[int]], Any], tuple[list[list[int]], list[list[float]] | None]]
"""Samples one answer to each prompt: (prompts in tokens, the trainer) -> (tokens sampled, their logprobs if known)."""


def pad_to_longest_batch(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
    """Processes sample together: vLLM as a server and sharded weights want all of them to ask equally often, and each
    for equally many answers. Whoever needs fewer asks for some that nobody reads."""
    if getattr(getattr(trainer, "accelerator", None), "num_processes", 1) == 1:
        return prompts
    from accelerate.utils import gather_object

    most: int = max(gather_object([len(prompts)]))
    spare = prompts[:1] or [[trainer.processing_class.pad_token_id]]
    return prompts + spare * (most - len(prompts))


def sample_by_trainer(prompts: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]] | None]:
    sample = getattr(trainer, "_generate_single_turn", None)
    if sample is None:
        raise UsageError("this TRL samples in another way than 1.16 does", remedy="pass generate=... to TrlTasks")
    completions, logprobs = sample(prompts, None, {}, 1)
    return completions, logprobs


def longest_prompt(trainer: Any) -> int | None:
    """How long a prompt may be for an answer to fit behind it."""
    config = trainer.model.config
    trained: int | None = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    limits = [limit for limit in (trained, getattr(trainer.args, "vllm_max_model_length", None)) if limit]
    if not limits:
        return None
    answer: int = trainer.args.max_completion_length or 1
    if answer >= min(limits):
        raise UsageError(
            f"answers of {answer} tokens leave no room for a prompt in a context of {min(limits)}",
            remedy="lower max_completion_length in GRPOConfig: it is that of one turn",
        )
    return min(limits) - answer
