"""Looks things up for environments that search: in a corpus file, or at a search server.

    await search("capital of France", corpus="wiki.jsonl")   # ["France\\nThe capital of France is Paris."]

The first of these that is set: the corpus file that the row's `extra_info.corpus` names, the retriever at
TREETUNE_SEARCH_URL (skyrl-gym's and Search-R1's protocol), the corpus file TREETUNE_SEARCH_CORPUS. A row never names an
address.

A corpus has one JSON object a line: `contents`, or `title` and `text`. It is searched by its words (BM25).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
from array import array
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from treetune.errors import EnvironmentFault
from treetune.threads import call

URL_VARIABLE = "TREETUNE_SEARCH_URL"
CORPUS_VARIABLE = "TREETUNE_SEARCH_CORPUS"

DOCUMENTS = 3
"""How many documents a search shows."""
TIMEOUT, RETRY_AFTER = 5.0, (0.2, 0.8)
"""The most seconds of one request to a retriever, and the pauses before it is repeated."""

K1, B = 1.5, 0.75
"""How soon repetition of a word stops counting, and how much the length of a document counts against it."""

_PASSING = (None, 500, 502, 503, 504)
"""Faults that may be gone in a moment; None: no answer."""
_WORD = re.compile(r"\w+")
_building = threading.Lock()


async def search(query: str, corpus: Any = None) -> list[str]:
    """The best documents; `corpus` is the file that the row names, if it does."""
    url = os.environ.get(URL_VARIABLE)
    if url and not corpus:
        return await ask_retriever(url, query)
    corpus = corpus or os.environ.get(CORPUS_VARIABLE)
    if not corpus:
        remedy = f"export {CORPUS_VARIABLE}=FILE.jsonl or {URL_VARIABLE}=http://..., or give rows extra_info.corpus"
        raise EnvironmentFault("there is nothing to search", remedy=remedy)
    documents: list[str] = await call(lambda: load_index(Path(str(corpus))).search(query, DOCUMENTS))
    return documents


class RetrieverError(Exception):
    """A search that did not happen; the message is what the policy reads."""


async def ask_retriever(url: str, query: str) -> list[str]:
    """POST `{"query", "topk", "return_scores"}`, answered by `{"result": [[{"document": ...}]]}`."""
    request = {"query": query, "topk": DOCUMENTS, "return_scores": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT), raise_for_status=True) as session:
        for pause in (*RETRY_AFTER, None):
            try:
                async with session.post(url, json=request) as response:
                    result = json.loads(await response.read())["result"]
                    return [str(hit["document"]["contents"]) for hits in result for hit in hits]
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                remedy = f"export {URL_VARIABLE}=http://HOST:PORT/retrieve"
                raise EnvironmentFault(f"{url!r} is no address", remedy=remedy) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                status = getattr(error, "status", None)
                if pause is None or status not in _PASSING:
                    # Not its text: that has the server's address, which is none of the policy's business.
                    cause = "no answer" if status is None else f"status {status}"
                    raise RetrieverError(f"the search server failed ({cause})") from error
                await asyncio.sleep(pause)
            except (ValueError, KeyError, TypeError) as error:
                raise RetrieverError("the search server's answer is not JSON, or has no documents") from error
    raise AssertionError


class Index:
    """The words of a corpus file and where each line begins; texts are read from the file when they are found."""

    def __init__(self, file: Path) -> None:
        import numpy as np  # here, for only a corpus needs it

        self._file = file
        self._begins = array("Q")
        lengths = array("I")
        postings: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("I"), array("I")))
        begin = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    counts = Counter(_split_words(_read_document(line, file, number)))
                    document = len(self._begins)
                    for word, count in counts.items():
                        documents, occurrences = postings[word]
                        documents.append(document)
                        occurrences.append(count)
                    self._begins.append(begin)
                    lengths.append(counts.total())
                begin += len(line)
        if not self._begins:
            raise EnvironmentFault(f"{file} is an empty corpus", remedy="one JSON object a line")
        self._postings = dict(postings)
        size = np.frombuffer(lengths, dtype=np.uint32).astype(np.float32)
        self._length_penalty = (K1 * (1 - B + B * size / max(float(size.mean()), 1.0))).astype(np.float32)

    def __len__(self) -> int:
        return len(self._begins)

    def search(self, query: str, count: int) -> list[str]:
        """The best documents with at least one word of the query, best first, earlier lines first among equals."""
        import numpy as np

        scores = np.zeros(len(self), dtype=np.float32)
        for word, repeated in Counter(_split_words(query)).items():
            if word in self._postings:
                found, counts = (np.frombuffer(part, dtype=np.uint32) for part in self._postings[word])
                rarity = math.log(1 + (len(self) - len(found) + 0.5) / (len(found) + 0.5))
                often = counts.astype(np.float32)
                scores[found] += repeated * rarity * often * (K1 + 1) / (often + self._length_penalty[found])
        hits = np.flatnonzero(scores)
        if len(hits) > count:
            threshold = np.partition(scores[hits], -count)[-count]
            hits = hits[scores[hits] >= threshold]
        best = hits[np.argsort(-scores[hits], kind="stable")][:count]
        texts = []
        with self._file.open("rb") as lines:
            for document in best:
                lines.seek(self._begins[document])
                texts.append(_read_document(lines.readline(), self._file, int(document) + 1))
        return texts


def load_index(file: Path) -> Index:
    """The index of a corpus, built at the first call and again when the file has changed. Call it in a thread."""
    file = file.expanduser().resolve()
    try:
        state = file.stat()
        with _building:
            return _build_index(file, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise EnvironmentFault(f"the corpus cannot be read: {error}", remedy="a file of JSON lines") from error


@lru_cache(maxsize=8)
def _build_index(file: Path, modified: int, size: int) -> Index:
    return Index(file)


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _read_document(line: bytes, file: Path, number: int) -> str:
    try:
        document = msgspec.json.decode(line)
        contents = document.get("contents")
        if contents is None:
            title, text = document.get("title"), document.get("text")
            contents = "\n".join(part for part in (title, text) if part)
        if not isinstance(contents, str) or not contents:
            raise ValueError("no text")
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        remedy = 'each line is {"id": ..., "contents": ...} or has title and text'
        raise EnvironmentFault(f"{file}, line {number}: {error}", remedy=remedy) from error
    return contents
