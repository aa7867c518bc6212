"""What tokens say: a tokenizer of a folder or a name, by which ids become texts.

    texts = load_texts("Qwen/Qwen3-0.6B")
    texts([9707, 11])          # ["Hello", ","]

The `tokenizers` library reads a folder's `tokenizer.json` alone, in a tenth of the time and memory of transformers,
which is asked where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import MissingExtraError, UsageError

Texts = Callable[[list[int]], list[str]]


def tokenizer_of(model: str) -> str | None:
    """The folder of a local model that has its own tokenizer."""
    path = model.removeprefix("local:")
    return path if model.startswith("local:") and (Path(path) / "tokenizer.json").is_file() else None


@lru_cache(maxsize=4)
def load_texts(name: str) -> Texts:
    decode = _load_decoder(name)
    known: dict[int, str] = {}

    def texts(ids: list[int]) -> list[str]:
        for one in ids:
            if one not in known:
                known[one] = decode(one)
        return [known[one] for one in ids]

    return texts


def _load_decoder(name: str) -> Callable[[int], str]:
    file = Path(name) / "tokenizer.json"
    if not file.is_file():
        loaded = load_tokenizer(name)
        return lambda one: str(loaded.decode([one]))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError.of("tokenizers", "local") from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # of no type of its own
        raise UsageError(f"{file} is no tokenizer: {error}") from None
    return lambda one: str(tokenizer.decode([one], skip_special_tokens=False))
