"""A PromptDataset feeds a training loop: prompts that are short enough, with what their environments need.

    dataset = PromptDataset(["~/data/train.parquet"], tokenizer, max_prompt_length=512)
    dataset[0]      # {"prompt": [...], "env_class": "gsm8k", "env_extras": {"reward_spec": ...}, "uid": "..."}
    DataLoader(dataset, batch_size=8, collate_fn=dataset.collator)

It takes the place of SkyRL's class of the same name. Rows are read when they are asked for; which ones are short enough
is found out once and kept in the cache.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any

from treetune.errors import EmptyTasksetError, TasksetError, UsageError
from treetune.rows.cache import Cache, default_cache_dir
from treetune.rows.prompt_lengths import PromptTokens, load_tokenizer, messages_of
from treetune.rows.sources import Sources, find
from treetune.trainers.skyrl.length_filter import filter_rows
from treetune.trainers.skyrl.row_store import RowStore

Item = dict[str, Any]


class PromptDataset:
    def __init__(
        self,
        datasets: Sources,
        tokenizer: Any,
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        """`datasets`: files, folders, globs, hub names; one or several. `tokenizer`: an object, a folder or a name.

        `num_workers`: processes that count tokens, for a tokenizer that does not use all cores by itself.
        """
        if type(max_prompt_length) is not int or max_prompt_length < 1:
            raise UsageError(
                f"max_prompt_length is {max_prompt_length!r}", remedy="give a number of tokens, such as 512"
            )
        if type(num_workers) is not int:
            raise UsageError(f"num_workers is {num_workers!r}", remedy="give a number of processes; 0 starts none")
        self.datasets, self.tokenizer = datasets, load_tokenizer(tokenizer)
        self.max_prompt_length, self.num_workers = max_prompt_length, num_workers
        self.prompt_key, self.env_class_key = prompt_key, env_class_key
        self._tokens = PromptTokens(self.tokenizer, chat_template_kwargs)
        cache = Cache(default_cache_dir(cache_dir))
        keys = {"prompt_key": prompt_key, "env_class_key": env_class_key}
        self._stores = [RowStore.open(source, cache, **keys) for source in find(datasets)]
        self._ends = list(accumulate(store.rows for store in self._stores))
        processes = min(num_workers, os.cpu_count() or 1)
        self._rows, self._occurrences, self.report = filter_rows(
            self._stores, self._tokens, max_prompt_length, prompt_key, processes, cache
        )
        if not quiet:
            print(f"PromptDataset: {self.report}", file=sys.stderr, flush=True)
        if not len(self):
            rows = self.report.rows
            raise EmptyTasksetError(
                f"none of {rows:,} rows has at most {max_prompt_length:,} tokens" if rows else "there are no rows",
                remedy="raise max_prompt_length" if rows else None,
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        """`prompt`, `env_class`, `env_extras` (all other columns) and `uid`.

        The uid is the row's own, or that of its problem: it survives filtering and reordering. Where an earlier row has
        the same, the number of its occurrence is put behind it: `uid#2`.
        """
        index = as_index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} prompts")
        row = int(self._rows[index])
        number = bisect_right(self._ends, row)
        store = self._stores[number]
        prompt, others, uid = store.row(row - self._ends[number] + store.rows)
        occurrence = int(self._occurrences[index]) + 1
        return {
            "prompt": messages_of(prompt),
            "env_class": others.pop(self.env_class_key, None),
            "env_extras": others,
            "uid": uid if occurrence == 1 else f"{uid}#{occurrence}",
        }

    def collate_fn(self, items: Sequence[Item]) -> list[Item]:
        """A batch as SkyRL's trainer takes it: the items in a list."""
        return list(items)

    def collator(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch for the `collate_fn` of a DataLoader: `input_ids` and `attention_mask` (int64), padded on the left to
        `max_prompt_length`, and lists of the items' fields. Tensors are torch's, or numpy's where it is not installed.
        """
        import numpy as np

        length, padding = self.max_prompt_length, self._padding()
        ids = np.full((len(items), length), padding, np.int64)
        mask = np.zeros_like(ids)
        for row, found in enumerate(self._tokens.ids([item["prompt"] for item in items])):
            if len(found) > length:
                raise TasksetError(f"{items[row].get('uid')} has {len(found)} tokens, more than {length}")
            ids[row, length - len(found) :] = found
            mask[row, length - len(found) :] = 1
        fields = {name: [item.get(name) for item in items] for name in ("prompt", "env_class", "env_extras", "uid")}
        try:
            from torch import from_numpy
        except ImportError:
            return {"input_ids": ids, "attention_mask": mask, **fields}
        return {"input_ids": from_numpy(ids), "attention_mask": from_numpy(mask), **fields}

    def _padding(self) -> int:
        for name in ("pad_token_id", "eos_token_id"):
            if isinstance(found := getattr(self.tokenizer, name, None), int):
                return found
        raise UsageError("the tokenizer has no padding token", remedy="set tokenizer.pad_token")
