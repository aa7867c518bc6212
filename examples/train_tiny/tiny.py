"""A model that is nothing but small: a Llama of two layers with a token for each letter, and its warm-up."""

import random

import torch
from reverse import LETTERS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}<assistant>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {text: id for id, text in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str], until: float) -> int:
    """A few supervised steps, until so many answers are right: with no right answer there is nothing to reinforce."""
    rng = random.Random(len(words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(300):
        some = rng.choices(words, k=128)
        ids = torch.tensor(tokenizer([f"<user>{word}<end><assistant>{word[::-1]}<end>" for word in some])["input_ids"])
        logits = model(input_ids=ids).logits[:, 5:-1]  # where the answer's four tokens are foretold
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 6:], reduction="none")
        if (-losses.detach().sum(1)).exp().mean() >= until:
            return step
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"the warm-up did not get {until} of the answers right")
