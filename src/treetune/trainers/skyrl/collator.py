"""Items of a PromptDataset as one batch of tensors, padded on the left to a fixed length.

    batch = PromptCollator(tokenizer, 512)(items)
    batch["input_ids"].shape      # (len(items), 512)

Tensors are torch's, or numpy's where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treetune.errors import TasksetError, UsageError
from treetune.rows.prompt_tokens import PromptTokens


class PromptCollator:
    def __init__(self, tokenizer: Any, max_prompt_length: int, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._length = tokenizer, max_prompt_length
        self._tokens = PromptTokens(tokenizer, arguments)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`input_ids` and `attention_mask` (int64), and lists of `prompt`, `env_class`, `env_extras` and `uid`."""
        import numpy as np

        ids = np.full((len(items), self._length), self._padding(), np.int64)
        mask = np.zeros_like(ids)
        for row, (item, found) in enumerate(
            zip(items, self._tokens.ids([item["prompt"] for item in items]), strict=True)
        ):
            if len(found) > self._length:
                raise TasksetError(f"{item.get('uid')} has {len(found)} tokens, more than {self._length}")
            ids[row, self._length - len(found) :] = found
            mask[row, self._length - len(found) :] = 1
        fields = {name: [item.get(name) for item in items] for name in ("prompt", "env_class", "env_extras", "uid")}
        return {"input_ids": _tensor(ids), "attention_mask": _tensor(mask), **fields}

    def _padding(self) -> int:
        for name in ("pad_token_id", "eos_token_id"):
            if isinstance(found := getattr(self._tokenizer, name, None), int):
                return found
        raise UsageError("the tokenizer has no padding token", remedy="set tokenizer.pad_token")


def _tensor(array: Any) -> Any:
    try:
        import torch
    except ImportError:
        return array
    return torch.from_numpy(array)
