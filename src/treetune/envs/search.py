"""Questions answered with the help of a search: `<search>query</search>` each turn, then `<answer>…</answer>`.

    Task(prompt="...", env_class="search", reward_spec={"ground_truth": ["Kansas City Chiefs", "Chiefs"]},
         extra_info={"corpus": "wiki.jsonl"})

What is searched, the first of these that is set: the corpus file that `extra_info.corpus` names (`bm25`), the retriever
at TREETUNE_SEARCH_URL (skyrl-gym's and Search-R1's protocol), the corpus file TREETUNE_SEARCH_CORPUS. A row never names
an address. The last answer earns 1 if it is one of the accepted ones but for case, punctuation, articles and spaces.

Differences from skyrl-gym 0.4.0:
- the ground truth may be a text or a list besides `{"target": ...}`; there those are a TypeError at the end.
- what the search found is not looked through for answers; there a document that holds `<answer>` can be rewarded.
- an unreachable retriever costs 16 seconds a step at the most, not 45 and more; `search_failures` counts it.
- `max_turns` stands in `extra_info`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import string
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp

from treetune.contract import Contract, Kind, Stored
from treetune.environment import Action, Step
from treetune.envs.conversation import Conversation, between
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
SHOWN_ANSWER = 1000
"""How many characters of an answer the trace keeps."""

_INFORMATION = "\n<information></information>\n"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RETRIED = (500, 502, 503, 504)


class SearchEnvironment(Conversation):
    CONTRACT = Contract(
        about="Questions answered after searching a corpus",
        takes=(Kind.TEXT, Kind.LIST, Kind.MAPPING),
        stored=Stored.TARGET,
        max_turns=2,
    )

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._accepted = {normalised(answer) for answer in accepted_of(task.ground_truth)}
        self._transcript: list[str] = []
        self._retriever: Retriever | None = None
        self._searches = self._failures = 0

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        text = action.text
        self._transcript.append(text)
        answered = "<answer>" in text and "</answer>" in text
        if answered or last:
            return self._judge(truncated=not answered)
        self._transcript.append(_INFORMATION)
        query = next(between(text, "search"), None)
        found = "" if query is None else await self._search(query.strip())
        return Step(f"\n<information>{found}</information>\n")

    async def close(self) -> None:
        if self._retriever is not None:
            await self._retriever.close()

    async def _search(self, query: str) -> str:
        self._searches += 1
        try:
            documents = await self._documents(query)
        except RetrieverError as error:
            self._failures += 1
            return json.dumps({"result": f"Search error: {error}"}, ensure_ascii=False)
        listing = "".join(f"Doc {number}: {contents.strip()}\n" for number, contents in enumerate(documents, 1))
        return json.dumps({"result": listing or "No search results found."}, ensure_ascii=False)

    async def _documents(self, query: str) -> list[str]:
        corpus = self.task.extra_info.get("corpus")
        url = os.environ.get(URL_VARIABLE)
        if url and not corpus:
            self._retriever = self._retriever or Retriever(url)
            return await self._retriever.search(query, DOCUMENTS)
        corpus = corpus or os.environ.get(CORPUS_VARIABLE)
        if not corpus:
            raise EnvironmentFault(
                "there is nothing to search",
                remedy=f"export {CORPUS_VARIABLE}=FILE.jsonl or {URL_VARIABLE}=http://..., "
                "or give rows an extra_info.corpus",
            )
        documents: list[str] = await call(_search_corpus, Path(str(corpus)), query)
        return documents

    def _judge(self, truncated: bool) -> Step:
        answers = deque(between("".join(self._transcript), "answer"), maxlen=1)
        answer = answers[0].strip() if answers else None
        right = answer is not None and normalised(answer) in self._accepted
        if right:
            explanation = "right"
        elif answer is None:
            explanation = "no <answer>"
        else:
            explanation = f"expected {' or '.join(sorted(self._accepted))}"
        return Step(
            reward=float(right),
            done=True,
            truncated=truncated,
            info={
                "answer": answer and answer[:SHOWN_ANSWER],
                "explanation": explanation,
                "success": right,
                "metrics": {"turns": self.turns, "searches": self._searches, "search_failures": self._failures},
            },
        )


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
    from treetune.envs.bm25 import index_of  # numpy, which only an embedded search needs

    return index_of(file).search(query, DOCUMENTS)


def accepted_of(truth: Any) -> list[str]:
    """A text, a list of texts, or either as `{"target": ...}`."""
    if isinstance(truth, dict):
        truth = truth.get("target")
    answers = [truth] if isinstance(truth, str) else truth
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise EnvironmentFault(
            f"search: the ground truth holds no texts but {truth!r:.100}",
            remedy='write "Paris", ["Paris", "paris"] or {"target": ["Paris"]}',
        )
    return list(answers)


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())
