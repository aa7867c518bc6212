"""Questions answered with the help of search, and of Python.

    Task(prompt="...", env_class="search", ground_truth=["Kansas City Chiefs", "Chiefs"],
         extra_info={"corpus": "wiki.jsonl"})

`search` ends with `<answer>…</answer>`, `searchcode` with `<solution>…</solution>`, in which the number counts as in
`gsm8k`. A reply with several different answers earns nothing. With `extra_info.strict: false`, answers are read as
skyrl-gym reads them: the last `<answer>`, the first `#### number` of all turns. A tool's reply is never taken for the
policy's own answer. A row never names an address. docs/environments.md says what is searched.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import string
import threading
from array import array
from collections import Counter, defaultdict, deque
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from treetune.core.contract import Contract
from treetune.core.environment import Action, Kind, Step, Stored, TaskRequirements
from treetune.core.task import Task
from treetune.errors import EnvironmentFault
from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import read_amount
from treetune.scorers.reading.statements import Extraction, Statement, tagged
from treetune.scorers.reading.wording import read_text, truth_key
from treetune.scorers.scorer import explain
from treetune.system.http_body import BodyTooLarge, read_body
from treetune.system.threads import call
from treetune.tasksets.code import run_python
from treetune.tasksets.gsm8k import Gsm8kEnvironment
from treetune.tasksets.turns import TurnEnvironment, list_answers

URL_VARIABLE = "TREETUNE_SEARCH_URL"
CORPUS_VARIABLE = "TREETUNE_SEARCH_CORPUS"
DOCUMENTS = 3
"""How many documents a search shows."""
TIMEOUT, RETRY_AFTER = 5.0, (0.2, 0.8)
"""The timeout of one request to a retriever in seconds, and the pauses before retries."""
K1, B = 1.5, 0.75
"""BM25: how soon repetitions of a word stop counting, and how much a document's length counts against it."""
SHOWN_ANSWER = 1000
"""How many characters of an answer the trace stores."""
SECONDS, SHOWN_CHARACTERS = 10.0, 9000
"""How many seconds a program may run, and how many characters of its output are shown."""

_PASSING = (None, 500, 502, 503, 504)
"""Statuses of failures that may be temporary; None: no answer."""
_WORD = re.compile(r"\w+")
_building = threading.Lock()
_INFORMATION = "\n<information>{}</information>\n"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPENING = re.compile(r"<(\w+)>")
_CLOSING = re.compile(r"</(\w+)>")


class SearchRequirements(TaskRequirements, frozen=True, kw_only=True):
    def is_free(self, truth: Any) -> bool:
        """skyrl-gym accepts an empty answer if the ground truth normalises to nothing."""
        return not all(map(normalise, list_answers(truth)))


class SearchEnvironment(TurnEnvironment):
    REQUIREMENTS = SearchRequirements(
        about="Questions answered after searching a corpus",
        takes=(Kind.TEXT, Kind.LIST, Kind.MAPPING),
        stored=Stored.TARGET,
    )
    CONTRACT = Contract(max_turns=2)

    ANSWER = AnswerFormat(tag="answer")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._accepted = list_answers(task.ground_truth)
        self._search = _Search(task)

    async def step(self, action: Action) -> Step:
        answered, over = self.take_turn(action.text, "answer")
        if not over:
            query = next(tagged(action.text, "search"), None)
            return Step(_INFORMATION.format("" if query is None else await self._search.use(query)))
        found = self._find_answer()
        answer = found.text
        right = answer is not None and any(
            found.value == truth_key(accepted) if self.strict else normalise(answer) == normalise(accepted)
            for accepted in self._accepted
        )
        expected = f"expected {' or '.join(sorted(map(normalise, self._accepted)))}"
        return self.end(
            float(right),
            explain(found, "" if right else expected),
            answer=answer and answer[:SHOWN_ANSWER],
            truncated=not answered,
            metrics={"turns": self.turns, **self._search.metrics},
        )

    def _find_answer(self) -> Extraction:
        if not self.strict:
            last = deque(tagged(_INFORMATION.format("").join(self.said), "answer"), maxlen=1)
            return Extraction(last[0] if last else None, "" if last else "no <answer>")
        # If several answers are accepted, any will do.
        accepted = [truth_key(truth) for truth in self._accepted]
        return extract(
            self.said[-1], self.ANSWER, read_text, lambda one, other: one == other or {one, other} <= set(accepted)
        )


class SearchCodeEnvironment(Gsm8kEnvironment):
    REQUIREMENTS = msgspec.structs.replace(
        Gsm8kEnvironment.REQUIREMENTS,
        about="Questions answered after searching a corpus and running Python",
        sandbox=True,
    )
    CONTRACT = Contract(max_turns=2)

    ANSWER = AnswerFormat(tag="solution")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._search = _Search(task)
        self._programs = self._failures = 0

    async def step(self, action: Action) -> Step:
        solved, over = self.take_turn(action.text, "solution")
        if not over:
            return Step(await self._use_tool(action.text))
        answer, right, explanation = self._judge_all()
        programs = {"programs": self._programs, "program_failures": self._failures}
        metrics = {"turns": self.turns, **self._search.metrics, **programs}
        return self.end(float(right), explanation, answer=answer, truncated=not solved, metrics=metrics)

    def _judge_all(self) -> tuple[str | None, bool, str]:
        if not self.strict:
            return self.judge("\n".join(self.said))
        return self.compare(extract(self.said[-1], self.ANSWER, read_solution))

    async def _use_tool(self, text: str) -> str:
        block = next(tagged(text, "tool"), None)
        if block is None:
            return "No <tool>...</tool> block found in action string."
        tool, content = find_tool(block.strip())
        if tool == "search":
            return await self._search.use(content)
        if tool == "python":
            self._programs += 1
            program = content.encode("utf-8", "surrogatepass")
            result = await run_python(program, limits=SandboxLimits(seconds=SECONDS))
            self._failures += not result.ok
            return output_of(result)
        if tool is None:
            return "No valid inner tool tag found inside <tool> block."
        return f"Tool '{tool[:100]}' not found in any registered tool group."


def read_solution(statement: Statement) -> Extraction | None:
    """The number of a solution, after `####` if it has one."""
    if "####" in statement.text:
        return extract(statement.text, AnswerFormat(hash=True), read_amount)
    return read_amount(statement)


class _Search:
    """The searches of one episode, with the retriever or else in the corpus, and their counts."""

    def __init__(self, task: Task) -> None:
        self._corpus = task.extra_info.get("corpus")
        self.metrics = {"searches": 0, "search_failures": 0}

    async def use(self, query: str) -> str:
        """Return what the policy is shown, in skyrl-gym's format: JSON, even for an error."""
        self.metrics["searches"] += 1
        try:
            documents = await self._find(query.strip())
            listing = "".join(f"Doc {number}: {contents.strip()}\n" for number, contents in enumerate(documents, 1))
        except RetrieverError as error:
            self.metrics["search_failures"] += 1
            listing = f"Search error: {error}"
        return json.dumps({"result": listing or "No search results found."}, ensure_ascii=False)

    async def _find(self, query: str) -> list[str]:
        url = os.environ.get(URL_VARIABLE)
        if url and not self._corpus:
            return await ask_retriever(url, query)
        corpus = self._corpus or os.environ.get(CORPUS_VARIABLE)
        if not corpus:
            remedy = f"export {CORPUS_VARIABLE}=FILE.jsonl or {URL_VARIABLE}=http://..., or give rows extra_info.corpus"
            raise EnvironmentFault("there is nothing to search", remedy=remedy)
        documents: list[str] = await call(lambda: load_index(Path(str(corpus))).search(query, DOCUMENTS))
        return documents


def normalise(answer: str) -> str:
    """Lower-case a text and remove punctuation, articles and extra spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def find_tool(block: str) -> tuple[str | None, str]:
    """Return the first tag that is closed again, and its content; a pattern would be quadratic in open tags."""
    last = {closing[1]: closing.start() for closing in _CLOSING.finditer(block)}
    for tag in _OPENING.finditer(block):
        name = tag[1]
        if last.get(name, -1) >= tag.end():
            return name, block[tag.end() : block.index(f"</{name}>", tag.end())].strip()
    return None, ""


def output_of(result: Result) -> str:
    """Return the part of its program's run that the policy may read."""
    limits = {
        Ended.TIMEOUT: f"Execution timed out after {SECONDS} seconds.",
        Ended.MEMORY: "It used too much memory.",
        Ended.OUTPUT: "It printed too much.",
    }
    failure = limits.get(result.ended) or result.error_text.strip()
    text = f"Error executing Python code: {failure}" if failure else result.text.strip()
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]}\n...\n{text[-SHOWN_CHARACTERS // 2 :]}"
    return text


class RetrieverError(Exception):
    """A search that failed; the policy reads the message."""


async def ask_retriever(url: str, query: str) -> list[str]:
    """POST `{"query", "topk", "return_scores"}`, answered by `{"result": [[{"document": ...}]]}`."""
    request = {"query": query, "topk": DOCUMENTS, "return_scores": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT), raise_for_status=True) as session:
        for pause in (*RETRY_AFTER, None):
            try:
                async with session.post(url, json=request) as response:
                    result = json.loads(await read_body(response))["result"]
                    return [str(hit["document"]["contents"]) for hits in result for hit in hits]
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                remedy = f"export {URL_VARIABLE}=http://HOST:PORT/retrieve"
                raise EnvironmentFault(f"{url!r} is not an address", remedy=remedy) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                status = getattr(error, "status", None)
                if pause is None or status not in _PASSING:
                    # Without the error's text: it contains the server's address, which the policy must not see.
                    cause = "no answer" if status is None else f"status {status}"
                    raise RetrieverError(f"the search server failed ({cause})") from error
                await asyncio.sleep(pause)
            except BodyTooLarge as error:
                raise RetrieverError("the search server's answer is too large") from error
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RetrieverError("the search server's answer is not JSON, or has no documents") from error
    raise AssertionError


class Index:
    """The words of a corpus file and where each line begins; texts are read from the file when they are found."""

    def __init__(self, file: Path) -> None:
        import numpy as np  # here, because only a corpus needs it

        self._file = file
        self._begins = array("Q")
        lengths = array("I")
        postings: dict[str, tuple[array[int], array[int]]] = defaultdict(lambda: (array("I"), array("I")))
        begin = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    counts = Counter(_WORD.findall(_read_document(line, file, number).lower()))
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

    def search(self, query: str, count: int) -> list[str]:
        """Return the best documents with at least one word of the query, best first, earlier lines first among
        equals."""
        import numpy as np

        total = len(self._begins)
        scores = np.zeros(total, dtype=np.float32)
        for word, repeated in Counter(_WORD.findall(query.lower())).items():
            if word in self._postings:
                found, counts = (np.frombuffer(part, dtype=np.uint32) for part in self._postings[word])
                rarity = math.log(1 + (total - len(found) + 0.5) / (len(found) + 0.5))
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
    """Return the index of a corpus, built at the first call and again if the file has changed. Call it in a thread."""
    file = file.expanduser().resolve()
    try:
        state = file.stat()
        with _building:
            return _build_index(file, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise EnvironmentFault(f"the corpus cannot be read: {error}", remedy="a file of JSON lines") from error


_build_index = lru_cache(maxsize=8)(lambda file, modified, size: Index(file))


def _read_document(line: bytes, file: Path, number: int) -> str:
    try:
        document = msgspec.json.decode(line)
        contents = document.get("contents")
        if contents is None:
            contents = "\n".join(filter(None, (document.get("title"), document.get("text"))))
        if not isinstance(contents, str) or not contents:
            raise ValueError("no text")
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        remedy = 'each line is {"id": ..., "contents": ...} or has title and text'
        raise EnvironmentFault(f"{file}, line {number}: {error}", remedy=remedy) from error
    return contents
