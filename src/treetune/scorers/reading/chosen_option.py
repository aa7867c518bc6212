"""Finds the option that a prose reply chooses, by its label or its text.

    options = Options(("A", "B", "C"))
    choose("The answer is **(B)**.", options), choose("B, as A and C are wrong.", options)      # Choice("B") twice
    choose("B or C", options)                                          # Choice(None, "several options are named")

An option that is denied, questioned or taken back is not chosen. If several options are named, none is chosen. No text
makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from treetune.scorers.reading.mentions import (
    CLOSING,
    DENIAL,
    DENIED,
    EMPTY,
    LINE,
    MARKER,
    SENTENCE_END,
    WRONG,
    find_markers,
    why_doubtful,
)


class Options(NamedTuple):
    labels: tuple[str, ...]
    texts: tuple[str, ...] = ()
    """The texts of the labels; empty if only the labels are known."""


class Choice(msgspec.Struct, frozen=True):
    label: str | None
    why: str = ""


def choose(text: str, options: Options) -> Choice:
    """The one option that a text chooses, by its label or its text."""
    patterns = _patterns(options)
    markers = find_markers(text) or _find_verdicts(text)
    if len(markers) == 1:
        choice = _read(_line_after(text, markers[0].end(), len(text)), patterns)
        if choice.label or choice.why:
            return choice
    elif markers:
        ends = [*(marker.start() for marker in markers[1:]), len(text)]
        given = [
            _read(_line_after(text, marker.end(), end), patterns) for marker, end in zip(markers, ends, strict=True)
        ]
        if given := [choice for choice in given if choice.label or choice.why]:
            return _agree(given)
    if "\n" in text:
        lines = [line for line in text.split("\n") if len(line) <= LINE]
        for begins in (lambda line: patterns.bare.match(line) or _affirms(line, patterns), patterns.leading.match):
            given = [_read(line, patterns) for line in lines if begins(line)]
            if given := [choice for choice in given if choice.why != DENIED]:  # "A) is wrong." names no option
                return _agree(given)
    choice = _read(text, patterns)
    return choice if choice.label or choice.why else Choice(None, "no option is named")


def _affirms(line: str, patterns: _Patterns) -> bool:
    """Whether a line calls an option correct."""
    if "correct" not in line and "right" not in line:
        return False
    places = _find_options(line, patterns)
    return any(
        _AFFIRMED.match(line, place.end()) and _BEFORE_AFFIRMED.fullmatch(line, 0, place.start()) for place in places
    )


def read_label(text: str, options: Options) -> str | None:
    """The option that a text consists of, by its label or its text."""
    patterns = _patterns(options)
    label = patterns.bare.match(text[:LINE])
    return patterns.by_name.get(text.strip().replace(_MINUS, "-").casefold()) or (
        patterns.by_name.get(label[1].casefold()) if label else None
    )


class _Patterns(NamedTuple):
    bare: re.Pattern[str]
    """Matches a label and nothing else."""
    leading: re.Pattern[str]
    """Matches a line that begins with a label, as `B)` or `B.`"""
    label: re.Pattern[str]
    """Matches every place where a label is named."""
    labels: tuple[str, ...]
    text: re.Pattern[str] | None
    """Matches every place where the text of an option is named."""
    texts: tuple[str, ...]
    """The texts in lower case, to search for before the pattern is tried."""
    by_name: dict[str, str]
    """The label for each label and text."""

    def label_of(self, place: re.Match[str]) -> str:
        return self.by_name.get(place[0].casefold(), place[0])


@lru_cache(maxsize=4096)
def _patterns(options: Options) -> _Patterns:
    labels = "|".join(re.escape(label) for label in options.labels)
    named = [text.strip().replace(_MINUS, "-") for text in options.texts]
    texts = sorted(filter(None, named), key=len, reverse=True)
    # "A city" and "I think" do not name an option. The letter comes first, so that the search can skip to it.
    goes_on = rf"(?:(?<![AI])|(?! (?!(?:{_AFTER_LABEL})\b)[a-z]))"
    if all(len(label) == 1 for label in options.labels):
        label = rf"[{re.escape(''.join(options.labels))}](?<![\w'’.\-\\].)(?![\w'’\-]){goes_on}"
    else:
        label = rf"(?<![\w'’.\-\\])(?:{labels})(?![\w'’\-])"
    # A one-letter option, such as the number i, matches only that letter, not a word of a sentence.
    names = [rf"(?-i:{re.escape(text)}){goes_on}" if len(text) == 1 else re.escape(text) for text in texts]
    # The parts of `\frac{1}{2}` are not options.
    text = rf"(?<!\w)(?<!\d[.,])(?<!\}}\{{)(?:{'|'.join(names)})(?!\w)(?![.,]\d)(?!\}}\{{)" if texts else None
    by_name = {text.casefold(): label for label, text in zip(options.labels, named, strict=False)}
    by_name |= {label.casefold(): label for label in options.labels}
    dress = r"[^\w\n?❌✗✘]*"
    before = rf"{dress}(?:(?:option|choice|text|textbf|mathrm|mathbf|boxed)\b{dress}){{0,2}}"
    bare = rf"{before}({labels}){dress}$"
    leading = rf"[*_\s]*\(?({labels})(?:[).:\]]|\*\*)(?!\w)"
    return _Patterns(
        re.compile(bare, re.I),
        re.compile(leading),
        re.compile(label),
        options.labels,
        None if text is None else re.compile(text, re.I),
        tuple(text.lower() for text in texts),
        by_name,
    )


def _read(said: str, patterns: _Patterns) -> Choice:
    """The option that a piece of text names, if any."""
    if len(said) <= LINE and (match := patterns.bare.match(said)):
        return Choice(patterns.by_name[match[1].casefold()])
    found = _find_options(said, patterns)
    if not found:
        return Choice(None)
    named = _leave_out_refused(said, found, patterns) if len(found) > 1 else found
    if not named:
        return Choice(None, DENIED)
    if len(named) > 1 and (reason := _REASON.search(said, named[0].end(), named[-1].start())):
        said = said[: reason.start()]  # the rest gives a reason or says what the answer is not
        named = [place for place in named if place.end() <= reason.start()]
    labels = {patterns.label_of(place) for place in named}
    if len(labels) > 1:
        return Choice(None, "several options are named")
    why = why_doubtful(said, *named[-1].span())
    return Choice(None, why) if why and why != "one of several" else Choice(labels.pop())


def _leave_out_refused(said: str, named: Sequence[re.Match[str]], patterns: _Patterns) -> list[re.Match[str]]:
    """The mentions of options that are not denied: in `B. A and C are wrong.` the first. An option that is joined to a
    denied one (`A and C are wrong`) is denied too. Earlier mentions of a denied option are dropped; those in later
    sentences are kept."""
    denied: dict[str, int] = {}
    following = None
    for place in reversed(named):
        refused = _DENIED_AFTER.match(said, place.end())
        if refused and _SUPPOSES.search(said, max(0, place.start() - _NEAR_IF), place.start()):
            refused = None
        if refused or (following is not None and _are_joined(said, place, following, patterns)):
            end = SENTENCE_END.search(said, (refused or place).end())
            denied.setdefault(patterns.label_of(place), end.start() if end else len(said))
            following = place
        else:
            following = None
    return [place for place in named if place.start() >= denied.get(patterns.label_of(place), 0)]


def _are_joined(said: str, one: re.Match[str], other: re.Match[str], patterns: _Patterns) -> bool:
    """Whether two options are named together: `A and B`, `A, B`, or a label and its own text."""
    gap = said[one.end() : other.start()]
    if len(gap) > _LONGEST_LINK:
        return False
    if patterns.label_of(one) == patterns.label_of(other):
        return not gap.strip(_AROUND_LABEL)
    return _LINK.fullmatch(gap) is not None and _LINK_WORD.search(gap) is not None


def _find_options(said: str, patterns: _Patterns) -> list[re.Match[str]]:
    """Every mention of an option, by its label or its text."""
    # Starting at the first letter of a label is faster.
    begins = [begin for label in patterns.labels if (begin := said.find(label)) >= 0]
    named = list(patterns.label.finditer(said, min(begins))) if begins else []
    if patterns.text is not None:
        said = said.replace(_MINUS, "-")
        low = said.lower()
        for text in patterns.texts:
            if text in low:
                named += patterns.text.finditer(said)
                named.sort(key=lambda place: place.start())
                break
    return named


def _agree(choices: Sequence[Choice]) -> Choice:
    if len(choices) == 1:
        return choices[0]
    labels = {choice.label for choice in choices}
    if len(labels) == 1:
        return choices[-1]
    doubtful = next((choice for choice in choices if choice.why), None)
    return doubtful or Choice(None, "several options are named")


def _line_after(text: str, begin: int, end: int) -> str:
    """The first nonempty line."""
    return text[begin:end].lstrip(EMPTY).partition("\n")[0]


def _find_verdicts(text: str) -> list[re.Match[str]]:
    """Every `correct option is` and `right choice:`."""
    found = []
    for letters in ("ption", "hoice"):
        begin = text.find(letters, 1)
        while begin > 0:
            if text.endswith(_RIGHT, 0, begin - 1) and not text.endswith(WRONG, 0, begin - 1):
                match = MARKER.match(text, begin - 1)
                found += [match] if match and " for " not in match[0] else []  # `for` may refer to another question
            begin = text.find(letters, begin + 5)
    return sorted(found, key=lambda match: match.start())


_RIGHT = ("orrect ", "ight ")
"""What precedes `option is` in a verdict."""
_AFTER_LABEL = "is|was|are|were|or|and|because|since|but|would|seems|looks|might|could|cannot|must|isn"
"""Words that may follow a label that is also a word: `A is`, `I would`."""
_MINUS = "\u2212"
_REASON = re.compile(r"\b(?:because|since|whereas|while|not|rather than|instead of)\b", re.I)
_DENIED_AFTER = re.compile(rf"\]?{CLOSING},?\s*(?:\?\s*no\b[.,!]?|{DENIAL})", re.I)
_AFFIRMED = re.compile(
    rf"{CLOSING}\s(?:is|must be)\s[*_]*(?:the\s)?[*_]*(?:correct|right)(?:\s(?:answer|option|choice|one))?[\s*_.!]*$"
)
_BEFORE_AFFIRMED = re.compile(r"(?:[\W_]|(?:so|thus|hence|therefore|option|choice|answer)\b)*", re.I)
_LONGEST_LINK, _NEAR_IF = 40, 20
_AROUND_LABEL = " \t\\()[]{}$*_\"'“”‘’.:,–—-"
_LINK_WORD = re.compile(r"[,/&+|]|\b(?:and|or|nor|as well as|along with|plus)\b", re.I)
_LINK = re.compile(
    r"(?:[\s\\()\[\]{}$*_\"'“”‘’,/&+|]|\b(?:and|or|nor|as well as|along with|plus|also|both|options?|choices?|the)\b)+",
    re.I,
)
"""Links two options that are named together."""
_SUPPOSES = re.compile(r"\b(?:if|unless|whether|suppose|assuming)\b[^.;,!?]*$", re.I)
