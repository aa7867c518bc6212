"""PromptDataset feeds a training loop with prompts that are short enough, and with the columns that their environments
need.

    dataset = PromptDataset(["~/data/train.parquet"], tokenizer, max_prompt_length=512)
    DataLoader(dataset, batch_size=8, collate_fn=dataset.collator)

It replaces SkyRL's class of the same name. Rows are read on demand. Which rows are short enough is computed once and
cached.
"""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from itertools import accumulate
from multiprocessing import get_context
from operator import index as as_index
from pathlib import Path
from typing import Any

import msgspec

from treetune.data.rows.cache import Cache, Sidecar, config_hash
from treetune.data.rows.prompt_lengths import PromptTokens, load_tokenizer, messages_of
from treetune.data.rows.row_store import CHUNK, TOGETHER, RowStore
from treetune.data.sources.names import Sources, find
from treetune.errors import EmptyTasksetError, TasksetError, UsageError, did_you_mean
from treetune.system.folders import default_cache_dir

VERSION = 5
"""Version of the results and their file format."""

FIRST = 10
"""The number of dropped rows to name."""

ITEM = ("prompt", "env_class", "env_extras", "uid")

WORTH_PROCESSES = 20_000
"""The number of rows from which extra processes are used, for a tokenizer without threads."""


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
        """`datasets`: one or more files, folders, globs or hub names. `tokenizer`: an object, a folder or a name.

        `num_workers`: processes that count tokens, for a tokenizer that does not use all cores itself.
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
        (self._rows, self._occurrences), self.report = filter_rows(
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

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `prompt`, `env_class`, `env_extras` (all other columns) and `uid`.

        The uid is the row's own, or else that of its task. It does not change with filtering and reordering. Repeated
        uids get the number of their occurrence: `uid#2`.
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

    def collate_fn(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a batch as SkyRL's trainer takes it: the items in a list."""
        return list(items)

    def collator(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build a batch, as the `collate_fn` of a DataLoader: `input_ids` and `attention_mask` (int64), padded on the
        left to `max_prompt_length`, and lists of the items' fields. Tensors are torch's, or numpy's if torch is not
        installed.
        """
        import numpy as np

        tokens = [getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        padding = next((token for token in tokens if isinstance(token, int)), None)
        if padding is None:
            raise UsageError("the tokenizer has no padding token", remedy="set tokenizer.pad_token")
        length = self.max_prompt_length
        ids = np.full((len(items), length), padding, np.int64)
        mask = np.zeros_like(ids)
        for row, found in enumerate(self._tokens.ids([item["prompt"] for item in items])):
            if len(found) > length:
                raise TasksetError(f"{items[row].get('uid')} has {len(found)} tokens, more than {length}")
            ids[row, length - len(found) :] = found
            mask[row, length - len(found) :] = 1
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        with contextlib.suppress(ImportError):
            from torch import from_numpy

            batch = {name: from_numpy(values) for name, values in batch.items()}
        return batch | {name: [item.get(name) for item in items] for name in ITEM}


class Dropped(msgspec.Struct):
    row: int
    """The row number, counted from 0 through all files."""
    tokens: int
    place: str
    """The file and the row in it."""


class FileCount(msgspec.Struct):
    source: str
    rows: int
    dropped: int = 0
    without_env_class: int = 0


class PromptReport(msgspec.Struct, kw_only=True):
    """The rows that were dropped, and why: printed once when a dataset is created, and available as
    `dataset.report`."""

    max_prompt_length: int
    files: list[FileCount]
    longest: int = 0
    """The tokens of the longest dropped prompt."""
    first: list[Dropped] = []
    """The first dropped rows."""
    shared: int = 0
    """Rows that share their uid with another row: equal rows, or different rows with a uid that the user set."""
    cached: bool = False
    """Whether all this came from the cache."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def dropped(self) -> int:
        return sum(file.dropped for file in self.files)

    @property
    def kept(self) -> int:
        return self.rows - self.dropped

    def __str__(self) -> str:
        known = " (known from an earlier start)" if self.cached else ""
        lines = [f"{self.kept:,} of {self.rows:,} rows have at most {self.max_prompt_length:,} tokens{known}"]
        if self.dropped:
            lines.append(f"  dropped: {self.dropped:,}, the longest of {self.longest:,} tokens")
            lines += [f"    {file.source}: {file.dropped:,}" for file in self.files if file.dropped]
            lines.append("  first: " + "; ".join(f"{row.place} ({row.tokens:,})" for row in self.first))
        if self.shared:
            lines.append(f"  {self.shared:,} rows share a uid with another")
        if unnamed := sum(file.without_env_class for file in self.files):
            lines.append(f"  without an environment, so the trainer's default runs them: {unnamed:,}")
        return "\n".join(lines)


# Selecting rows that are short enough


def filter_rows(
    stores: Sequence[RowStore], tokens: PromptTokens, limit: int, prompt_key: str, processes: int, cache: Cache
) -> tuple[Any, PromptReport]:
    """Return the numbers of the rows with at most `limit` tokens, counted through all stores; how often the uid of each
    occurred before; and the report."""
    import numpy as np

    if (identity := tokens.identity()) is None:
        return _filter(stores, tokens, limit, prompt_key, processes)
    names = [store.path.stem for store in stores]
    config = {"rows": names, "tokenizer": identity, "max_prompt_length": limit, "version": VERSION}
    key = f"kept_{config_hash(config, {})}"

    def build(path: Path) -> Sidecar:
        kept, report = _filter(stores, tokens, limit, prompt_key, processes)
        with open(path, "wb") as file:
            np.save(file, kept)
        return Sidecar(
            config={**config, "report": msgspec.to_builtins(report)},
            source=", ".join(store.source for store in stores),
            rows=report.kept,
            dropped={f"longer than {limit} tokens": report.dropped} if report.dropped else {},
            fingerprint=key,
        )

    sidecar, was_hit = cache.get_or_build(key, build)
    report = msgspec.convert(sidecar.config["report"], PromptReport)
    report.cached = was_hit
    if was_hit:  # the same content may have a different name now
        starts = [0, *accumulate(store.rows for store in stores)]
        for file, store in zip(report.files, stores, strict=True):
            file.source = store.source
        for dropped in report.first:
            number = bisect_right(starts, dropped.row) - 1
            dropped.place = stores[number].place(dropped.row - starts[number])
    return np.load(cache.path(key)), report


def _filter(
    stores: Sequence[RowStore], tokens: PromptTokens, limit: int, prompt_key: str, processes: int
) -> tuple[Any, PromptReport]:
    import numpy as np

    files = [FileCount(store.source, store.rows, without_env_class=store.without_env_class) for store in stores]
    report = PromptReport(max_prompt_length=limit, files=files)
    kept = np.ones(report.rows, bool)
    faults: list[str] = []
    wrong = before = 0
    for store, file in zip(stores, files, strict=True):
        for chunk, (longer, faulty) in enumerate(_count(store, tokens, limit, processes)):
            first = chunk * CHUNK * TOGETHER
            for position, count in sorted(longer.items()):
                row = before + first + position
                kept[row] = False
                report.longest = max(report.longest, count)
                if len(report.first) < FIRST:
                    report.first.append(Dropped(row, count, store.place(first + position)))
            file.dropped += len(longer)
            wrong += len(faulty)
            for position, fault in sorted(faulty.items())[: FIRST - len(faults)]:
                faults.append(f"  {store.place(first + position)}: {fault}{_hint(store, first + position, prompt_key)}")
        before += store.rows
    if wrong:
        more = [f"  and {wrong - FIRST:,} more"] if wrong > FIRST else []
        raise TasksetError(
            "\n".join([f"{wrong:,} prompt{'s' * (wrong != 1)} cannot be used:", *faults, *more]),
            remedy="correct these rows; `treetune validate` finds every fault of a file",
        )
    occurrences = _count_occurrences(stores)
    report.shared = int(np.count_nonzero(occurrences) + np.count_nonzero(occurrences == 1))
    rows = np.flatnonzero(kept)
    return np.stack([rows, occurrences[rows]]).astype(np.int64), report


def _hint(store: RowStore, number: int, prompt_key: str) -> str:
    prompt, others, _ = store.row(number)
    if prompt is not None:
        return ""
    where = f" under {prompt_key!r}" if prompt_key != "prompt" else ""
    return where + (did_you_mean(prompt_key, others) or f"; its columns: {', '.join(others)}")


def _count_occurrences(stores: Sequence[RowStore]) -> Any:
    """Count how often each row's uid occurred before."""
    import numpy as np

    # A uid may be a long text that the user chose: a table of texts would be far larger than one of hashes.
    hashes = (int.from_bytes(blake2b(uid, digest_size=8).digest()) for store in stores for uid in store.uids())
    uids = np.fromiter(hashes, np.uint64, sum(store.rows for store in stores))
    order = np.argsort(uids, kind="stable")
    in_order = uids[order]
    occurrences = np.empty(len(uids), np.int64)
    occurrences[order] = np.arange(len(uids)) - np.searchsorted(in_order, in_order)
    return occurrences


# Counting tokens, in other processes if that is faster


def _count(store: RowStore, tokens: PromptTokens, limit: int, processes: int) -> Iterator[Any]:
    """Yield for each chunk of a store the token counts of its too-long prompts, and the faults of others, by
    position."""
    if processes < 2 or tokens.has_threads or store.rows < WORTH_PROCESSES:
        yield from (tokens.above(limit, prompts) for prompts in store.prompts())
        return
    # Forked, so that the user's script does not run again and the tokenizer need not be pickled.
    work = store, tokens, limit
    with ProcessPoolExecutor(processes, get_context("fork"), initializer=_keep_work, initargs=work) as pool:
        yield from pool.map(_count_chunk, range(store.chunks))


_work: tuple[RowStore, PromptTokens, int]
"""The prompts that a worker process counts."""


def _keep_work(*work: Any) -> None:
    global _work
    _work = work


def _count_chunk(chunk: int) -> Any:
    store, tokens, limit = _work
    return tokens.above(limit, next(store.prompts(chunk)))
