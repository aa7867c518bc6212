r"""The scorer for mathematics: `math`. An answer is right if it means what the truth says: `\frac12` is `0.5`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers import Scorer
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import plain, read_amount, read_number, read_truth
from treetune.scorers.reading.statements import FIRST_LINE, PROSE, SENTENCES, SEVERAL, Extraction, Statement
from treetune.scorers.reading.wording import text_key
from treetune.scorers.reading.words import denied, hedged, refused
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
    """The expression that a statement gives: its last formula, else its number, else what follows `is`."""
    text = statement.text
    if read_number(text) is not None and (statement.form not in SENTENCES or "=" not in text):
        return Extraction(plain(text.rpartition("=")[2]), value=text)
    if statement.form == FIRST_LINE:
        return None
    formulas = ["".join(match.groups("")) for match in _FORMULA.finditer(text)]
    if formulas:
        around = _FORMULA.sub(" ", text)
        if hedged(around) or (len({text_key(one) for one in formulas}) > 1 and _LIST.search(around)):
            return Extraction(None, SEVERAL)
        said = formulas[0 if statement.form not in PROSE else -1].strip()
        place = text.rfind(said)
        if denied(text[:place]) or refused(text[place + len(said) :].lstrip("$\\)]")):
            return Extraction(None, f"{said:.60} is denied")
        return Extraction(said, value=said)
    if not _PROSE.search(text) and plain(text) and (statement.form not in SENTENCES or _FORMAL.search(text)):
        return Extraction(plain(text), value=text)
    number = read_amount(statement)
    if number is not None and (number.text is not None or number.why == SEVERAL):
        return msgspec.structs.replace(number, value=number.text)
    said = plain(_IS.sub("", text))
    if not said or len(said) > LONGEST or not _MATHS.search(said):
        if number is None and statement.form not in SENTENCES and said:
            return Extraction(said, value=said)
        return number
    if hedged(text) or denied(text):
        return Extraction(None, f"no single answer: {text:.60}")
    return Extraction(said, value=said)


def _means(said: str, truth: str) -> bool:
    if "".join(said.split()) == "".join(truth.split()):
        return True
    numbers = read_number(said), read_number(truth)
    if numbers[0] is not None and read_truth(truth) is not None:
        return numbers[0] == numbers[1]
    if len(said) > LONGEST or not is_single(said, truth) or _ends(said) != _ends(truth):
        return False
    return compare(_POWER.sub(_raise, truth), _POWER.sub(_raise, said))


def _ends(text: str) -> str:
    """The brackets of an interval or a point, which must agree: `[0, 5)` is not `(0, 5]`."""
    bare = plain(text).replace("\\left", "").replace("\\right", "").strip(" $.")
    return bare[:1] + bare[-1:] if "," in bare and bare[:1] in "[(" and bare[-1:] in "])" else ""


def _raise(power: re.Match[str]) -> str:
    return f"^{{{power[0].translate(_DIGITS)}}}"


_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_LIST = re.compile(r"^\W*(?:and|or|,|;)|\s(?:and|or)\s|[,;]\s*[,;.]")
_PROSE = re.compile(r"(?<![\\{a-z])[a-z]{2,}\s+[a-z]{2,}", re.I)
_FORMAL = re.compile(r"\\[a-z]|[\[(].*,.*[\])]|[²³⁰-⁹]|\d[a-z]\b")
_MATHS = re.compile(r"[\d\\^=+*/<>]|(?<![A-Za-z])[b-z](?![A-Za-z])")
_IS = re.compile(r"^.*\b(?:is|are|be|gives?|get|equals|ist|est|es|是|为)\s|[.!]$")
