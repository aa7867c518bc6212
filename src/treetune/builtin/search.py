"""Questions answered with the help of a search, and of Python.

    Task(prompt="...", env_class="search", reward_spec={"ground_truth": ["Kansas City Chiefs", "Chiefs"]},
         extra_info={"corpus": "wiki.jsonl"})
    Task(prompt="...", env_class="searchcode", reward_spec={"ground_truth": "42"}, extra_info={"corpus": "wiki.jsonl"})

`search` takes `<search>query</search>` each turn, then `<answer>…</answer>`: the last one counts. `searchcode` takes
`<tool><search>query</search></tool>` or `<tool><python>print(6 * 7)</python></tool>` each turn, then
`<solution>#### number</solution>`: the first `#### number` of all turns counts, as in `gsm8k`.

What is searched: see `searcher`. What a tool answered is never taken for the policy's own answer.
"""

from __future__ import annotations

import json
import re
import string
from collections import deque
from typing import Any

from treetune.builtin.code import MAIN, require_sandbox, run_python
from treetune.builtin.gsm8k import NUMBER_PATTERN, Gsm8kEnvironment
from treetune.builtin.searcher import RetrieverError, search
from treetune.builtin.turns import TurnEnvironment, find_tagged
from treetune.environment import Action, Contract, Kind, Step, Stored
from treetune.errors import EnvironmentFault
from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.task import Message, Task

SHOWN_ANSWER = 1000
"""How many characters of an answer the trace keeps."""
SECONDS, SHOWN_CHARACTERS = 10.0, 9000
"""How long a program may run, and how much of its output is shown."""

_INFORMATION = "\n<information>{}</information>\n"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPENING = re.compile(r"<(\w+)>")
_CLOSING = re.compile(r"</(\w+)>")


class SearchEnvironment(TurnEnvironment):
    CONTRACT = Contract(
        about="Questions answered after searching a corpus",
        takes=(Kind.TEXT, Kind.LIST, Kind.MAPPING),
        stored=Stored.TARGET,
        max_turns=2,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        try:
            return f"<answer>{read_accepted(task.ground_truth)[0]}</answer>"
        except EnvironmentFault:
            return None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._accepted = {normalise(answer) for answer in read_accepted(task.ground_truth)}
        self._said: list[str] = []
        self._search = SearchTool(task)

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        text = action.text
        self._said.append(text)
        answered = "<answer>" in text and "</answer>" in text
        if not answered and not last:
            query = next(find_tagged(text, "search"), None)
            return Step(_INFORMATION.format("" if query is None else await self._search.use(query)))
        answers = deque(find_tagged(_INFORMATION.format("").join(self._said), "answer"), maxlen=1)
        answer = answers[0].strip() if answers else None
        right = answer is not None and normalise(answer) in self._accepted
        wrong = "no <answer>" if answer is None else f"expected {' or '.join(sorted(self._accepted))}"
        return self.end(
            float(right),
            "right" if right else wrong,
            answer=answer and answer[:SHOWN_ANSWER],
            truncated=not answered,
            metrics={"turns": self.turns, **self._search.metrics},
        )


class SearchCodeEnvironment(Gsm8kEnvironment):
    CONTRACT = Contract(
        about="Questions answered after searching a corpus and running Python",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        pattern=NUMBER_PATTERN,
        max_turns=2,
        sandbox=True,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        number = super().gold(task)
        return number and f"<solution>{number}</solution>"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._said: list[str] = []
        self._search = SearchTool(task)
        self._programs = self._failures = 0

    async def start(self) -> list[Message]:
        await require_sandbox()
        return self.task.messages

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        text = action.text
        self._said.append(text)
        solved = "<solution>" in text and "</solution>" in text
        if not solved and not last:
            return Step(await self._use_tool(text))
        answer, right, explanation = self.judge("\n".join(self._said))
        programs = {"programs": self._programs, "program_failures": self._failures}
        metrics = {"turns": self.turns, **self._search.metrics, **programs}
        return self.end(float(right), explanation, answer=answer, truncated=not solved, metrics=metrics)

    async def _use_tool(self, text: str) -> str:
        block = next(find_tagged(text, "tool"), None)
        if block is None:
            return "No <tool>...</tool> block found in action string."
        tool, content = find_tool(block.strip())
        if tool == "search":
            return await self._search.use(content)
        if tool == "python":
            self._programs += 1
            files = {MAIN: content.encode("utf-8", "surrogatepass")}
            result = await run_python(files, limits=SandboxLimits(seconds=SECONDS))
            self._failures += not result.ok
            return describe(result)
        if tool is None:
            return "No valid inner tool tag found inside <tool> block."
        return f"Tool '{tool[:100]}' not found in any registered tool group."


class SearchTool:
    """The searches of one episode."""

    def __init__(self, task: Task) -> None:
        self._corpus = task.extra_info.get("corpus")
        self.metrics = {"searches": 0, "search_failures": 0}

    async def use(self, query: str) -> str:
        """What the policy is shown, as skyrl-gym writes it: JSON, be it of an error."""
        self.metrics["searches"] += 1
        try:
            documents = await search(query.strip(), self._corpus)
            listing = "".join(f"Doc {number}: {contents.strip()}\n" for number, contents in enumerate(documents, 1))
        except RetrieverError as error:
            self.metrics["search_failures"] += 1
            listing = f"Search error: {error}"
        return json.dumps({"result": listing or "No search results found."}, ensure_ascii=False)


def read_accepted(truth: Any) -> list[str]:
    """A text, a list of texts, or either as `{"target": ...}`."""
    if isinstance(truth, dict):
        truth = truth.get("target")
    answers = [truth] if isinstance(truth, str) else truth
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(answer, str) for answer in answers):
        why = f"search: the ground truth holds no texts but {truth!r:.100}"
        raise EnvironmentFault(why, remedy='write "Paris", ["Paris", "paris"] or {"target": ["Paris"]}')
    return list(answers)


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def find_tool(block: str) -> tuple[str | None, str]:
    """The first tag that is closed again, and what it holds; a pattern would be quadratic in open tags."""
    last = {closing[1]: closing.start() for closing in _CLOSING.finditer(block)}
    for tag in _OPENING.finditer(block):
        name = tag[1]
        if last.get(name, -1) >= tag.end():
            return name, block[tag.end() : block.index(f"</{name}>", tag.end())].strip()
    return None, ""


def describe(result: Result) -> str:
    """What the policy may read of its program's run."""
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
