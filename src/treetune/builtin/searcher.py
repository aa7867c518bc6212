"""Looks things up for environments that search: in a corpus file, or at a search server.

    searcher = Searcher(task)
    await searcher.search("capital of France")   # '{"result": "Doc 1: ...\\n"}', as skyrl-gym shows it
    await searcher.close()

The first of these that is set: the corpus file that the row's `extra_info.corpus` names, the retriever at
TREETUNE_SEARCH_URL (skyrl-gym's and Search-R1's protocol), the corpus file TREETUNE_SEARCH_CORPUS. A row never names an
address.

A corpus has one JSON object a line: `contents`, or `title` and `text`. It is searched by its words (BM25). The index
holds word counts and where each line begins, not the texts: those are read from the file when they are found.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from treetune.errors import EnvironmentFault
from treetune.task import Task
from treetune.threads import call

URL_VARIABLE = "TREETUNE_SEARCH_URL"
CORPUS_VARIABLE = "TREETUNE_SEARCH_CORPUS"

DOCUMENTS = 3
"""How many documents a search shows."""
TIMEOUT = 5.0
"""The most seconds of one request to a retriever."""
RETRY_AFTER = (0.2, 0.8)
"""The pauses before a request is repeated."""

K1, B = 1.5, 0.75
"""How soon repetition of a word stops counting, and how much the length of a document counts against it."""

_PASSING = (500, 502, 503, 504)
_WORD = re.compile(r"\w+")
_building = threading.Lock()


class Searcher:
    """The searches of one episode."""

    def __init__(self, task: Task) -> None:
        self._corpus = task.extra_info.get("corpus")
        self._retriever: Retriever | None = None
        self.searches = self.failures = 0

    async def search(self, query: str) -> str:
        """What the policy is shown: JSON, be it of an error."""
        self.searches += 1
        try:
            documents = await self._find_documents(query.strip())
        except RetrieverError as error:
            self.failures += 1
            return json.dumps({"result": f"Search error: {error}"}, ensure_ascii=False)
        listing = "".join(f"Doc {number}: {contents.strip()}\n" for number, contents in enumerate(documents, 1))
        return json.dumps({"result": listing or "No search results found."}, ensure_ascii=False)

    @property
    def metrics(self) -> dict[str, int]:
        return {"searches": self.searches, "search_failures": self.failures}

    async def close(self) -> None:
        if self._retriever is not None:
            await self._retriever.close()

    async def _find_documents(self, query: str) -> list[str]:
        url = os.environ.get(URL_VARIABLE)
        if url and not self._corpus:
            self._retriever = self._retriever or Retriever(url)
            return await self._retriever.search(query, DOCUMENTS)
        corpus = self._corpus or os.environ.get(CORPUS_VARIABLE)
        if not corpus:
            raise EnvironmentFault(
                "there is nothing to search",
                remedy=f"export {CORPUS_VARIABLE}=FILE.jsonl or {URL_VARIABLE}=http://..., "
                "or give rows an extra_info.corpus",
            )
        documents: list[str] = await call(lambda: load_index(Path(str(corpus))).search(query, DOCUMENTS))
        return documents


class RetrieverError(Exception):
    """A search that did not happen; the message is what the policy reads."""


class Retriever:
    """A search server: POST `{"query", "topk", "return_scores"}`, answered by `{"result": [[{"document": ...}]]}`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))

    async def search(self, query: str, count: int) -> list[str]:
        for pause in (*RETRY_AFTER, None):
            try:
                return _read_hits(await self._ask(query, count))
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                raise EnvironmentFault(
                    f"{self._url!r} is no address", remedy=f"export {URL_VARIABLE}=http://HOST:PORT/retrieve"
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                if pause is None or not _may_pass(error):
                    # Not its text: that has the server's address, which is none of the policy's business.
                    cause = f"status {error.status}" if isinstance(error, aiohttp.ClientResponseError) else "no answer"
                    raise RetrieverError(f"the search server failed ({cause})") from error
                await asyncio.sleep(pause)
        raise AssertionError

    async def _ask(self, query: str, count: int) -> Any:
        request = {"query": query, "topk": count, "return_scores": True}
        async with self._session.post(self._url, json=request, raise_for_status=True) as response:
            try:
                return json.loads(await response.read())
            except ValueError as error:
                raise RetrieverError("the search server's answer is not JSON") from error

    async def close(self) -> None:
        await self._session.close()


def _may_pass(error: Exception) -> bool:
    """A fault that may be gone in a moment."""
    return not isinstance(error, aiohttp.ClientResponseError) or error.status in _PASSING


def _read_hits(response: Any) -> list[str]:
    try:
        return [str(hit["document"]["contents"]) for hits in response["result"] for hit in hits]
    except (KeyError, TypeError) as error:
        raise RetrieverError("the search server's answer has no documents") from error


class Index:
    """The words of a corpus file as it is now."""

    def __init__(self, file: Path) -> None:
        import numpy as np  # here, for only a corpus needs it

        self._file = file
        self._begins = array("Q")
        lengths = array("I")
        postings: dict[str, tuple[array[int], array[int]]] = {}
        begin = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    counts = Counter(_split_words(_read_document(line, file, number)))
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
        with self._file.open("rb") as lines:
            return [self._read_line(lines, int(document)) for document in best]

    def _read_line(self, lines: Any, document: int) -> str:
        lines.seek(self._begins[document])
        return _read_document(lines.readline(), self._file, document + 1)


def load_index(file: Path) -> Index:
    """The index of a corpus, built at the first call and again when the file has changed. Call it in a thread."""
    file = file.expanduser().resolve()
    try:
        state = file.stat()
        with _building:
            return _build_index(file, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise EnvironmentFault(
            f"the corpus {file} cannot be read: {error.strerror or error}", remedy="a file of JSON lines"
        ) from error


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
        raise EnvironmentFault(
            f"{file}, line {number}: {error}", remedy='each line is {"id": ..., "contents": ...} or has title and text'
        ) from error
    return contents
