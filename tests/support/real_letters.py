"""A tokenizer of transformers with a token for each letter and a few for more: a text has several spellings."""

from __future__ import annotations

from typing import Any


def letters_tokenizer(*, forgets_thoughts: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("i", "n"), ("th", "in"), ("1", "2"), ("l", "o")]
    vocabulary = {text: id for id, text in enumerate([*letters, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    content = "message['content'].split('</think>')[-1]" if forgets_thoughts else "message['content']"
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ " + content + " }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )
