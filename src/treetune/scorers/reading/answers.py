r"""Extracts the answer of a reply, and compares it with the right one, in the same way for every environment.

    found = number_after(strip_thinking(reply), "####")     # "so\n#### 1,000 apples" -> Found("1,000 apples")
    found = final_number(strip_thinking(reply))             # after `####`, in `\boxed{}`, or at the end of the text
    right = same(found.text, "1000")

A reply must give one answer. If it gives several different ones, says what the answer is not, or leaves it open, no
answer is found, and `why` explains it: guessing twice must not earn more than guessing once. Markdown, LaTeX, units,
thousands separators and full stops are ignored. No text makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import msgspec

from treetune.scorers.reading.chosen_option import Options as Options
from treetune.scorers.reading.chosen_option import choose as choose
from treetune.scorers.reading.chosen_option import read_label as read_label
from treetune.scorers.reading.mentions import statement as statement
from treetune.scorers.reading.mentions import why_unnamed as why_unnamed
from treetune.scorers.reading.numerals import (
    GREEK,
    MAGNITUDES,
    MATHS,
    VARIABLES,
    Number,
    closing_brace,
    find_numbers,
    is_bare,
    is_negated,
    leaves_open,
    with_usual_signs,
    words_of,
)
from treetune.scorers.reading.numerals import plain as plain
from treetune.scorers.reading.numerals import read_number as read_number
from treetune.scorers.reading.numerals import read_truth as read_truth

NEAR = 60
"""How many characters before and after a number are checked for a denial."""

SEVERAL = "several different answers"


class Found(msgspec.Struct, frozen=True):
    text: str | None
    """The answer as given; None if there is none, or no single one."""
    why: str = ""
    """Why there is no answer."""
    value: Number | None = None
    """The value of the answer, if already parsed."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where to look for the answer. Exactly one field must be set."""

    after: str | None = None
    """A mark, such as `####` or `Answer:`. The answer is the rest of its line, or the next nonempty line."""
    tag: str | None = None
    """The name of a tag: `answer` for `<answer>...</answer>`."""
    boxed: bool = False
    r"""Whether the answer is in `\boxed{...}`."""
    last_line: bool = False
    """Whether the answer is the last nonempty line."""
    first_line: bool = False
    """Whether the answer is the first nonempty line."""

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, name)) for name in self.__struct_fields__) != 1:
            raise ValueError(f"give one of {', '.join(self.__struct_fields__)}")
        if self.tag is not None and not _NAME.fullmatch(self.tag):
            raise ValueError(f"tag is the name without brackets, such as answer; got {self.tag!r:.60}")

    def fill(self, text: str) -> str:
        """Make a reply that has a text in this place."""
        if self.after is not None:
            return f"{self.after} {text}"
        if self.tag is not None:
            return f"<{self.tag}>{text}</{self.tag}>"
        return f"\\boxed{{{text}}}" if self.boxed else text

    def pieces(self, text: str) -> list[str]:
        """All texts in this place."""
        if self.after is not None:
            return after(text, self.after)
        if self.tag is not None:
            return [piece.strip() for piece in tagged(text, self.tag)]
        if self.boxed:
            return boxed(text)
        lines = text.strip().split("\n")
        return [lines[-1 if self.last_line else 0].strip()]

    def __str__(self) -> str:
        if self.after is not None:
            return f"`{self.after}`"
        return f"<{self.tag}>" if self.tag is not None else "\\boxed{}" if self.boxed else "line"


# Finding the answer


def strip_thinking(text: str) -> str:
    """Remove the thinking from a reply: keep what follows the last `</think>`, up to an unclosed `<think>`."""
    return text.rpartition("</think>")[2].partition("<think>")[0] if "<" in text else text


def tagged(text: str, tag: str) -> Iterator[str]:
    """The texts between each `<tag>` and the next `</tag>`. A regular expression would be quadratic in open tags."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    begin = text.find(opening)
    while begin >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
        yield text[begin + len(opening) : end]
        begin = text.find(opening, end + len(closing))


def after(text: str, mark: str) -> list[str]:
    """The text after each mark: the rest of its line or, if that is empty, the next nonempty line."""
    if mark not in text:
        return []
    pieces = _MARKS.split(text) if mark == "####" and "#####" in text else text.split(mark)
    return [piece.lstrip().partition("\n")[0].strip() for piece in pieces[1:]]


def boxed(text: str) -> list[str]:
    r"""The contents of each `\boxed{...}`, with balanced braces; of nested boxes only the outer one."""
    found = []
    begin = text.find(_BOX)
    while begin >= 0:
        start = begin + len(_BOX)
        end = closing_brace(text, start)
        if end is None:
            break
        found.append(text[start:end].strip())
        begin = text.find(_BOX, end)
    return found


def one_of(given: Sequence[str], key: Callable[[str], Hashable], missing: str) -> Found:
    """The single answer that all texts give, compared by a key; a key of None means no answer."""
    if not given:
        return Found(None, missing)
    if len(given) == 1 and key is read_number:
        value = read_number(given[0])
        return (
            Found(given[0], "", value) if value is not None else Found(None, f"not a plain answer: {given[0][:60]!r}")
        )
    keys = {key(text) for text in given}
    if None in keys:
        return Found(None, f"not a plain answer: {given[-1][:60]!r}")
    return Found(given[-1]) if len(keys) == 1 else Found(None, SEVERAL)


def placed(text: str, place: Place) -> Found:
    """The single answer in a place."""
    given = place.pieces(text)
    if len(given) == 1:
        return Found(given[0]) if given[0] else Found(None, f"nothing at {place}")
    return one_of(given, lambda said: plain(said) or None, f"no {place}")


def number_after(text: str, mark: str) -> Found:
    """The number after the last mark. All other marks followed by a number must give the same one; `#### Step 1` and
    `#### 1. Add` are headings and do not count."""
    given = after(text, mark)
    if len(given) == 1:
        return one_of(given, read_number, "")
    numbers = [said for said in given[:-1] if _BEGINS.match(said) and not _HEADING.match(said)]
    return one_of([*numbers, *given[-1:]], read_number, f"no `{mark}`")


def final_number(text: str) -> Found:
    r"""The number after `####`, else in `\boxed{}`, else the last number of the text."""
    if "####" in text:
        return number_after(text, "####")
    if "\\" in text and (boxes := boxed(text)):
        return one_of(boxes, read_number, "")
    return last_number(text)


def final_text(text: str) -> Found:
    r"""The text after `####`, else in `\boxed{}`, else the whole text."""
    given = after(text, "####") or boxed(text) or [text.strip()]
    if len(given) == 1 and given[0][:1].isalnum():  # not empty
        return Found(given[0])
    return one_of(given, lambda said: plain(said) or None, "")


def last_number(text: str) -> Found:
    """The last number of a prose text, unless it is a list item, an operand, denied or questioned."""
    # Try the last line first, to avoid splitting a long text.
    line, numbers = _last_numbers(text[text.rfind("\n") + 1 :])
    if not numbers:
        line, numbers = _last_numbers(text)
    if not numbers:
        return Found(None, "no number")
    *earlier, last = numbers
    prose = _PROSE_OF_SEVERAL if earlier else _PROSE
    in_prose = prose.match(line) and "=" not in line and "\\" not in line
    # In prose, a line is never parsed as one number: a single number stands for the line, and several are ambiguous.
    if not in_prose and (number := read_number(line)) is not None:
        # One number per line is a list too, but a line of working is not.
        if is_bare(line):
            before, _ = _last_numbers(text, skip=1)
            if is_bare(before) and read_number(before) != number:
                return Found(None, SEVERAL)
        return Found(plain(line.rpartition("=")[2]), "", number)
    ahead, behind = line[earlier[-1].end() if earlier else 0 : last.start()], line[last.end() :]
    near, said = ahead[-NEAR:], last[0]
    if (_may_deny(near) and _DENIED.search(near)) or (behind and _REFUSED.match(behind[:NEAR])):
        return Found(None, f"{said} is denied or asked")
    if (_may_be_part(near) and _PART.search(near)) or (behind and _RAISED.match(behind)):
        return Found(None, "an expression that is not worked out")
    if behind and _MAGNITUDE.match(behind):
        return Found(None, f"not a plain number: {said}{behind[:20]!s}")
    if earlier and _links(ahead) and read_number(earlier[-1][0]) != read_number(said):
        return Found(None, SEVERAL if ahead.strip() not in _OPERATORS else "an expression that is not worked out")
    said = f"-{said}" if is_negated(near) else said
    value = read_number(said)
    return Found(said, "", value) if value is not None else Found(None, f"no number: {said[:60]!r}")


# Comparing answers


def same(answer: str, truth: Any) -> bool:
    """Whether an answer equals a ground truth: compared as numbers if the truth is a number, else as texts."""
    first, second = answer, str(truth)
    if first.strip() == second.strip():
        return bool(first.strip())
    if (expected := read_truth(truth)) is not None:
        return read_number(first) == expected
    return bool(plain(first)) and plain(first) == plain(second)


def same_numbers(one: str, other: str) -> bool:
    """Whether two texts contain the same numbers in the same order: `-5` is not `5`, and `1.5` is not `15`."""
    first, second = (
        [read_number(number[0]) for number in find_numbers(with_usual_signs(text))] for text in (one, other)
    )
    return first == second


def list_items(text: str) -> list[str]:
    """The nonempty lines, without bullets, numbers and surrounding markdown."""
    lines = (plain(_BULLET.sub("", line.strip())) for line in text.splitlines())
    return [line for line in lines if line]


def names_one(text: str) -> bool:
    """Whether a text gives a single answer: no `or`, no `not`, no question mark."""
    return "?" not in text and not leaves_open(text)


_NAME = re.compile(r"[A-Za-z][\w-]*")
_BOX = "\\boxed{"
_MARKS = re.compile("#{4,}")
_BEGINS = re.compile(r"[*_`$\\({\s]*(?:boxed\{)?[-+−]?[$€£¥]?\.?\d")
_HEADING = re.compile(r"\d+[.):]\s+\S")
_PART = re.compile(r"(?:\\[dt]?frac\{(?:[^{}]{0,40}\}\{)?|\\sqrt(?:\[\d+\])?\{|[±√]|\\(?:pm|sqrt))\s*$")
"""Precedes a number that is part of another one."""
_ENDS_OF_PART = "{±√mt"
_RAISED = re.compile(rf"\s?(?:\^(?!\{{?\\circ)|\*\*\d|[²³¹⁰⁴-⁹½⅓¼¾⅔∞√]|{GREEK}|{MATHS})|{VARIABLES}")
"""Follows a number that is part of an expression: 5^n, 5π, 5xy."""
_POWER_OF_UNIT = re.compile(r"(?:km|cm|mm|dm|m|ft|in|inch|inches|feet|yd|mi|s|meters?|metres?|units?)\}?\s?\^\{?$")
_MAGNITUDE = re.compile(rf"\s?(?:{MAGNITUDES.replace(' ', '|')})\b|\s?[万亿千百]|\s?(?-i:[MB])[\s.*$)]*$", re.I)
"""Words that multiply the number before them."""
_PROSE = re.compile(r"[*_\s]*[^\W\d_]+[ *]")
_PROSE_OF_SEVERAL = re.compile(
    r"[*_\s]*(?!so|thus|therefore|hence|the|final|answer|result|total|sum|minus|negative)[^\W\d_]+[ *]", re.I
)
"""Begins a line that cannot be one number with several parts, such as 1 1/2."""
_BULLET = re.compile(r"(?:[-*•]|\d{1,4}[.)])\s+")
_OPERATORS = frozenset(("+", "*", "×", "·", "^", "÷", "x", "-", "/", "**", "\\times", "\\cdot"))
_OFFERS = frozenset("or nor vs versus maybe perhaps possibly alternatively otherwise".split())
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|≠|\\neq?|!=)\W*(?:\w+\W+)?$", re.I)
_REFUSED = re.compile(
    r"\s*\?|\W*(?:(?:is|was)n't\b"
    r"|(?:is|was|would be|seems|looks)\s(?:wrong|incorrect|false|not (?:right|correct|true|it|the))\b)",
    re.I,
)


def _last_numbers(text: str, skip: int = 0) -> tuple[str, list[re.Match[str]]]:
    """The last line that contains numbers, and its numbers; `skip` such lines are left out."""
    for line in reversed(text.splitlines()):
        usual = with_usual_signs(line)
        numbers = find_numbers(usual)
        if "^" in usual:  # cm^2 is a unit
            numbers = [number for number in numbers if not _POWER_OF_UNIT.search(usual[: number.start()][-20:])]
        if numbers:
            if not skip:
                return usual, numbers
            skip -= 1
    return "", []


def _may_deny(text: str) -> bool:
    """Whether a text may contain a denial, by a few letters: faster than searching for the words."""
    low = text.lower()
    return "not" in low or "n't" in low or "never" in low or "≠" in low or "\\ne" in low or "!=" in low


def _may_be_part(near: str) -> bool:
    """Whether a text may match `_PART`, by its last character: faster than the pattern."""
    last = near.rstrip()[-1:]
    return last in _ENDS_OF_PART if last else False


def _links(between: str) -> bool:
    """Whether this text between two numbers makes them a list or an expression."""
    words = words_of(between)
    if not words:
        return not between.strip(" \t,;/|&~-–—.+*×·^÷\\")
    if between.strip() in _OPERATORS:
        return True
    if len(words) == 1 and words[0] in ("and", "to"):
        return True
    return len(words) <= 4 and not _OFFERS.isdisjoint(words)
