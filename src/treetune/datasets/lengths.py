"""Prompts counted in tokens, to leave out those that are too long, once, at build time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from treetune.datasets.config import DatasetConfig
from treetune.errors import ConfigError, TasksetError
from treetune.rows.prompt_lengths import PromptTokens, load_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class PromptLengths:
    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokens = PromptTokens(tokenizer)
        self._most = most

    @classmethod
    def of(cls, config: DatasetConfig) -> Self | None:
        """What the config asks for, or None where it sets no limit."""
        if config.max_prompt_length is None:
            return None
        if config.tokenizer is None:
            raise ConfigError([("tokenizer", "is required where max_prompt_length is set")])
        return cls(load_tokenizer(config.tokenizer), config.max_prompt_length)

    def kept(self, table: pa.Table, dropped: Counter[str]) -> pa.Table:
        import pyarrow as pa

        prompts = table["prompt"].to_pylist()
        longer, faults = self._tokens.above(self._most, prompts)
        if faults:
            position, fault = min(faults.items())
            raise TasksetError(f"{fault}, in the prompt {prompts[position]!r:.200}")
        dropped[f"longer than {self._most} tokens"] += len(longer)
        return table.filter(pa.array([position not in longer for position in range(table.num_rows)], pa.bool_()))
