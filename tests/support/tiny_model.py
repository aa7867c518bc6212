"""Makes a model folder that loads offline and is nothing but small; runs where `transformers` is installed.

    python tiny_model.py FOLDER [forgets]

The tokenizer has a token per byte, so every text survives it; the Qwen2 of two layers has a config and no weights. One
that `forgets` leaves the thoughts of earlier answers out, and has tokens of several bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FORGETS = CHAT_TEMPLATE.replace("message['content']", "(message['content'] or '').split('</think>')[-1]")
MERGES = [
    ("o", "n"),
    ("t", "h"),
    ("th", "e"),
    ("C", "o"),
    ("Co", "un"),
    ("u", "n"),
    ("i", "t"),
    ("r", "e"),
    ("re", "d"),
]


def make_model(folder: Path, forgets: bool = False) -> None:
    from transformers import Qwen2Config

    tokenizer = make_tokenizer(MERGES if forgets else [])
    tokenizer.chat_template = FORGETS if forgets else CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def make_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: id for id, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), forgets="forgets" in sys.argv[2:])
