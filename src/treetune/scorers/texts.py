"""Scorers for texts: `exact`, `includes`, `f1`, and `choice` for multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from string import ascii_uppercase
from typing import Any, Literal

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, TasksetError
from treetune.scorers.reading.answers import (
    Found,
    Options,
    boxed,
    choose,
    names_one,
    placed,
    plain,
    read_label,
    statement,
    strip_thinking,
    why_unnamed,
)
from treetune.scorers.reading.answers import after as pieces_after
from treetune.scorers.scorer import Scorer, expected, require_truths

SHORT = 5
"""The most words of a ground truth that counts as a name rather than prose."""


class Exact(Scorer, frozen=True, tag="exact"):
    ignore_case: bool = False
    """Whether to ignore case."""
    strip: bool = True
    """Whether to ignore spaces, quotes, markdown, `$` and a full stop around the answer. If not, the whole reply is
    compared character by character."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the answer is exactly the ground truth."""
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
    # Text that begins and ends with a letter or digit needs no stripping.
    if strip and not (text[:1].isalnum() and text[-1:].isalnum()):
        text = plain(text)
    return text.casefold() if ignore_case else text


_normal_truth = lru_cache(maxsize=4096)(_normal)


class Includes(Scorer, frozen=True, tag="includes"):
    ignore_case: bool = True
    """Whether to ignore case."""
    strip: bool = True
    """Whether to ignore spaces, quotes and full stops around the ground truth."""
    hedges: bool = False
    """Whether a reply is also right if it denies the ground truth, leaves it open or names other answers too."""

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
        """The wrong options of a task with options."""
        choices = task.extra_info.get("choices")
        if isinstance(choices, dict):  # {"label": [...], "text": [...]}, as in ARC, or {"A": "Paris"}
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
    """The minimum F1 for a reward of 1; below it the reward is 0. Absent: the reward is the F1."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ConfigError([("threshold", f"must be more than 0 and at most 1, got {self.threshold:g}")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """The word overlap of the answer and the ground truth, as computed by SQuAD."""
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
        """Prose may contain `or` and `not`; a name may not, unless the ground truth does."""
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
    """The words as in SQuAD's evaluation, without case, punctuation and articles."""
    return tuple(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


_words_of_truth = lru_cache(maxsize=4096)(words_of)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


LETTERS = tuple(ascii_uppercase[:10])
"""The labels if the options are unknown."""


class Choice(Scorer, frozen=True, tag="choice"):
    choices: str | list[str] | dict[str, str] | None = None
    """The options: a list of texts, labelled A, B, ...; texts by label (`{"1": yes, "2": no}`); or the column (the key
    of `extra_info`) that holds them for each task. Absent: `extra_info.choices` if the task has it, else the letters
    only."""
    truth: Literal["label", "index", "text"] | None = None
    """What the ground truth is: a label, the index of the right option from 0, or its text. Absent: an integer is an
    index, and a text is a label or else an option's text."""

    def __post_init__(self) -> None:
        if isinstance(self.choices, list | dict) and len(self.choices) < 2:
            raise ConfigError([("choices", "there must be two options at least")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the reply chooses the right option, by its label or its text."""
        options = self._options(task)
        right = self._labels_of(truth, options, task)
        reply = strip_thinking(answer)
        if self.answer is not None:
            found = placed(reply, self.answer)
            if found.text is None:
                return Score(0.0, explanation=found.why)
            reply = found.text
        elif "#" in reply or "\\" in reply:
            reply = "\n".join(pieces_after(reply, "####") or boxed(reply)) or reply
        chosen = choose(reply, options)
        if chosen.label is None:
            return Score(0.0, explanation=chosen.why)
        if chosen.label in right:
            return Score(1.0, answer=chosen.label, explanation="right")
        return Score(0.0, answer=chosen.label, explanation=f"expected {' or '.join(sorted(right))}")

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        return self.say(self._label_of(require_truths(truth, task)[0], self._options(task), task))

    def fault(self, truth: Any, task: Task | None) -> str | None:
        try:
            options = self._options(task)
            for one in require_truths(truth, task):
                self._label_of(one, options, task)
        except TasksetError as error:
            return error.message
        return None

    def columns(self) -> list[str]:
        return [self.choices] if isinstance(self.choices, str) else []

    def _options(self, task: Task | None) -> Options:
        given: Any = self.choices
        if given is None or isinstance(given, str):
            given = None if task is None else task.extra_info.get(given or "choices")
            if given is None and self.choices is not None:
                raise TasksetError(f"there is no extra_info.{self.choices} with the options")
        if given is None:
            return _LETTERS_ALONE
        if not isinstance(given, list) and isinstance(given, Mapping):  # the Mapping check is slow
            if "label" in given and "text" in given:  # as in ARC
                return _make_options(tuple(map(str, given["label"])), tuple(map(str, given["text"])))
            return _make_options(tuple(map(str, given)), tuple(map(str, given.values())))
        if not isinstance(given, list | tuple) or not 0 < len(given) <= len(ascii_uppercase):
            raise TasksetError(f"the options are no list of 1 to 26: {given!r:.80}")
        texts = tuple(given)
        return _make_options(None, texts if isinstance(texts[0], str) else tuple(map(str, texts)))

    def _labels_of(self, truth: Any, options: Options, task: Task | None) -> Sequence[str]:
        if isinstance(truth, str) and (label := _find_label(truth, False, self.truth, options)) is not None:
            return (label,)
        return [self._label_of(one, options, task) for one in require_truths(truth, task)]

    def _label_of(self, truth: Any, options: Options, task: Task | None) -> str:
        """The label of the right option."""
        label = _find_label(str(truth), isinstance(truth, int), self.truth, options)
        if label is None:
            where = f"task {task.idx}: " if task is not None else ""
            known = ", ".join(options.texts or options.labels)
            problem = f"{where}the ground truth {truth!r:.60} is none of the options: {known:.200}"
            raise TasksetError(
                problem,
                remedy="name the column of the options (choices), and what the truth is: truth: index counts from 0",
            )
        return label


@lru_cache(maxsize=4096)
def _make_options(labels: tuple[str, ...] | None, texts: tuple[str, ...]) -> Options:
    return Options(labels or tuple(ascii_uppercase[: len(texts)]), texts)


_LETTERS_ALONE = Options(LETTERS)


@lru_cache(maxsize=4096)
def _find_label(truth: str, is_whole: bool, kind: str | None, options: Options) -> str | None:
    labels, texts = options
    if kind == "index" or (kind is None and is_whole and truth not in labels):
        return labels[int(truth)] if truth.isdecimal() and int(truth) < len(texts or labels) else None
    if kind != "text":
        label = read_label(plain(truth), Options(labels))
        if label is not None or kind == "label":
            return label
    folded = [text.strip().casefold() for text in texts]
    wanted = truth.strip().casefold()
    return labels[folded.index(wanted)] if wanted in folded else None
