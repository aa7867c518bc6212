"""Runs in verl's or SkyRL's virtual environment: the rows that the trainer's own dataset gives of built files.

python loaded_rows_side.py verl|skyrl MODEL FILES.json ROWS.json      # {"name": "path"} -> {"name": [row, ...]}
"""

from __future__ import annotations

import functools
import json
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

# SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


@functools.cache
def read_config(model: str) -> Any:
    from verl_side import rows_config

    return rows_config(model).data


def load_by_verl(model: str, tokenizer: Any, file: str) -> list[dict[str, Any]]:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    dataset = RLHFDataset(data_files=[file], tokenizer=tokenizer, config=read_config(model))
    items = [dataset[number] for number in range(len(dataset))]
    names = ("data_source", "reward_model", "extra_info")
    return [{"prompt": item["raw_prompt"], **{name: item[name] for name in names}} for item in items]


def load_by_skyrl(model: str, tokenizer: Any, file: str) -> list[dict[str, Any]]:
    from skyrl.train.dataset import PromptDataset

    dataset = PromptDataset([file], tokenizer, 100_000, num_workers=1)
    rows = []
    for number in range(len(dataset)):
        messages, env_class, extras, _ = dataset[number]
        rows.append({**extras, "prompt": messages, "env_class": env_class})
    return rows


def to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    from transformers import AutoTokenizer

    import datasets

    datasets.disable_progress_bars()
    trainer, model, files, answer = sys.argv[1:]
    load = {"verl": load_by_verl, "skyrl": load_by_skyrl}[trainer]
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = {name: load(model, tokenizer, file) for name, file in json.loads(Path(files).read_text()).items()}
    Path(answer).write_text(json.dumps(loaded, default=to_plain))
