"""Runs in SkyRL's virtual environment: our PromptDataset beside SkyRL's own, and in its trainer's loader.

    python prompt_side.py WHAT MODEL FILES...

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import typing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import typing_extensions

# SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def ours(files: list[str], tokenizer: Any, limit: int) -> Any:
    from treetune.trainers.skyrl import PromptDataset

    return PromptDataset(files, tokenizer, limit, quiet=True)


def theirs(files: list[str], tokenizer: Any, limit: int) -> Any:
    from skyrl.train.dataset import PromptDataset

    return PromptDataset(files, tokenizer, limit, num_workers=1)


def kept(tokenizer: Any, files: list[str]) -> dict[str, Any]:
    """By limit: how many rows each keeps, and how many of their items differ."""
    from treetune.data.arrow_values import drop_nulls

    answer = {}
    for limit in (150, 200, 300, 1_000):
        mine, other = ours(files, tokenizer, limit), theirs(files, tokenizer, limit)
        batch = other.collate_fn([other[position] for position in range(len(other))])
        differ = sum(
            {**item, "uid": ""} != {**drop_nulls(found), "uid": ""}
            for item, found in zip(mine.collate_fn(list(mine)), batch, strict=False)
        )
        answer[str(limit)] = [len(mine), len(other), differ]
    return answer


def loader(tokenizer: Any, files: list[str]) -> dict[str, Any]:
    """Batches of the trainer's own loader, through an epoch and after a restart in the middle of it."""
    from skyrl.train.utils.trainer_utils import build_dataloader

    config = SimpleNamespace(
        trainer=SimpleNamespace(train_batch_size=16, eval_batch_size=16, seed=3, epochs=1),
        data=SimpleNamespace(dataloader=SimpleNamespace(num_workers=2, persistent_workers=False)),
    )
    mine, other = ours(files, tokenizer, 1_000), theirs(files, tokenizer, 1_000)
    whole = list(build_dataloader(config, mine))
    interrupted = build_dataloader(config, mine)
    before = list(islice(interrupted, 5))
    state = interrupted.state_dict()
    resumed = build_dataloader(config, ours(files, tokenizer, 1_000))
    resumed.load_state_dict(state)
    after = list(resumed)
    reference = list(build_dataloader(config, other))
    tensors = mine.collator(whole[0])
    return {
        "batches": len(whole),
        "keys": sorted(whole[0][0]),
        "uids": len({item["uid"] for batch in whole for item in batch}),
        "resumed": [*before, *after] == whole,
        "as_theirs": [[i["prompt"] for i in b] for b in whole] == [[i["prompt"] for i in b] for b in reference],
        "shape": list(tensors["input_ids"].shape),
        "types": [str(tensors["input_ids"].dtype), str(tensors["attention_mask"].dtype)],
        "decoded": [
            tokenizer.decode(ids[mask.bool()])
            == tokenizer.apply_chat_template(item["prompt"], add_generation_prompt=True, tokenize=False)
            for ids, mask, item in zip(tensors["input_ids"], tensors["attention_mask"], whole[0], strict=True)
        ],
        "padded_left": bool((tensors["attention_mask"].diff(dim=1) >= 0).all()),
    }


def faults(tokenizer: Any, files: list[str]) -> dict[str, str]:
    told = {}
    for name, make in (("ours", ours), ("theirs", theirs)):
        try:
            make(files, tokenizer, 1_000)
            told[name] = ""
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


if __name__ == "__main__":
    from transformers import AutoTokenizer

    answer = {"kept": kept, "loader": loader, "faults": faults}[sys.argv[1]](
        AutoTokenizer.from_pretrained(sys.argv[2]), sys.argv[3:]
    )
    print("\n" + json.dumps(answer))
