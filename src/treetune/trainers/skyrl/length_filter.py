"""Which rows of some stores have a prompt that is short enough, and which occurrence of its uid each row is.

    kept = KeptRows.of(stores, tokenizer, 512, {}, prompt_key="prompt", processes=8, cache=cache)
    kept.rows[0], kept.occurrences[0], kept.report

The result is kept in the cache under all that it depends on: the rows, the tokenizer, its template, the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from treetune.errors import TasksetError, did_you_mean
from treetune.rows.cache import Cache, Sidecar, config_hash
from treetune.rows.prompt_tokens import PromptTokens
from treetune.rows.tokenizer import tokenizer_digest
from treetune.trainers.skyrl.in_processes import in_processes
from treetune.trainers.skyrl.prompt_report import FIRST, Dropped, FileCount, PromptReport
from treetune.trainers.skyrl.row_store import RowStore

VERSION = 2
"""Of what is found and how it is written."""

WORTH_PROCESSES = 20_000
"""Rows from which other processes are started for a tokenizer that has no threads."""


class KeptRows(NamedTuple):
    rows: Any
    """Their numbers, counted through all stores: an array of int64."""
    occurrences: Any
    """How often each one's uid came before: an array of int32."""
    report: PromptReport

    @classmethod
    def of(
        cls,
        stores: Sequence[RowStore],
        tokenizer: Any,
        limit: int,
        arguments: Mapping[str, Any],
        *,
        prompt_key: str,
        processes: int,
        cache: Cache,
    ) -> Self:
        tokens = PromptTokens(tokenizer, arguments)
        identity = tokenizer_digest(tokenizer, arguments)
        if identity is None:
            return cls(*_filter(stores, tokens, limit, prompt_key, processes))
        names = [store.path.stem for store in stores]
        config = {"rows": names, "tokenizer": identity, "max_prompt_length": limit, "version": VERSION}
        key = f"kept_{config_hash(config, {})}"

        def build(path: Path) -> Sidecar:
            rows, occurrences, report = _filter(stores, tokens, limit, prompt_key, processes)
            _save(path, rows, occurrences)
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
        if was_hit:  # the same content may have another name by now
            for file, store in zip(report.files, stores, strict=True):
                file.source = store.source
            report.first = [Dropped(one.row, one.tokens, _place(stores, one.row)) for one in report.first]
        return cls(*_load(cache.path(key)), report)


def _place(stores: Sequence[RowStore], row: int) -> str:
    for store in stores:
        if row < store.rows:
            return store.place(row)
        row -= store.rows
    raise IndexError(row)


def _filter(
    stores: Sequence[RowStore], tokens: PromptTokens, limit: int, prompt_key: str, processes: int
) -> tuple[Any, Any, PromptReport]:
    import numpy as np

    files = [FileCount(store.source, store.rows, 0, store.unnamed) for store in stores]
    report = PromptReport(max_prompt_length=limit, files=files)
    kept = np.ones(report.rows, bool)
    faults = Faults(prompt_key)
    before = 0
    for store, file in zip(stores, report.files, strict=True):
        first = 0
        for count, longer, wrong in _measured(store, tokens, limit, processes):
            for position, length in sorted(longer.items()):
                kept[before + first + position] = False
                report.longest = max(report.longest, length)
                if len(report.first) < FIRST:
                    report.first.append(Dropped(before + first + position, length, store.place(first + position)))
            file.dropped += len(longer)
            for position, fault in sorted(wrong.items()):
                faults.add(store, first + position, fault)
            first += count
        before += store.rows
    faults.tell()
    occurrences = _occurrences(stores)
    report.repeated = int(np.count_nonzero(occurrences))
    report.shared = report.repeated + int(np.count_nonzero(occurrences == 1))
    rows = np.flatnonzero(kept)
    return rows.astype(np.int64), occurrences[rows], report


Measured = tuple[int, dict[int, int], dict[int, str]]
"""How many prompts, the tokens of the longer ones, and what is wrong with others."""


def _measured(store: RowStore, tokens: PromptTokens, limit: int, processes: int) -> Iterator[Measured]:
    measure = partial(_measure, tokens, limit)
    if processes > 1 and not tokens.has_threads and store.rows >= WORTH_PROCESSES:
        return in_processes(measure, store.prompts(), processes)
    return map(measure, store.prompts())


def _measure(tokens: PromptTokens, limit: int, prompts: list[Any]) -> Measured:
    return len(prompts), *tokens.above(limit, prompts)


class Faults:
    """Prompts that no model can be asked: all are looked for, and the first ten told."""

    def __init__(self, prompt_key: str) -> None:
        self._prompt_key = prompt_key
        self._count = 0
        self._lines: list[str] = []

    def add(self, store: RowStore, number: int, fault: str) -> None:
        self._count += 1
        if len(self._lines) < FIRST:
            self._lines.append(f"  {store.place(number)}: {fault}{self._hint(store, number)}")

    def tell(self) -> None:
        if not self._count:
            return
        more = f"\n  and {self._count - len(self._lines):,} more" if self._count > len(self._lines) else ""
        raise TasksetError(
            f"{self._count:,} prompt{'s' * (self._count != 1)} cannot be used:\n" + "\n".join(self._lines) + more,
            remedy="correct these rows; `treetune validate` finds every fault of a file",
        )

    def _hint(self, store: RowStore, number: int) -> str:
        row = store.row(number)
        if row.prompt is not None:
            return ""
        where = f" under {self._prompt_key!r}" if self._prompt_key != "prompt" else ""
        return where + (did_you_mean(self._prompt_key, row.others) or f"; its columns: {', '.join(row.others)}")


def _occurrences(stores: Sequence[RowStore]) -> Any:
    """How often each row's uid came before."""
    import numpy as np

    # A uid is a hash of 16 bytes itself, or a text of the user's own: a table of all texts would be far larger.
    hashes = bytearray()
    for store in stores:
        for uid in store.uids():
            hashes += blake2b(uid.encode(), digest_size=16).digest()
    high, low = np.frombuffer(hashes, np.uint64).reshape(-1, 2).T
    order = np.lexsort((low, high))  # equal uids side by side, in their order
    high, low = high[order], low[order]
    begins = np.flatnonzero(np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])][: len(order)])
    lengths = np.diff(np.r_[begins, len(order)])
    found = np.empty(len(order), np.int32)
    found[order] = np.arange(len(order)) - np.repeat(begins, lengths)
    return found


def _save(path: Path, rows: Any, occurrences: Any) -> None:
    import pyarrow as pa

    schema = pa.schema([("row", pa.int64()), ("occurrence", pa.int32())])
    # Neither here nor below by Arrow's own ways from and to numpy, which import pandas.
    arrays = [
        pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(values)])
        for kind, values in zip(schema.types, (rows, occurrences), strict=True)
    ]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))


def _load(path: Path) -> tuple[Any, Any]:
    import numpy as np
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    rows, occurrences = (column.buffers()[1] for column in batch.columns)
    return np.frombuffer(rows, np.int64, len(batch)), np.frombuffer(occurrences, np.int32, len(batch))
