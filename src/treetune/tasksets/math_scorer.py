r"""The scorer for mathematics: `math`. An answer is right if it means what the truth says: `\frac12` is `0.5`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers import Scorer
from treetune.scorers.reading.extraction import Mention, extract, settle
from treetune.scorers.reading.numerals import plain, read_amount, read_number, read_truth
from treetune.scorers.reading.statements import ALONE, PROSE, SENTENCES, WHOLE, Extraction, Statement
from treetune.scorers.reading.wording import text_key
from treetune.scorers.reading.words import MAGNITUDES, denied, hedged, words_of
from treetune.scorers.scorer import judged, require_truths
from treetune.tasksets.math_verifier import compare, is_single, require_math_verify

LONGEST = 300
"""The maximum length of an answer that is compared by meaning."""
_FORMULA = re.compile(r"(?<!\\)\$+([^$]+?)(?<!\\)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


class Math(Scorer, frozen=True, tag="math"):
    def check(self) -> None:
        require_math_verify()

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Score whether the answer in a reply means what the ground truth says. It waits for another process."""
        truths = [str(one) for one in require_truths(truth, task)]
        found = extract(answer, self.answer, read_formula, _means)
        return judged(found, found.text is not None and any(_means(found.text, one) for one in truths), truths)

    def fault(self, truth: Any, task: Task | None) -> str | None:
        require_math_verify()
        empty = any(not plain(str(one)) for one in require_truths(truth, task))
        return "says nothing" if empty else None


def read_formula(statement: Statement) -> Extraction | None:
    """The expression that a statement gives: its number, else its formula in `$`, else the whole statement or the part
    after `is`."""
    text = statement.text
    if read_number(text) is not None and (statement.form not in SENTENCES or "=" not in text):
        return Extraction(plain(text.rpartition("=")[2]), value=text)
    if statement.form in ALONE:
        return None
    formulas = [
        Mention(match.start(), match.end(), said, said)
        for match in _FORMULA.finditer(text)
        if (said := "".join(match.groups("")).strip())
    ]
    if formulas:
        return settle(text, formulas, first=statement.form not in PROSE)
    if _PROSE.search(text) or (statement.form in SENTENCES and not _FORMAL.search(text)):
        number = read_amount(statement)
        if number is not None:
            return msgspec.structs.replace(number, value=number.text)
        text = _IS.sub("", text)
        if statement.form in SENTENCES and (hedged(text) or denied(text) or not _MATHS.search(text)):
            return Extraction(plain(text), value=text) if statement.form == WHOLE else None
    return Extraction(text.strip().removesuffix("."), value=text) if plain(text) else None


def _means(said: str, truth: str) -> bool:
    if "".join(said.split()) == "".join(truth.split()):
        return True
    if not _MATHS.search(said):  # words
        return text_key(said) == text_key(plain(truth))
    numbers = read_number(said), read_number(truth)
    if numbers[0] is not None and read_truth(truth) is not None:
        return numbers[0] == numbers[1]
    said = _SPACE.sub("", said)
    if (
        len(said) > LONGEST
        or not MAGNITUDES.isdisjoint(words_of(said))
        or not is_single(said, truth)
        or _ends(said) != _ends(truth)
    ):
        return False
    return compare(_POWER.sub(_raise, truth), _POWER.sub(_raise, said))


def _ends(text: str) -> str:
    """The brackets of an interval or a point, which must agree: `[0, 5)` is not `(0, 5]`."""
    bare = plain(text).replace("\\left", "").replace("\\right", "").strip(" $.")
    return bare[:1] + bare[-1:] if "," in bare and bare[:1] in "[(" and bare[-1:] in "])" else ""


def _raise(power: re.Match[str]) -> str:
    return f"^{{{power[0].translate(_DIGITS)}}}"


_SPACE = re.compile(r"(?<!\\)\\[,;:! ]")
_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_LIST = re.compile(r"^\W*(?:and|or|,|;)|\s(?:and|or)\s|[,;]\s*[,;.]")
_PROSE = re.compile(r"(?<![\\{a-z])[a-z]{2,}\s+[a-z]{2,}", re.I)
_FORMAL = re.compile(r"\\[a-z]|[\[(].*,.*[\])]|[²³⁰-⁹]|\d[a-z]\b")
_MATHS = re.compile(r"[\d\\^=+*/<>]|(?<![A-Za-z])[b-z](?![A-Za-z])")
_IS = re.compile(r"^.*\b(?:is|are|be|gives?|get|equals|ist|est|es|是|为)\s|[.!]$")
