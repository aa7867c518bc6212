"""Scorers for texts: `exact`, `includes`, `f1`, and `pattern` for regular expressions."""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import lru_cache
from typing import Any, Literal

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers.reading.bounded_search import SECONDS, check_pattern, search
from treetune.scorers.reading.extraction import extract, read_as_written
from treetune.scorers.reading.numerals import plain
from treetune.scorers.reading.statements import FIRST, SEVERAL, Extraction, Statement, strip_thinking
from treetune.scorers.reading.wording import read_text, same, text_key, truth_key
from treetune.scorers.reading.words import denied, hedged, plainly_said, refused
from treetune.scorers.scorer import Scorer, expected, explain, judged, require_truths

SHORT = 5
"""The maximum number of words of a ground truth that counts as a name rather than prose."""
SHORT_REPLY = 200
"""The maximum number of characters of a reply without an explicit answer that `includes` reads as one statement."""
OTHER_WORDS = 12
"""How many words longer than the truth a statement may be for `includes`."""


class Words(Scorer, frozen=True):
    """The base of the scorers that compare words."""

    ignore_case: bool = True
    """Whether to ignore case."""

    def fault(self, truth: Any, task: Task | None) -> str | None:
        return "says nothing" if any(not truth_key(str(one)) for one in require_truths(truth, task)) else None


class Exact(Words, frozen=True, tag="exact"):
    strip: bool = True
    """Whether to ignore articles, quotes, markdown and punctuation around the answer. If not, the reply, or the part in
    the declared place, is compared character by character."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the answer is exactly the ground truth."""
        truths = require_truths(truth, task)
        if not self.strip:
            found = self._read_raw(answer)
            right = any(found.text == str(one) for one in truths)
        else:
            found = extract(answer, self.answer, read_text)
            right = found.text is not None and any(self._is_same(found, str(one)) for one in truths)
            right = right or self.is_verbatim(found, answer, truths)
        return judged(found, right, truths)

    def _read_raw(self, answer: str) -> Extraction:
        if self.answer is None:
            return Extraction(strip_thinking(answer), form="the whole reply")
        return extract(answer, self.answer, read_as_written)

    def _is_same(self, found: Extraction, truth: str) -> bool:
        if found.value != truth_key(truth) or not found.value:
            return False
        return self.ignore_case or plain(str(found.text)) == plain(truth)


class Includes(Words, frozen=True, tag="includes"):
    hedges: bool = False
    """Whether a reply is also right if it denies the ground truth, leaves it open or also names other answers."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the statement of the answer names the ground truth, with a few other words and no other option."""
        truths = require_truths(truth, task)
        if self.hedges:
            return self._search_everywhere(answer, truths)
        found = extract(answer, self.answer, read_phrase, _one_includes_other)
        if found.text is None:
            return judged(found, False, truths)
        others = _other_options(task, truths)
        problems = [self._why_not(found.text, found.value, str(one), others) for one in truths]
        why = explain(found, "" if "" in problems else problems[0])
        return Score(float("" in problems), answer=found.text, explanation=why)

    def _why_not(self, text: str, key: str, truth: str, others: tuple[str, ...]) -> str:
        """Why a statement does not name a ground truth as the answer; "" if it does. `key`: the text's."""
        wanted, name = truth_key(truth), plain(truth)
        if not _names(key, wanted) or not (self.ignore_case or name in text):
            return f"expected {truth:.80}"
        if len(text.split()) - len(name.split()) > OTHER_WORDS:
            return f"more than {OTHER_WORDS} other words"
        begin = max(0, text.casefold().find(name.casefold()))
        ahead, behind = text[:begin], text[begin + len(name) :]
        if not plainly_said(text) and (denied(ahead) or refused(behind) or hedged(ahead) or hedged(behind)):
            return f"{truth:.80} is denied or left open"
        if other := next((one for one in others if _names(key, one)), None):
            return f"{other} is also named"
        return SEVERAL if plain(text) != name and _is_list(text) else ""

    def _search_everywhere(self, answer: str, truths: list[Any]) -> Score:
        said = text_key(strip_thinking(answer))
        right = next((str(one) for one in truths if _names(said, truth_key(str(one)))), None)
        return Score(float(right is not None), answer=right, explanation="right" if right else expected(truths))


def read_phrase(statement: Statement) -> Extraction | None:
    """A statement as it is, for a kind that compares a part of it."""
    text = plain(statement.text)
    if statement.form == FIRST or not text:
        return None
    return Extraction(text, value=f" {text_key(text)} ")


def _one_includes_other(one: str, other: str) -> bool:
    return one in other or other in one


def _names(said: str, wanted: str) -> bool:
    """Whether the words of a text include other words; in a script without spaces, letters."""
    return f" {wanted} " in f" {said} " or (
        not wanted.isascii() and _NO_SPACES.search(wanted) is not None and wanted in said
    )


def _is_list(text: str) -> bool:
    """Whether a text lists names: one a line, or with a separator that is not a comma; or three with commas."""
    items = [plain(item) for item in _SEPARATOR.split(text) if not item.rstrip(" *_").endswith((".", ":", "…"))]
    names = [item for item in items if len(item.split()) <= 3 and any(map(str.isalnum, item)) and not item[0].islower()]
    return len(names) >= (3 if _ONLY_COMMAS.fullmatch(text) else 2)


def _other_options(task: Task | None, truths: list[Any]) -> tuple[str, ...]:
    """The wrong options of a task with options."""
    choices = task.extra_info.get("choices") if task is not None else None
    if isinstance(choices, dict):  # {"label": [...], "text": [...]}, as in ARC, or {"A": "Paris"}
        choices = choices.get("text", list(choices.values()))
    if not isinstance(choices, list):
        return ()
    right = [f" {truth_key(str(one))} " for one in truths]
    wrong = (truth_key(str(one)) for one in choices)
    return tuple(one for one in wrong if one and not any(f" {one} " in each for each in right))


_NO_SPACES = re.compile("[\u3040-\u30ff\u3400-\u9fff]")
_SEPARATOR = re.compile(r"[,;/|]|(?<!\n)\n(?!\s*\n)|\b(?:and|as well as|then|plus|und|et|y|e|и)\b|和")
_ONLY_COMMAS = re.compile(r"(?:(?!\b(?:and|as well as|then|plus|und|et|y|e|и)\b)[^;/|\n和])*")


class F1(Scorer, frozen=True, tag="f1"):
    threshold: float | None = None
    """The minimum F1 for a reward of 1; below it the reward is 0. Absent: the reward is the F1."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ConfigError([("threshold", f"must be more than 0 and at most 1, got {self.threshold:g}")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """The word overlap of the answer and the ground truth, as computed by SQuAD."""
        truths = require_truths(truth, task)
        found = extract(answer, self.answer, read_phrase, _one_includes_other)
        if found.text is None:
            return Score(0.0, explanation=found.why)
        said = words_of(found.text)
        best = max(_f1(said, _words_of_truth(str(one))) for one in truths)
        if best and not self._is_single(found.text, truths):
            return Score(0.0, answer=found.text, explanation="left open or denied", metrics={"f1": 0.0})
        reward = best if self.threshold is None else float(best >= self.threshold)
        why = explain(found, "" if best == 1 else f"F1 {best:.2f}, {expected(truths)}")
        return Score(reward, answer=found.text, explanation=why, metrics={"f1": best})

    def _is_single(self, text: str, truths: list[Any]) -> bool:
        """Prose may contain `or` and `not`; a name may not, unless the ground truth does."""
        if any(len(_words_of_truth(str(one))) > SHORT for one in truths):
            return True
        return not (hedged(text) or denied(text)) or any(hedged(str(one)) or denied(str(one)) for one in truths)

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


class Pattern(Scorer, frozen=True, tag="pattern"):
    pattern: str
    """The regular expression to search for in the reply."""
    group: int | str | None = None
    """The group with the answer, by number or name. Absent: the first group, or the whole match if there is none."""
    which: Literal["only", "first", "last"] = "only"
    """Which match counts if there are several. `only`: all matches must be the same."""
    ignore_case: bool = False
    """Whether to ignore case."""
    strip: bool = True
    """Whether to compare numbers by value, and texts without surrounding markdown, quotes and a full stop."""
    match_only: bool = False
    """Whether any match earns 1, whatever its text is. Use it to check a format, as a part of other scorers."""

    def __post_init__(self) -> None:
        try:
            compiled = check_pattern(self.pattern, self.ignore_case)
        except ValueError as error:
            raise ConfigError([("pattern", str(error))]) from None
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ConfigError([("group", f"the pattern has no group {self.group!r}; there are {known}")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the text that the pattern finds matches the ground truth."""
        truths = [] if self.match_only else require_truths(truth, task)
        reply, form = strip_thinking(answer), "a match"
        if self.answer is not None:
            place = extract(answer, self.answer, read_text)
            if place.text is None:
                return Score(0.0, explanation=place.why)
            reply, form = place.text, place.form
        matches = search(self.pattern, reply, self.group, ignore_case=self.ignore_case)
        if matches is None:
            return Score(0.0, explanation=f"the search took more than {SECONDS:g} seconds")
        if self.match_only:
            why = "it matches" if matches else "the pattern matches nothing"
            return Score(float(bool(matches)), answer=matches[-1] if matches else None, explanation=why)
        found = self._choose(matches, form)
        right = found.text is not None and any(self._is_same(found.text, str(one)) for one in truths)
        return judged(found, right, truths)

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        """A reply in which the pattern finds the ground truth, if one of a few usual forms works."""
        if self.match_only:
            return None
        text = str(require_truths(truth, task)[0])
        prefix = _literal_prefix(self.pattern)
        ways = [text, f"{prefix}{text}", f"{prefix} {text}", f"#### {text}", f"Answer: {text}", f"\\boxed{{{text}}}"]
        said = (self.say(way) for way in ways)
        return next((reply for reply in said if self.score(reply, truth, task).reward == 1), None)

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        return None if self.match_only else super().problem(truth, task)

    def _choose(self, matches: list[str], form: str) -> Extraction:
        if not matches:
            return Extraction(None, "the pattern matches nothing")
        said = matches[0 if self.which == "first" else -1]
        if self.which == "only" and len(matches) > 1 and len({text_key(plain(match)) for match in matches}) > 1:
            return Extraction(None, SEVERAL)
        return Extraction(said, form=form) if said.strip() else Extraction(None, "the match is empty")

    def _is_same(self, said: str, truth: str) -> bool:
        if self.ignore_case:
            said, truth = said.casefold(), truth.casefold()
        return same(said, truth) if self.strip else said == truth


def _literal_prefix(pattern: str) -> str:
    """The literal text that a pattern begins with."""
    match = re.match(r"(?:\\[^\w\s]|[^\\.^$*+?{}\[\]|()])*(?![*+?{])", pattern)
    return re.sub(r"\\(.)", r"\1", match[0]) if match else ""
