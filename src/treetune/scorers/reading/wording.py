"""Compares texts by their words: without case, articles, quotes and punctuation at the ends. `C++` is not `C`.

text_key("The **Eiffel Tower**.")        # "eiffel tower"
same("$1,000", 1000), same("paris", "Paris."), same("C", "C++")       # True, True, False
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

from treetune.scorers.reading.numerals import plain, read_number, read_truth
from treetune.scorers.reading.statements import FIRST, PROSE, SENTENCES, Extraction, Statement, clean
from treetune.scorers.reading.words import denied, either, hedged, usual


def text_key(text: str) -> str:
    """The parts of a text that are compared: its words in lower case, numbers and meaningful symbols."""
    if text.isascii():
        if text.isalnum():
            return text.lower()
    else:
        text = usual(unicodedata.normalize("NFC", text))
    words = _TOKEN.findall(text.casefold())
    if len(words) > 1 and (words[0] in _ARTICLES or "the" in words or "a" in words or "an" in words):
        kept = [word for word in words[words[0] in _ARTICLES :] if word not in ("the", "a", "an")]
        words = kept or words
    if "," in text or "." in text:
        words = [_MARK_INSIDE.sub("", word) for word in words]
    return " ".join(words)


def answer_key(text: str) -> str:
    """The parts of an answer that are compared. A question has a key that no other text has."""
    text = plain(text)
    return f"{text_key(text) or text}{'?' if text.endswith(_ASKS) else ''}"


@lru_cache(maxsize=4096)
def truth_key(truth: str) -> str:
    """The key of the answer that is right. What is ignored in replies is ignored in a truth too."""
    return answer_key(clean(truth).strip() or truth)


def same(answer: str, truth: Any) -> bool:
    """Whether an answer equals a ground truth: compared as numbers if the truth is a number, else as texts."""
    if (expected := read_truth(truth)) is not None:
        return read_number(answer) == expected
    return bool(answer.strip()) and answer_key(answer) == truth_key(str(truth))


def read_text(statement: Statement) -> Extraction | None:
    """The text of a statement, without its remarks. Of a sentence, what follows its verb: `The capital is Paris, I
    think.` A question has a key that no other text has."""
    if statement.form == FIRST:
        return None
    text = plain(statement.text)
    if text.isalnum() and text.isascii():
        return Extraction(text, value=text.lower())
    if statement.form in SENTENCES or ":" in statement.form:
        text = without_remarks(text.removesuffix("!"))
        if statement.form in PROSE and (verb := _VERB.match(text)):
            if denied(text[: verb.end()]):
                return Extraction(None, f"denied: {text:.60}")
            text = plain(text[verb.end() :])
    return Extraction(text, value=answer_key(text)) if text else None


def without_remarks(text: str) -> str:
    """The text without words that lead to it (`therefore`, `Result:`) and up to a remark: in brackets, after a dash, or
    a clause such as `, because`. A doubt is not a remark."""
    lead = (_LEAD if ":" in text else _LEAD_WORDS).match(text)
    begin = lead.end() if lead and lead.end() < len(text) else 0
    remark = _REMARK.search(text, begin + 1)
    end = remark.start() if remark and not hedged(text[remark.start() :]) else len(text)
    text = text[begin:end]
    return plain(text if text.isascii() else _JAPANESE_END.sub("", text))


def list_items(text: str) -> list[str]:
    """The nonempty lines, without bullets, numbers and surrounding markdown."""
    lines = (plain(_BULLET.sub("", line.strip())) for line in text.splitlines())
    return [line for line in lines if line]


_TOKEN = re.compile(
    r"(?:[^\W\d_]\.){2,}[^\W\d_]?(?!\w)|(?:(?<!\w)[-+](?=\d))?\d+(?:[.,:/-]\d+)*(?:\w+|!+)?|[\u3040-\u30ff\u3400-\u9fff]+|[^\W\u3040-\u30ff\u3400-\u9fff]+(?:['-]\w+)*(?:[+#]+(?!\w))?"
    r"|[^\w\s.,;:!?'\"`*_()\[\]{}…¿¡/\u2600-\u274b\u274d-\u27bf\U0001f300-\U0001faff-]"
)
_MARK_INSIDE = re.compile(r",(?=\d{3}(?:\D|$))|(?<=[^\W\d_])\.")
_ARTICLES = frozenset("the a an der die das le la les l' el los las il lo".split())
_ASKS = ("?", "か", "吗")
_JAPANESE_END = re.compile("(?:です|でした|である|だ)$")
_LEAD_WORDS = re.compile(rf"(?:(?:{either('leads')})\b[\s,]+)+", re.I)
_LEAD = re.compile(
    rf"(?:(?:{either('leads')})\b[\s,:]+|[^:\n]{{0,30}}\b(?:{either('labels')})[*_]*\s*:\s*"
    r"|[^:\n]{0,6}(?:结果|逆順)\s*:\s*)+",
    re.I,
)
_REMARK = re.compile(
    rf"[,;]?\s+(?:{either('reasons')})\b|[,;]\s+(?:{either('asides')})\b|\s[–—-]\s|\s+\(|,?因为|,(?=[\u3040-\u9fff])",
    re.I,
)
_VERB = re.compile(
    rf"(?:.*\s)?(?:{either('saying')})\s(?!not\b|nicht\b|pas\b)|.*?(?:是|叫做?|为)(?!不)|.*は(?=\w)", re.I
)
_BULLET = re.compile(r"(?:[-*•]|\d{1,4}[.)])\s+")
