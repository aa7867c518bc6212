"""Looks things up for environments that search: in a corpus file, or at a search server.

    searcher = Searcher(task)
    await searcher.results("capital of France")   # '{"result": "Doc 1: ...\\n"}', as skyrl-gym shows it
    await searcher.close()

The first of these that is set: the corpus file that the row's `extra_info.corpus` names (`bm25`), the retriever at
TREETUNE_SEARCH_URL (skyrl-gym's and Search-R1's protocol), the corpus file TREETUNE_SEARCH_CORPUS. A row never names an
address.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp

from treetune.errors import EnvironmentFault
from treetune.offload import call
from treetune.task import Task

URL_VARIABLE = "TREETUNE_SEARCH_URL"
CORPUS_VARIABLE = "TREETUNE_SEARCH_CORPUS"

DOCUMENTS = 3
"""How many documents a search shows."""
TIMEOUT = 5.0
"""The most seconds of one request to a retriever."""
RETRY_AFTER = (0.2, 0.8)
"""The pauses before a request is repeated."""

_RETRIED = (500, 502, 503, 504)


class Searcher:
    """The searches of one episode."""

    def __init__(self, task: Task) -> None:
        self._corpus = task.extra_info.get("corpus")
        self._retriever: Retriever | None = None
        self.searches = self.failures = 0

    async def results(self, query: str) -> str:
        """What the policy is shown: JSON, be it of an error."""
        self.searches += 1
        try:
            documents = await self._documents(query.strip())
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

    async def _documents(self, query: str) -> list[str]:
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
        documents: list[str] = await call(_search_corpus, Path(str(corpus)), query)
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
                return _contents(await self._ask(query, count))
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                raise EnvironmentFault(
                    f"{self._url!r} is no address", remedy=f"export {URL_VARIABLE}=http://HOST:PORT/retrieve"
                ) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                if pause is None or not _passing(error):
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


def _passing(error: Exception) -> bool:
    """A fault that may be gone in a moment."""
    return not isinstance(error, aiohttp.ClientResponseError) or error.status in _RETRIED


def _contents(response: Any) -> list[str]:
    try:
        return [str(hit["document"]["contents"]) for hits in response["result"] for hit in hits]
    except (KeyError, TypeError) as error:
        raise RetrieverError("the search server's answer has no documents") from error


def _search_corpus(file: Path, query: str) -> list[str]:
    from treetune.builtin.search.bm25 import index_of  # numpy, which only an embedded search needs

    return index_of(file).search(query, DOCUMENTS)
