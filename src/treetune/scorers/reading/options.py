"""Reads which option of a multiple-choice task a statement chooses: by its label, or by its text.

reader = option_reader(Options(("A", "B"), ("London", "Paris")))
reader.read(Statement("the answer is", "(B) Paris"))            # Extraction("B")
reader.read(Statement("the last statement", "A is wrong."))     # None: it chooses nothing
reader.verdicts("I'd go with B. A is tempting.")                # [Statement("a verdict", "I'd go with B.")]
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import NamedTuple

from treetune.scorers.reading.numerals import plain
from treetune.scorers.reading.statements import (
    FIRST_LINE,
    LAST,
    SEVERAL,
    VERDICT,
    Extraction,
    Statement,
    find_words,
    sentence_around,
)
from treetune.scorers.reading.wording import LEAD, text_key
from treetune.scorers.reading.words import denied, hedged, refused

LONGEST = 400
"""The most characters of a text that can be only an option."""


class Options(NamedTuple):
    labels: tuple[str, ...]
    texts: tuple[str, ...] = ()
    """The texts of the labels; empty if only the labels are known."""


class Mention(NamedTuple):
    begin: int
    end: int
    label: str


class OptionReader:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._labels = {label.casefold(): label for label in options.labels}

    @cached_property
    def _texts(self) -> dict[str, str]:
        pairs = zip(self._options.texts, self._options.labels, strict=False)
        return {text_key(plain(text)) or text.strip(): label for text, label in pairs if text.strip()}

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """The texts to search for in a sentence, the longest first. A letter or an article is no name."""
        pairs = zip(self._options.texts, self._options.labels, strict=False)
        names = [(text.strip().rstrip(".").casefold(), label) for text, label in pairs]
        kept = [pair for pair in names if len(pair[0]) > 1 and pair[0] not in _SMALL]
        return sorted(kept, key=lambda pair: -len(pair[0]))

    def label_of(self, text: str) -> str | None:
        """The option that a text consists of: a label such as `(B)` or `Option B`, a text, or a label and its text."""
        said = plain(text)
        if label := self._labels.get(said.casefold()):
            return label
        if len(said) > LONGEST:
            return None
        head = _HEAD.match(said)
        if head and (label := self._labels.get(head[1].casefold())):
            rest = said[head.end() :].strip(_DRESS)
            if not rest or (self._texts and self._texts.get(text_key(plain(rest))) == label):
                return label
        return self._texts.get(text_key(said) or said) if self._options.texts else None

    def read(self, statement: Statement) -> Extraction | None:
        text = statement.text
        if label := self.label_of(text):
            return Extraction(label, value=label)
        if statement.form == FIRST_LINE:
            return None
        if text.rstrip(_DRESS).endswith(("?", "？")):
            return Extraction(None, "it is a question")
        if lead := LEAD.match(text):
            text = text[lead.end() :]
        alone = _ALONE.match(text)
        if alone and alone[1] in self._labels.values() and not self._begins_with_text(text[alone.end() :]):
            return Extraction(alone[1], value=alone[1])
        chosen, denials = dict[str, None](), set[str]()
        mentions = self._mentions(text)
        for reason in _REASON.finditer(text, mentions[0].end if mentions else len(text)):
            if reason[0].strip() != ":" or self.label_of(text[reason.end() :]) is None:
                mentions = [one for one in mentions if one.begin < reason.start()]
        for group in _groups(text, mentions):
            labels = [one.label for one in group]
            if denied(text[: group[0].begin]) or refused(text[group[-1].end :]):
                denials.update(labels)
            else:
                chosen |= dict.fromkeys(labels)
        if len(chosen) > 1 or (chosen and (hedged(text) or not denials.isdisjoint(chosen))):
            return Extraction(None, SEVERAL)
        for label in chosen:
            return Extraction(label, value=label)
        return Extraction(None, "denied") if denials and statement.form not in _SENTENCES else None

    def _begins_with_text(self, text: str) -> bool:
        low = text.casefold()
        return any(low.startswith(name) for name, _ in self._names)

    def verdicts(self, text: str) -> list[Statement]:
        """The sentences that choose without the word `answer`: `I'd go with C`, `That leaves B`, `B is correct`."""
        sentences = {sentence_around(text, place): None for place in find_words(text, _CHOOSING)}
        return [Statement(VERDICT, said) for said in sentences if said and not _IF.match(said)]

    def _mentions(self, text: str) -> list[Mention]:
        """Where a text names an option, by its label or its text."""
        found: list[Mention] = []
        low = text.casefold()
        for name, label in self._names:
            begin = low.find(name)
            while begin >= 0:
                end = begin + len(name)
                if not _is_part_of_word(low, begin, end) and not any(
                    one.begin < end and begin < one.end for one in found
                ):
                    found.append(Mention(begin, end, label))
                begin = low.find(name, end)
        for match in _LABEL.finditer(text):
            label = self._labels.get(match[0].casefold(), "")
            if label == match[0] and _is_label(text, match, found, label):
                found.append(Mention(match.start(), match.end(), label))
        return sorted(found)


option_reader = lru_cache(maxsize=4096)(OptionReader)


def _is_label(text: str, match: re.Match[str], found: list[Mention], label: str) -> bool:
    """Whether a letter or number is the label of an option: in brackets or bold, at the beginning of a sentence,"
    " after a
    word such as `option` or `is`, or in a row with another label."""
    if any(one.begin <= match.start() < one.end for one in found):
        return False
    ahead, behind = text[: match.start()], text[match.end() :]
    bare = ahead.rstrip(_QUOTES)
    if ahead.endswith(("(", "[", "**", "{")) and behind.startswith((")", "]", "**", "}", ".", ":")):
        return True
    if label in "AI" and _GOES_ON.match(behind):  # a word: `A city`, `I think`
        return False
    if label.isdigit() or behind.startswith(("%", ",0")):
        return not bare or bare.endswith((":", "：")) or _last_word(bare) in _NAMING
    word = _last_word(bare)
    return (
        not bare
        or word in _TRIGGERS
        or bare.endswith(_TRIGGERS_ASIAN)
        or any(_JOINED.fullmatch(text, one.end, match.start()) for one in found[-1:])
    )


def _last_word(text: str) -> str:
    return text[-12:].replace("'", " ").replace("’", " ").rpartition(" ")[2].lower()


def _groups(text: str, mentions: list[Mention]) -> list[list[Mention]]:
    """Mentions that a list joins, which a denial after it denies together: `A, C and D are wrong`."""
    groups: list[list[Mention]] = []
    for one in mentions:
        if groups and _JOINED.fullmatch(text, groups[-1][-1].end, one.begin):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _is_part_of_word(text: str, begin: int, end: int) -> bool:
    before, after = text[begin - 1 : begin], text[end : end + 1]
    if (before.isalnum() and text[begin].isalnum()) or (after.isalnum() and text[end - 1].isalnum()):
        return text[begin].isascii()
    number = text[begin].isdigit() and (before in "-−./" and before) and text[begin - 2 : begin - 1].strip()
    return bool(number) or (text[end - 1].isdigit() and after in ".," and text[end + 1 : end + 2].isdigit())


_SENTENCES = (LAST, VERDICT)
_DRESS = " \t*_`\"'“”‘’.,:;)(]["
_QUOTES = " \t*_`\"'“”‘’([{:$>#"
_SMALL = frozenset("the a an is it no not or and of in to".split())
_HEAD = re.compile(
    r"[\s*_`\"'“‘$>#-]*(?:(?:option|choice|answer|letter|antwort|réponse|opción|the|la|el|die|le|选项|选)\b[\s*_:]*|选项?)*"
    r"(?:[(\[]|\\text\{)?"
    r"[*_\"']*([A-Za-z0-9]{1,3})(?![A-Za-z0-9'’/+#])[*_\"']*[)\]}]?[*_]*",
    re.I,
)
_ALONE = re.compile(r"[\s*_`(\[]{0,6}([A-Za-z0-9]{1,3})[)\]*_`]{0,6}[.:]?[)\]*_`]{0,6}\s+(?=[A-Z*])(?<=[.*:)]\s)")
"""A label that is a sentence: `B. A is wrong.`"""
_LABEL = re.compile(r"(?<![^\W_])(?<![\w][-/.])[A-Za-z0-9]{1,3}(?![^\W_]|['’/+#-]\w|[+#]|\.\d)", re.ASCII)
_GOES_ON = re.compile(
    r"\s\d|\s(?!(?:is|was|are|or|and|because|since|but|as|would|seems|looks|might|could|cannot|must|fits|makes|ist|est"
    r"|es)\b)[a-z]|\s?[-/]"
)
_TRIGGERS = frozenset(
    "option options choice choices answer answers letter label is be was pick choose chose select with leaves leaving"
    " say guess"
    " think so thus hence therefore than to not opción opciones opcion antwort réponse l'option ist est es é è und et"
    " la el die"
    " by bleibt reste queda only just either neither nor both".split()
)
_NAMING = frozenset("option choice answer letter label number opción antwort réponse".split())
_TRIGGERS_ASIAN = ("选", "是", "为", "項", "项", "は", "选择", "：", ":", "。", "，", ". ", "! ", "? ", "—", "–", "→")
_JOINED = re.compile(
    r"[\s)\]*_\"']{0,4}(?:,|/|&|\||\+|;|,?\s?\b(?:and|or|nor|und|oder|et|ou|y|o|along with|as well as)\b|和|或|か|、"
    r"|\s)\s?(?:(?:and|or|maybe|option)\s)?[\s(\[*_\"']{0,4}"
)
_REASON = re.compile(
    r"[\s,;:–—-]+(?:because|since|as|for|which|while|whereas|although|though|unlike|given|weil|denn|da|car|parce"
    r"|porque|ya que|puisque|"
    r"потому|因为)\b|:\s|\s\((?=[^)]{8})|因为",
    re.I,
)
_IF = re.compile(r"(?:if|whether|why|suppose|wenn|falls|si|если|如果)\b", re.I)
_CHOOSING = (
    *(
        "correct",
        "right",
        "leav",
        "go with",
        "going with",
        "choose",
        "pick",
        "select",
        "opt for",
        "best",
        "选",
        "正确",
        "richtig",
    ),
    *("bonne", "bleibt", "reste"),
)
