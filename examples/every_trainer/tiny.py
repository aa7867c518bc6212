"""A model that is nothing but small: a Qwen3 of two layers with a token for each byte, and its warm-up.

    python tiny.py FOLDER                       # for letters.py
    python tiny.py FOLDER TARGET [SHARE]        # for any tasks with gold answers, until that share is right (0.4)
    python tiny.py FOLDER TARGET SHARE TEXT     # and for agents that have a draft, and then ask for TEXT

Engines refuse attention heads of less than 32 numbers. For letters.py the warm-up teaches it to write a few letters and
digits, of which four in ten are small letters, and to end its turn: a model that never ends one has no second turn. For
other tasks it is taught their gold answers for a while: with no right answer there would be nothing to reinforce.
"""

import random
import string
import sys

import torch
from letters import TURNS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from treetune import load_taskset

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WARM_UP = 150


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: id for id, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Supervised steps on chats of letters and digits; the last loss."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(WARM_UP):
        rows, masks = zip(*(chat(tokenizer, rng) for _ in range(32)), strict=True)
        longest = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        said = torch.tensor([mask + [0] * (longest - len(mask)) for mask in masks])[:, 1:].bool()
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[said], ids[:, 1:][said])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def chat(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """The tokens of a chat, and which of them the model says."""
    ids, said = [], []
    for turn in range(TURNS):
        asked = "Again." if turn else f"Write small letters, {rng.randrange(256)}."
        opening = "\n" * bool(turn) + f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        answer = "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(3, 6))) + "<|im_end|>"
        for text, mine in ((opening, 0), (answer, 1)):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            said += [mine] * len(tokens)
    return ids, said


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, target: str, share: float, follow_up: str | None
) -> None:
    """Supervised steps on gold answers, until so many are right. Every second chat has a draft, which is the gold
    answer of any task, and a follow-up."""
    taskset, rng = load_taskset(target), random.Random(0)
    tasks = list(taskset.select_tasks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1000):
        some = rng.choices(tasks, k=64)
        chats = [task.messages for task in some]
        if follow_up is not None:
            drafts = [taskset.gold(task) for task in rng.choices(tasks, k=32)]
            chats[::2] = [
                [*chat, {"role": "assistant", "content": draft}, {"role": "user", "content": follow_up}]
                for chat, draft in zip(chats[::2], drafts, strict=True)
            ]
        asked = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        told = [f"{taskset.gold(task)}{tokenizer.eos_token}" for task in some]
        whole = tokenizer([a + b for a, b in zip(asked, told, strict=True)], padding=True, return_tensors="pt")
        logits = model(**whole).logits[:, :-1]
        ids = whole["input_ids"][:, 1:]
        lengths = [len(tokenizer(text)["input_ids"]) for text in told]
        mine = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * mine
        right = (-losses.detach().sum(1)).exp().mean().item()
        if step % 50 == 0 or right >= share:
            print(f"step {step}: {right:.3f} of the answers would be right", flush=True)
        if right >= share:
            return
        losses.sum().div(mine.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"the warm-up did not get {share} of the answers right")


def main(folder: str, target: str | None = None, share: float = 0.4, follow_up: str | None = None) -> None:
    torch.manual_seed(0)
    random.seed(0)  # gold answers may be drawn
    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if target is None:
        warm_up(model, tokenizer)
    else:
        teach(model, tokenizer, target, float(share), follow_up)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
