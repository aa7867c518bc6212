"""Questions answered with the help of a search: `<search>query</search>` each turn, then `<answer>…</answer>`.

    Task(prompt="...", env_class="search", reward_spec={"ground_truth": ["Kansas City Chiefs", "Chiefs"]},
         extra_info={"corpus": "wiki.jsonl"})

What is searched: see `searcher`. The last answer earns 1 if it is one of the accepted ones but for case, punctuation,
articles and spaces.

Differences from skyrl-gym 0.4.0:
- the ground truth may be a text or a list besides `{"target": ...}`; there those are a TypeError at the end.
- what the search found is not looked through for answers; there a document that holds `<answer>` can be rewarded.
- an unreachable retriever costs 16 seconds a step at the most, not 45 and more; `search_failures` counts it.
- `max_turns` stands in `extra_info`.
"""

from __future__ import annotations

import re
import string
from collections import deque
from typing import Any

from treetune.builtin.conversation import Conversation, between
from treetune.builtin.search.searcher import Searcher
from treetune.contract import Contract, Kind, Stored
from treetune.environment import Action, Step
from treetune.errors import EnvironmentFault
from treetune.task import Task

SHOWN_ANSWER = 1000
"""How many characters of an answer the trace keeps."""

_INFORMATION = "\n<information></information>\n"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SearchEnvironment(Conversation):
    CONTRACT = Contract(
        about="Questions answered after searching a corpus",
        takes=(Kind.TEXT, Kind.LIST, Kind.MAPPING),
        stored=Stored.TARGET,
        max_turns=2,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        try:
            return f"<answer>{accepted_of(task.ground_truth)[0]}</answer>"
        except EnvironmentFault:
            return None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._accepted = {normalised(answer) for answer in accepted_of(task.ground_truth)}
        self._transcript: list[str] = []
        self._searcher = Searcher(task)

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        text = action.text
        self._transcript.append(text)
        answered = "<answer>" in text and "</answer>" in text
        if answered or last:
            return self._judge(truncated=not answered)
        self._transcript.append(_INFORMATION)
        query = next(between(text, "search"), None)
        found = "" if query is None else await self._searcher.results(query)
        return Step(f"\n<information>{found}</information>\n")

    async def close(self) -> None:
        await self._searcher.close()

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
                "metrics": {"turns": self.turns, **self._searcher.metrics},
            },
        )


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
