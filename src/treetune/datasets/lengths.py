"""Prompts counted in tokens, to leave out those that are too long, once, at build time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from treetune.datasets.config import DatasetConfig
from treetune.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow as pa


class PromptLengths:
    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokenizer = tokenizer
        self._most = most

    @classmethod
    def of(cls, config: DatasetConfig) -> Self | None:
        """What the config asks for, or None where it sets no limit."""
        if config.max_prompt_length is None:
            return None
        if config.tokenizer is None:
            raise ConfigError([("tokenizer", "is required where max_prompt_length is set")])
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtraError.of("transformers", "local") from None
        return cls(AutoTokenizer.from_pretrained(config.tokenizer), config.max_prompt_length)

    def kept(self, table: pa.Table, dropped: Counter[str]) -> pa.Table:
        import pyarrow as pa

        texts = [
            self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in table["prompt"].to_pylist()
        ]
        counts = [len(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]
        mask = pa.array([count <= self._most for count in counts], pa.bool_())
        dropped[f"longer than {self._most} tokens"] += table.num_rows - (mask.true_count or 0)
        return table.filter(mask)
