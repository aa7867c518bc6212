"""Prompts of all rows together: which come twice, and which are too long for a trainer.

A prompt is kept as a 64-bit key: the xxh3 of the contents one after another, plus a sum that tells where each message
ends. Rows and Arrow columns give the same keys, so that a JSON file can be compared with a parquet file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treetune.errors import UsageError
from treetune.rows.arrow_values import encode_json
from treetune.rows.prompt_lengths import TEMPLATE_FAILS, PromptTokens, load_tokenizer
from treetune.rows.sources import Row
from treetune.validate.report import SHOWN, Report

_ODD = 0x9E3779B97F4A7C15
_VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|test|eval|dev)(?:[^a-z]|$)")
_TRAINING = re.compile(r"(?:^|[^a-z])(?:train|training)(?:[^a-z]|$)")

Keys = np.ndarray[Any, np.dtype[np.uint64]]


def key_of(prompt: Any) -> int:
    """The key of a prompt that is a list of messages; 0 of any other, which is never reported as repeated."""
    from xxhash import xxh3_64_intdigest

    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return 0
    contents = [_encode(message.get("content")) for message in prompt]
    ends = sum(len(content) * (place + 1) for place, content in enumerate(contents))
    return (xxh3_64_intdigest(b"".join(contents)) + ends * _ODD) & ((1 << 64) - 1)


def _encode(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode(errors="replace")
    return b"" if content is None else encode_json(content)


def keys_of(starts: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any], data: memoryview) -> Keys:
    """The keys of many prompts: `starts` are the places of their first messages, and the end of the last; `offsets`
    are the places of the messages' contents in `data`."""
    from xxhash import xxh3_64_intdigest

    texts = (data[begin:end] for begin, end in pairwise(offsets[starts].tolist()))
    hashes = np.fromiter(map(xxh3_64_intdigest, texts), np.uint64, len(starts) - 1)
    counts = np.diff(starts)
    place = np.arange(starts[0], starts[-1]) - np.repeat(starts[:-1], counts) + 1
    lengths = np.diff(offsets)[starts[0] : starts[-1]].astype(np.int64)
    total = np.concatenate(([0], np.cumsum(lengths * place)))
    ends = total[starts[1:] - starts[0]] - total[starts[:-1] - starts[0]]
    keys = hashes + ends.astype(np.uint64) * np.uint64(_ODD)
    keys[counts == 0] = 0
    return np.asarray(keys)


def is_validation(file: str) -> bool:
    """Whether a file's name, or its whole folder's, says that it is for validation; `test/train.parquet` does not."""
    path = Path(file)
    if _TRAINING.search(path.stem.lower()):
        return False
    return bool(_VALIDATION.search(path.stem.lower()) or _VALIDATION.fullmatch(path.parent.name.lower()))


class _Part(NamedTuple):
    file: str
    unit: str
    numbers: Sequence[int]
    keys: Keys


class Repeats:
    """Prompts that come more than once: among the training files, and in training and validation files both."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, file: str, unit: str, numbers: Sequence[int], keys: Keys) -> None:
        self._parts.append(_Part(file, unit, numbers, keys))

    def report_to(self, report: Report, validation: Sequence[str]) -> None:
        training = [part for part in self._parts if part.file not in validation]
        held_out = [part for part in self._parts if part.file in validation]
        for parts in (training, held_out):
            keys = _join(parts)
            order = np.argsort(keys, kind="stable")  # stable: the first of equals is the first in the files
            again = np.zeros(len(keys), np.bool_)
            again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
            _report("duplicate-prompts", parts, again, "prompts that came before", report)
        if held_out:
            both = np.isin(_join(held_out), _join(training))
            _report("train-val-overlap", held_out, both, "prompts that are in the training files too", report)


def _join(parts: list[_Part]) -> Keys:
    return np.concatenate([np.empty(0, np.uint64), *(part.keys for part in parts)])


def _report(rule: str, parts: list[_Part], mask: np.ndarray[Any, Any], found: str, report: Report) -> None:
    first = 0
    for file, unit, numbers, keys in parts:
        places = np.flatnonzero((keys != 0) & mask[first : first + len(keys)])
        first += len(keys)
        if len(places):
            rows = [numbers[int(place)] for place in places[:SHOWN]]
            report.add(rule, file, found, rows, unit, count=len(places))


class Lengths:
    """Prompts rendered by a tokenizer's chat template and counted in tokens, as trainers' loaders do.

    `tokenizer`: a tokenizer, or the folder or name of one.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        loaded = load_tokenizer(tokenizer)
        if getattr(loaded, "chat_template", None) is None:
            raise UsageError(
                f"{tokenizer if isinstance(tokenizer, str) else 'the tokenizer'} has no chat template",
                remedy="name that of an instruction-tuned model: trainers render prompts with it",
            )
        self._tokens = PromptTokens(loaded)
        self._most = most
        # Also those that only the chat template uses, such as one before each turn.
        added = getattr(loaded, "added_tokens_decoder", {}).values()
        special = {*loaded.all_special_tokens, *(token.content for token in added if token.special)} - {""}
        # A pattern that Arrow's engine takes too; one that matches nothing where there are no such tokens.
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"[^\s\S]")

    def check(self, rows: Sequence[Row], numbers: Sequence[int], file: str, unit: str, report: Report) -> None:
        """Count the prompts of some rows. Those that are no messages break another rule."""
        prompts = [prompt if isinstance(prompt := row.get("prompt"), list) else None for row in rows]
        longer, faults = self._tokens.above(self._most, prompts)
        for position, fault in faults.items():
            if fault.startswith(TEMPLATE_FAILS):
                report.add("template-fails", file, fault.removeprefix(TEMPLATE_FAILS), [numbers[position]], unit)
        for position, count in longer.items():
            found = f"{count:,} tokens, the limit is {self._most:,}"
            report.add("prompt-too-long", file, found, [numbers[position]], unit)
