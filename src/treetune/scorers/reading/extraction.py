"""Finds the one answer of a reply: the same rule for every scorer, environment, judge and trainer.

    extract("So\n#### 1,000", None, read_amount)                  # Extraction("1,000", value=1000, form="####")
    extract("The answer is Paris.", None, read_text)              # Extraction("Paris", value="paris", ...)
    extract("#### 5\nOr the answer is 6.", None, read_amount)     # Extraction(None, "several different answers")

The declared form counts; if none is declared, the explicit statements, which must agree; else the last statement. Each
kind of answer has a `Reader`, which turns one statement into a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from operator import eq
from typing import Any, NamedTuple

from msgspec.structs import replace

from treetune.scorers.reading import statements, words
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.statements import DENIED, FIRST, ITEM, SENTENCES, SEVERAL, WHOLE, Extraction, Statement

Reader = Callable[[Statement], Extraction | None]
"""Reads a statement. None: it gives no answer of this kind. An extraction without a text: the statement does not give a
single answer."""
Same = Callable[[Any, Any], bool]


def extract(
    reply: str,
    place: AnswerFormat | None,
    read: Reader,
    same: Same = eq,
    verdicts: Callable[[str], list[Statement]] | None = None,
) -> Extraction:
    """The one answer of a reply, in a declared form or wherever it is stated. `verdicts` finds more explicit statements
    that only some kinds of answer have."""
    text = statements.clean(reply)
    if place is not None:
        return _declared(text, place, read, same)
    found = _agree(statements.explicit_statements(text), read, same)
    if found is None:
        text = text.strip()
        found = _agree(verdicts(text), read, same) if verdicts is not None else None
    if found is None:
        alone = statements.alone_statements(text)
        found = _agree(alone, read, same)
        if found is not None:
            found = _agree([*alone, Statement(FIRST, text[text.rfind("\n") + 1 :])], read, same)
    return _last(text, read) if found is None else _if_kept(found, text)


def _declared(text: str, place: AnswerFormat, read: Reader, same: Same) -> Extraction:
    declared = place.find(text)
    if not declared:
        return Extraction(None, f"no {place}")
    first = _agree(declared, read, same)
    if first is None:
        return Extraction(None, f"no answer in {place}: {declared[-1].text:.60}")
    if first.text is None or place.alone:
        return first
    known = {said.text for said in declared}
    others = [said for said in statements.explicit_statements(text) if said.text not in known]
    return _if_kept(_agree([*declared, *others], read, same) or first, text)


def read_as_written(statement: Statement) -> Extraction | None:
    """A statement unchanged, for a kind that reads the whole statement itself."""
    return Extraction(statement.text, value=statement.text) if statement.text.strip() else None


def _agree(given: list[Statement], read: Reader, same: Same) -> Extraction | None:
    """The answer that all statements give. The strongest form with an answer counts; weaker forms must not contradict
    it."""
    found: Extraction | None = None
    for statement in given:
        one = read(statement)
        if one is None or (one.why == DENIED and statement.form in SENTENCES):
            continue
        if found is None:
            found = replace(one, form=statement.form, begin=statement.begin)
        if one.text is None:
            if statement.form == found.form or one.why == SEVERAL:
                return Extraction(None, one.why, form=statement.form)
        elif found.text is not None:
            if not same(one.value, found.value):
                return Extraction(None, SEVERAL, form=found.form)
            if statement.begin > found.begin and found.text in one.text:
                found = replace(found, begin=statement.begin)
    return found


def _if_kept(found: Extraction, text: str) -> Extraction:
    """An answer, unless the reply takes it back or denies it afterwards."""
    if found.text is None:
        return found
    said = found.text.rstrip(" .!")
    end = max(text.find(said, found.begin) + len(said), found.begin)
    if len(text) - end < 4 and found.form[:1] != "\\":
        return found
    behind = text[end : end + 1000]
    back = words.taken_back(behind)
    if not back and found.form[:1] == "\\":
        back = words.denied(text[max(0, found.begin - 12) : found.begin]) or words.refused(behind)
    if not back and said and said in behind:
        again = re.finditer(rf"(?<!\w){re.escape(said)}(?!\w)", behind)
        back = any(words.refused(behind[one.end() :]) or words.denied(behind[: one.start()]) for one in again)
    return Extraction(None, f"{found.text:.60} is taken back", form=found.form) if back else found


def _last(text: str, read: Reader) -> Extraction:
    """The answer of the last statement that has one, unless it is the end of a list."""
    found: Extraction | None = None
    for statement in statements.last_statements(text):
        if found is not None:
            one = read(statement) if _is_item(statement) and statement.form == found.form else None
            if one is not None and one.text is not None and one.value != found.value:
                return Extraction(None, SEVERAL, form=statement.form)
            break
        one = read(statement)
        if one is not None and one.why != DENIED:
            found = replace(one, form=statement.form, begin=statement.begin)
            if one.text is None or statement.form == WHOLE or not _is_item(statement):
                break
    if found is None:
        return Extraction(None, "no answer")
    return Extraction(None, "the reply says that it does not know") if words.unsure(text) else _if_kept(found, text)


def _is_item(statement: Statement) -> bool:
    """Whether it could be an item of a list: with a bullet, or only a few words."""
    is_short = len(statement.text.split()) <= 2 and not _CONCLUSION.match(statement.text)
    return statement.form == ITEM or (is_short and not statements.is_title(statement.text))


# The values that a statement mentions


class Mention(NamedTuple):
    begin: int
    end: int
    value: Any
    """None: something that is not a plain value, such as `5 million`."""
    said: str


def settle(
    text: str, mentions: list[Mention], first: bool = True, agree: bool = False, several: bool = False
) -> Extraction | None:
    """What a statement gives: the first or the last value that it neither denies nor only remarks on. With `agree`, all
    such values must be the same; else those of one list must. With `several`, it gives all of them, as a set."""
    if not mentions:
        return None
    if len(mentions) > 1:
        mentions = _without_remarks(text, mentions)
    kept: list[list[Mention]] = []
    rejected: set[Any] = set()
    sure = words.plainly_said(text)
    if sure and len(mentions) == 1 and mentions[0].value is not None and not several:
        return Extraction(mentions[0].said, value=mentions[0].value)
    for group in _groups(text, mentions):
        if not sure and (words.denied(text[: group[0].begin]) or words.refused(text[group[-1].end :])):
            rejected.update(one.value for one in group)
        else:
            kept.append(group)
    if not kept:
        return Extraction(None, DENIED)
    chosen = [one for group in kept for one in group] if agree else kept[0 if first else -1]
    values = {one.value for one in chosen}
    if (
        (len(values) > 1 and not several)
        or (agree and not values.isdisjoint(rejected))
        or (not sure and words.hedged(text))
    ):
        return Extraction(None, SEVERAL)
    if None in values:
        return Extraction(None, f"not a plain answer: {text:.60}")
    if several:
        return Extraction(", ".join(sorted(values)), value=frozenset(values))
    return Extraction(chosen[0].said, value=chosen[0].value)


def _without_remarks(text: str, mentions: list[Mention]) -> list[Mention]:
    """The mentions behind `so`, or else before `because`, outside of brackets, and in the first sentence that has one
    that is not denied: `I'd go with B. A is tempting.`"""
    first = mentions[0]
    for one, after in pairwise(mentions):
        is_its_text = after.begin <= one.end + 3 and after.value == one.value  # "A. London"
        is_end = text[one.end : one.end + 4].lstrip(_MARKS).startswith(". ") and not is_its_text
        if is_end and not words.denied(text[: one.begin]):
            mentions = [each for each in mentions if each.begin <= one.begin]
            break
    last = mentions[-1]
    for word in _CONCLUSION.finditer(text, first.end, last.begin):
        mentions = [one for one in mentions if one.begin >= word.end()]
    if remark := _REMARK.search(text, mentions[0].end):
        turn = _BUT.search(text, remark.end())
        is_its_text = remark[0].strip() == ":" and not text[last.end :].strip(_MARKS + ".")  # "A: London"
        if not (is_its_text and last.begin - remark.end() <= 2):
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
    said = words.words_of(between)
    if _JSON.fullmatch(between):
        return True
    if not said:
        return not between.strip(" \t,;/|&~-+*×·^÷<>≤≥\\()[]_\"'") or between.strip() in ("和", "或", "か")
    return between.strip() in ("x", "\\times", "\\cdot") or (len(said) <= 4 and not _JOINING.isdisjoint(said))


_MARKS = " \t*_`\"'([{)]}$>#"
_JSON = re.compile(r"\"?,?\s*\"\w+\"\s*:\s*\"?")
_JOINING = frozenset(words.listed(words.LISTS["joining"]))
_CONCLUSION = re.compile(rf"\b(?:{words.either('concluding')})\b|所以", re.I)
_BUT = re.compile(rf"\b(?:{words.either('but')})\b|但", re.I)
_REMARK = re.compile(rf"[\s,;:–—-]+(?:{words.either('reasons', 'remarks')})\b|:\s|因为|\s\((?=[^()]{{4}})", re.I)
