"""Scorers of texts: `exact`, `includes`, `f1`."""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import lru_cache
from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers.reading.answers import Found, names_one, placed, plain, statement, strip_thinking, why_unnamed
from treetune.scorers.scorer import Scorer, expected, require_truths

SHORT = 5
"""The most words of a ground truth that is a name rather than prose."""


class Exact(Scorer, frozen=True, tag="exact"):
    ignore_case: bool = False
    """Whether capitals and small letters are the same."""
    strip: bool = True
    """Whether spaces, quotes, markdown, `$` and a full stop around the answer are left out. Without it the whole reply
    is compared letter by letter."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the answer is the ground truth and nothing else."""
        truths = require_truths(truth, task)
        found = self.find(answer) if self.strip or self.answer is not None else Found(strip_thinking(answer))
        if found.text is None:
            return Score(0.0, explanation=found.why)
        text = found.text.casefold() if self.ignore_case else found.text
        for one in truths:
            wanted = _normal_truth(str(one), self.ignore_case, self.strip)
            if wanted in text and wanted and _normal(found.text, self.ignore_case, self.strip) == wanted:
                return Score(1.0, answer=found.text, explanation="right")
        return Score(0.0, answer=found.text, explanation=expected(truths))

    def fault(self, truth: Any, task: Task | None) -> str | None:
        empty = any(not _normal(str(one), self.ignore_case, self.strip) for one in require_truths(truth, task))
        return "says nothing" if empty else None


def _normal(text: str, ignore_case: bool, strip: bool) -> str:
    # What begins and ends with a letter has nothing around it.
    if strip and not (text[:1].isalnum() and text[-1:].isalnum()):
        text = plain(text)
    return text.casefold() if ignore_case else text


_normal_truth = lru_cache(maxsize=4096)(_normal)


class Includes(Scorer, frozen=True, tag="includes"):
    ignore_case: bool = True
    """Whether capitals and small letters are the same."""
    strip: bool = True
    """Whether spaces, quotes and a full stop around the ground truth are left out."""
    hedges: bool = False
    """Whether a reply that denies it, leaves it open or names others beside it is right too."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the reply names the ground truth as its answer."""
        truths = require_truths(truth, task)
        reply = strip_thinking(answer)
        if self.answer is not None:
            found = placed(reply, self.answer)
            if found.text is None:
                return Score(0.0, explanation=found.why)
            reply = found.text
        elif not self.hedges:
            reply = statement(reply)
        text = reply.lower() if self.ignore_case else reply
        others = self._others(task, truths) if task is not None and not self.hedges else ()
        why = ""
        for one in truths:
            wanted = _wanted(str(one), self.ignore_case, self.strip)
            if not wanted:
                continue
            reason = why_unnamed(text, wanted, others, reply)
            if not reason or (self.hedges and reason != "not named"):
                return Score(1.0, answer=str(one), explanation="right")
            why = why or ("" if reason == "not named" else f"{one:.80} is {reason}")
        return Score(0.0, answer=reply[-200:].strip() or None, explanation=why or expected(truths))

    def _others(self, task: Task, truths: list[Any]) -> tuple[str, ...]:
        """The other options of a task that has some."""
        choices = task.extra_info.get("choices")
        if isinstance(choices, dict):  # {"label": [...], "text": [...]}, as ARC has them, or {"A": "Paris"}
            choices = choices.get("text", list(choices.values()))
        if not isinstance(choices, list):
            return ()
        right = {_wanted(str(one), self.ignore_case, self.strip) for one in truths}
        wanted = (_wanted(str(one), self.ignore_case, self.strip) for one in choices)
        return tuple(one for one in wanted if one and one not in right and not any(one in each for each in right))

    def fault(self, truth: Any, task: Task | None) -> str | None:
        empty = any(not _wanted(str(one), self.ignore_case, self.strip) for one in require_truths(truth, task))
        return "says nothing" if empty else None


@lru_cache(maxsize=4096)
def _wanted(truth: str, ignore_case: bool, strip: bool) -> str:
    truth = plain(truth) if strip else truth
    return truth.lower() if ignore_case else truth


class F1(Scorer, frozen=True, tag="f1"):
    threshold: float | None = None
    """From which F1 on the answer earns 1, and below it nothing; without it the reward is the F1."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ConfigError([("threshold", f"must be more than 0 and at most 1, got {self.threshold:g}")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """How many words the answer shares with the ground truth, as SQuAD counts them."""
        truths = require_truths(truth, task)
        found = self.find(answer)
        if found.text is None:
            return Score(0.0, explanation=found.why)
        said = words_of(statement(found.text))
        best = max(_f1(said, _words_of_truth(str(one))) for one in truths)
        if best and not self._is_single(found.text, truths):
            return Score(0.0, answer=found.text, explanation="left open or denied", metrics={"f1": 0.0})
        reward = best if self.threshold is None else float(best >= self.threshold)
        why = "right" if best == 1 else f"F1 {best:.2f}, {expected(truths)}"
        return Score(reward, answer=found.text, explanation=why, metrics={"f1": best})

    def _is_single(self, text: str, truths: list[Any]) -> bool:
        """Prose may say `or` and `not`; a name may not, unless the ground truth does."""
        if any(len(_words_of_truth(str(one))) > SHORT for one in truths):
            return True
        return names_one(text) or any(not names_one(str(one)) for one in truths)

    def fault(self, truth: Any, task: Task | None) -> str | None:
        empty = all(not _words_of_truth(str(one)) for one in require_truths(truth, task))
        return "has no word to compare" if empty else None


def _f1(said: tuple[str, ...], truth: tuple[str, ...]) -> float:
    if not said or not truth:
        return 0.0
    shared = sum((Counter(said) & Counter(truth)).values())
    return 2 * shared / (len(said) + len(truth))


def words_of(text: str) -> tuple[str, ...]:
    """As SQuAD's evaluation: without case, punctuation and articles."""
    return tuple(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


_words_of_truth = lru_cache(maxsize=4096)(words_of)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
