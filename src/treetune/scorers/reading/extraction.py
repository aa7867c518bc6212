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
from operator import eq
from typing import Any

from msgspec.structs import replace

from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.statements import (
    DENIED,
    ITEM,
    SENTENCES,
    SEVERAL,
    WHOLE,
    Extraction,
    Statement,
    bold_words,
    clean,
    explicit_statements,
    first_line,
    last_statements,
)
from treetune.scorers.reading.words import denied, hedged, refused, taken_back, unsure

FINAL = 200
"""How many characters at the end of a reply without an explicit answer can say that it has none."""

Reader = Callable[[Statement], Extraction | None]
"""Reads a statement. None: it says nothing of this kind. An extraction without a text: it is no single answer."""


def extract(
    reply: str,
    place: AnswerFormat | None,
    read: Reader,
    same: Callable[[Any, Any], bool] = eq,
    verdicts: Callable[[str], list[Statement]] | None = None,
) -> Extraction:
    """The one answer of a reply, in a declared form or wherever it is stated. `verdicts` finds more explicit statements
    that only some kinds of answer have."""
    text = clean(reply)
    if place is not None:
        return _declared(text, place, read, same)
    found = _agree(explicit_statements(text), read, same)
    if found is None:
        text = text.strip()
        found = _agree(verdicts(text), read, same) if verdicts is not None else None
    if found is None and (line := first_line(text)) is not None:
        found = _first(line, text, read, same)
    if found is None and "**" in text and (bold := bold_words(text)) is not None:
        found = _agree([bold], read, same)
    return _last(text, read) if found is None else _if_kept(found, text)


def _declared(text: str, place: AnswerFormat, read: Reader, same: Callable[[Any, Any], bool]) -> Extraction:
    declared = place.find(text)
    if not declared:
        return Extraction(None, f"no {place}")
    first = _agree(declared, read, same)
    if first is None:
        return Extraction(None, f"no answer in {place}: {declared[-1].text:.60}")
    if first.text is None or place.alone:
        return first
    known = {said.text for said in declared}
    others = [said for said in explicit_statements(text) if said.text not in known]
    return _if_kept(_agree([*declared, *others], read, same) or first, text)


def read_as_written(statement: Statement) -> Extraction | None:
    """A statement unchanged, for a kind that reads it itself."""
    return Extraction(statement.text, value=statement.text) if statement.text.strip() else None


def _agree(statements: list[Statement], read: Reader, same: Callable[[Any, Any], bool]) -> Extraction | None:
    """What all statements say. The strongest form with an answer counts; those after it must not contradict it."""
    found: Extraction | None = None
    form = ""
    for statement in statements:
        one = read(statement)
        if one is None or (one.why == DENIED and statement.form in SENTENCES):
            continue
        if found is None:
            found, form = replace(one, form=statement.form, begin=statement.begin), statement.form
        if one.text is None:
            if statement.form == form or one.why == SEVERAL:
                return Extraction(None, one.why, form=statement.form)
        elif found.text is not None:
            if not same(one.value, found.value):
                return Extraction(None, SEVERAL, form=form)
            if statement.begin > found.begin and found.text in one.text:
                found = replace(found, begin=statement.begin)
    return found


def _if_kept(found: Extraction, text: str) -> Extraction:
    """An explicit answer, unless the reply takes it back or denies it afterwards."""
    if found.text is None:
        return found
    said = found.text.rstrip(" .!")
    end = text.find(said, found.begin) + len(said)
    behind = text[end : end + 1000]
    again = re.compile(rf"(?<!\w){re.escape(said)}(?!\w)") if said and said in behind else None
    boxed = found.form.startswith("\\") and (denied(text[max(0, found.begin - 12) : found.begin]) or refused(behind))
    if (
        taken_back(behind)
        or boxed
        or (
            again
            and any(refused(behind[one.end() :]) or denied(behind[: one.start()]) for one in again.finditer(behind))
        )
    ):
        return Extraction(None, f"{found.text:.60} is taken back", form=found.form)
    return found


def _first(line: Statement, text: str, read: Reader, same: Callable[[Any, Any], bool]) -> Extraction | None:
    """What the first line says, if it is an answer alone and the last line is not another one."""
    found = _agree([line], read, same)
    if found is None or found.text is None:
        return None
    other = read(line._replace(text=text[text.rfind("\n") + 1 :]))
    if other is not None and other.text is not None and not same(other.value, found.value):
        return Extraction(None, SEVERAL, form=line.form)
    return found


def _last(text: str, read: Reader) -> Extraction:
    """What the last statement says that has an answer, unless it is the end of a list."""
    found: Extraction | None = None
    for statement in last_statements(text):
        one = read(_bold_part(statement)) or read(statement)
        if found is None:
            if one is None or one.why == DENIED:
                continue
            found = replace(one, form=statement.form, begin=statement.begin)
            if one.text is None or statement.form == WHOLE or not _is_item(statement):
                break
        else:
            if one is not None and one.text is not None and _is_item(statement) and one.value != found.value:
                return Extraction(None, SEVERAL, form=statement.form)
            break
    if found is None:
        return Extraction(None, "no answer")
    if found.text is not None and unsure(text[-FINAL:]):
        return Extraction(None, "the reply says that it does not know")
    return _if_kept(found, text)


def _bold_part(statement: Statement) -> Statement:
    """The only bold words of a sentence, as in `It takes 3 days to earn **42** dollars`."""
    if "**" in statement.text:
        before, *rest = statement.text.split("**")
        if len(rest) == 2 and rest[0].strip() and not denied(before) and not hedged(statement.text):
            return statement._replace(text=rest[0].strip())
    return statement


def _is_item(statement: Statement) -> bool:
    """Whether it could be an item of a list: with a bullet, or only a name or a number."""
    return statement.form == ITEM or _NAME.match(statement.text) is not None


_NAME = re.compile(
    r"\W*(?:(?:[A-Za-z]\)|(?:guess|option|candidate)\s?\d*\s?[:.)])\s*)?[\W_]*"
    r"(?:[A-Z\d][\w'’.,%]*(?:\s(?:[A-Z\d(][\w'’.,)]*|of|the|de|da|apples|km))*|[a-z]+)[\W_]*$"
)
