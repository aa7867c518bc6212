"""Chooses among the values that a statement mentions: it gives one value or none, whatever the kind of answer.

settle("There are 42 apples, not 41.", [Mention(10, 12, 42, "42"), Mention(25, 27, 41, "41")])    # 42
settle("5 or 6", [Mention(0, 1, 5, "5"), Mention(5, 6, 6, "6")])                                  # none: several
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple

from treetune.scorers.reading.statements import DENIED, SEVERAL, Extraction
from treetune.scorers.reading.words import LISTS, denied, hedged, listed, refused, words_of


class Mention(NamedTuple):
    begin: int
    end: int
    value: Any
    """None: something that is no plain value, such as `5 million`."""
    said: str


def settle(text: str, mentions: list[Mention], first: bool = True, agree: bool = False) -> Extraction | None:
    """What a statement gives: the first or the last value that it neither denies nor only remarks on. With `agree`, all
    such values must be the same; if not, only those of one list must."""
    if not mentions:
        return None
    if len(mentions) > 1:
        mentions = _without_remarks(text, mentions)
    kept, rejected = list[list[Mention]](), set[Any]()
    for group in _groups(text, mentions):
        if denied(text[: group[0].begin]) or refused(text[group[-1].end :]):
            rejected.update(one.value for one in group)
        else:
            kept.append(group)
    if not kept:
        return Extraction(None, DENIED)
    chosen = [one for group in kept for one in group] if agree else kept[0 if first else -1]
    value = chosen[0].value
    if any(one.value != value for one in chosen) or (agree and value in rejected) or hedged(text):
        return Extraction(None, SEVERAL)
    return (
        Extraction(None, f"no plain answer: {text:.60}") if value is None else Extraction(chosen[0].said, value=value)
    )


def _without_remarks(text: str, mentions: list[Mention]) -> list[Mention]:
    """The mentions behind `so`, or else before `because`, outside of brackets, and in the first sentence that has one
    that is not denied: `I'd go with B. A is tempting.`"""
    first = mentions[0]
    for one, after in pairwise(mentions):
        is_its_text = after.begin <= one.end + 3 and after.value == one.value  # "A. London"
        is_end = text[one.end : one.end + 4].lstrip(_MARKS).startswith(". ") and not is_its_text
        if is_end and not denied(text[: one.begin]):
            mentions = [each for each in mentions if each.begin <= one.begin]
            break
    last = mentions[-1]
    for word in _CONCLUSION.finditer(text, first.end, last.begin):
        mentions = [one for one in mentions if one.begin >= word.end()]
    if remark := _REMARK.search(text, mentions[0].end):
        turn = _BUT.search(text, remark.end())
        rest = text[remark.end() :].strip(_MARKS + ".")
        if not (
            remark[0].strip() in (":", "：") and len(rest) <= last.end - remark.end() and last.begin - remark.end() <= 2
        ):
            mentions = [one for one in mentions if one.begin < remark.start() or (turn and one.begin > turn.end())]
    return mentions


def _groups(text: str, mentions: list[Mention]) -> list[list[Mention]]:
    """The lists among mentions, which a denial denies together: `A, C and D are wrong`."""
    groups = [mentions[:1]]
    for one in mentions[1:]:
        if _joined(text[groups[-1][-1].end : one.begin]):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _joined(between: str) -> bool:
    """Whether the text between two values makes them a list or an expression."""
    words = words_of(between)
    if _JSON.fullmatch(between):
        return True
    if not words:
        return not between.strip(" \t,;/|&~-+*×·^÷<>≤≥\\()[]_\"'") or between.strip() in ("和", "或", "か", "、")
    return between.strip() in ("x", "\\times", "\\cdot") or (len(words) <= 4 and not _JOINING.isdisjoint(words))


_MARKS = " \t*_`\"'“”‘’([{)]}$>#"
_JSON = re.compile(r"\"?,?\s*\"\w+\"\s*:\s*\"?")
_JOINING = frozenset(listed(LISTS["joining"]))
_CONCLUSION = re.compile(
    r"\b(?:so|thus|therefore|hence|makes?|makes|leaves|gives|giving|daher|somit|donc|portanto|quindi|поэтому)\b|所以",
    re.I,
)
_BUT = re.compile(r"\b(?:but|aber|mais|pero|mas|ma|но)\b|但", re.I)
_REMARK = re.compile(
    r"[\s,;:–—-]+(?:because|since|as|for|which|while|whereas|although|though|unlike|given|weil|denn|da|car|parce|porque"
    r"|ya que|puisque|потому)\b|[:：]\s|因为|\s[(（](?=[^()（）]{4})",
    re.I,
)
