"""Lexical search (BM25) over a corpus file, in the process.

    index = index_of(Path("corpus.jsonl"))
    for document in index.search("capital of France", 3): print(document)

The file has one JSON object a line: `contents`, or `title` and `text`. The index holds word counts and where each line
begins, not the texts: those are read from the file when they are found. It is built once a process and file.
"""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.errors import EnvironmentFault

K1, B = 1.5, 0.75
"""How soon repetition stops counting, and how much a long document is held against it."""

_WORD = re.compile(r"\w+")
_building = threading.Lock()


class Index:
    """Built from the file as it is now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begins = array("Q")
        lengths = array("I")
        postings: dict[str, tuple[array[int], array[int]]] = {}
        begin = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    counts = Counter(_words(_contents(line, file, number)))
                    document = len(self._begins)
                    for word, count in counts.items():
                        posting = postings.get(word)
                        if posting is None:
                            posting = postings[word] = (array("I"), array("I"))
                        posting[0].append(document)
                        posting[1].append(count)
                    self._begins.append(begin)
                    lengths.append(counts.total())
                begin += len(line)
        if not self._begins:
            raise EnvironmentFault(f"{file} is an empty corpus", remedy="one JSON object a line")
        self._postings = postings
        size = np.frombuffer(lengths, dtype=np.uint32).astype(np.float32)
        self._held_against = (K1 * (1 - B + B * size / max(float(size.mean()), 1.0))).astype(np.float32)

    def __len__(self) -> int:
        return len(self._begins)

    def search(self, query: str, count: int) -> list[str]:
        """The best documents with at least one word of the query, best first, earlier lines first among equals."""
        scores = np.zeros(len(self), dtype=np.float32)
        for word, repeated in Counter(_words(query)).items():
            if word in self._postings:
                found, counts = (np.frombuffer(part, dtype=np.uint32) for part in self._postings[word])
                rarity = math.log(1 + (len(self) - len(found) + 0.5) / (len(found) + 0.5))
                often = counts.astype(np.float32)
                scores[found] += repeated * rarity * often * (K1 + 1) / (often + self._held_against[found])
        hits = np.flatnonzero(scores)
        if len(hits) > count:
            threshold = np.partition(scores[hits], -count)[-count]
            hits = hits[scores[hits] >= threshold]
        best = hits[np.argsort(-scores[hits], kind="stable")][:count]
        with self._file.open("rb") as lines:
            return [self._read(lines, int(document)) for document in best]

    def _read(self, lines: Any, document: int) -> str:
        lines.seek(self._begins[document])
        return _contents(lines.readline(), self._file, document + 1)


def index_of(file: Path) -> Index:
    """The index of a corpus, built at the first call and again when the file has changed. Call it in a thread."""
    file = file.expanduser().resolve()
    try:
        state = file.stat()
        with _building:
            return _index(file, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise EnvironmentFault(
            f"the corpus {file} cannot be read: {error.strerror or error}", remedy="a file of JSON lines"
        ) from error


@lru_cache(maxsize=8)
def _index(file: Path, modified: int, size: int) -> Index:
    return Index(file)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _contents(line: bytes, file: Path, number: int) -> str:
    try:
        document = msgspec.json.decode(line)
        contents = document.get("contents")
        if contents is None:
            title, text = document.get("title"), document.get("text")
            contents = "\n".join(part for part in (title, text) if part)
        if not isinstance(contents, str) or not contents:
            raise ValueError("no text")
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"{file}, line {number}: {error}", remedy='each line is {"id": ..., "contents": ...} or has title and text'
        ) from error
    return contents
