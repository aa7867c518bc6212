"""Prompts rendered by a tokenizer's chat template and counted in tokens, as trainers' loaders do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from treetune.errors import MissingExtraError, UsageError, described
from treetune.validate.chunks import Chunk
from treetune.validate.report import Report


class Lengths:
    """`tokenizer`: a tokenizer, or the folder or name of one."""

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokenizer = _loaded(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise UsageError(
                f"{tokenizer if isinstance(tokenizer, str) else 'the tokenizer'} has no chat template",
                remedy="name that of an instruction-tuned model: trainers render prompts with it",
            )
        self._most = most
        tokens = sorted(_special_tokens(self._tokenizer), key=len, reverse=True)
        # A pattern that Arrow's engine takes too; one that matches nothing where there are no such tokens.
        self.special = re.compile("|".join(map(re.escape, tokens)) or r"[^\s\S]")

    def take(self, chunk: Chunk, report: Report) -> None:
        """Count the prompts of a chunk. Those that are no messages are told by another rule."""
        rows = chunk.rows_at(np.arange(len(chunk.numbers)))
        texts: list[str] = []
        numbers: list[int] = []
        for number, row in zip(chunk.numbers, rows, strict=True):
            prompt = row.get("prompt")
            if not isinstance(prompt, list) or not prompt:
                continue
            try:
                texts.append(self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
                numbers.append(number)
            except Exception as error:  # whatever a template raises
                report.add("template-fails", chunk.file, described(error), [number], chunk.unit)
        if not texts:
            return
        counts = [len(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for number, count in zip(numbers, counts, strict=True):
            if count > self._most:
                found = f"{count:,} tokens, the limit is {self._most:,}"
                report.add("prompt-too-long", chunk.file, found, [number], chunk.unit)


def _special_tokens(tokenizer: Any) -> set[str]:
    """Also those that only the chat template uses, such as one before each turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return {token for token in tokens if token}


def _loaded(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError.of("transformers", "local") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} is no tokenizer: {str(error).partition(chr(10))[0]}") from None
