"""A model that is nothing but small: a Qwen3 of one layer with a token for each word, and its warm-up.

    python tiny.py FOLDER [SEED]

The warm-up teaches it to say `ok` to `wait`, and one of the four options to a question, each as likely.
"""

import sys

import torch
from luck import ANSWERS, OPTIONS, TURNS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<end>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""A chat is one word after the other: what is asked, and what is said."""
QUESTIONS = [f"q{number}" for number in range(len(ANSWERS))]
WARM_UP = 60


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: id for id, word in enumerate([*SPECIAL, "wait", "ok", *OPTIONS, *QUESTIONS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that no two questions look alike
    warm_up(model, tokenizer)
    return model


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised steps on chats of `wait` and questions."""
    ids_of = tokenizer.convert_tokens_to_ids
    wait, ok = ids_of(["wait", "ok"])
    options, questions = torch.tensor(ids_of(list(OPTIONS))), torch.tensor(ids_of(QUESTIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(WARM_UP):
        asks = torch.rand(32, TURNS) < 0.5
        ids = torch.tensor([wait, ok] * TURNS).repeat(32, 1)
        ids[:, 0::2][asks] = questions[torch.randint(len(questions), (int(asks.sum()),))]
        ids[:, 1::2][asks] = options[torch.randint(len(options), (int(asks.sum()),))]
        said = model(input_ids=ids).logits[:, 0::2].log_softmax(-1)
        loss = -torch.where(asks, said[..., options].mean(-1), said[..., ok]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: str, seed: str = "0") -> None:
    torch.manual_seed(int(seed))
    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
