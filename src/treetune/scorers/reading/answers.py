r"""What a reply gives as its answer, and whether that is the right one: decided here, for every environment.

    found = number_after(strip_thinking(reply), "####")     # "so\n#### 1,000 apples" -> Found("1,000 apples")
    found = final_number(strip_thinking(reply))             # after `####`, in `\boxed{}`, or at the end of the text
    right = same(found.text, "1000")

A reply gives one answer. Where it gives several different ones, says what the answer is not, or leaves it open, nothing
is found, and `why` says so: guessing twice must not earn more than guessing once. Markdown, LaTeX, units, thousands
separators and a full stop change nothing. No text makes a function here raise, or take more than linear time.
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
"""How many characters before and after a number may deny it."""

SEVERAL = "several different answers"


class Found(msgspec.Struct, frozen=True):
    text: str | None
    """The answer as it was given; None where there is none, or no single one."""
    why: str = ""
    """Why there is none."""
    value: Number | None = None
    """Its value, where it was read already."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the answer stands; one of these is given."""

    after: str | None = None
    """A mark, such as `####` or `Answer:`: the rest of its line, or the next line that says something."""
    tag: str | None = None
    """The name of a tag: `answer` for `<answer>...</answer>`."""
    boxed: bool = False
    r"""What `\boxed{...}` holds."""
    last_line: bool = False
    """The last line that says something."""
    first_line: bool = False
    """The first one."""

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, name)) for name in self.__struct_fields__) != 1:
            raise ValueError(f"give one of {', '.join(self.__struct_fields__)}")
        if self.tag is not None and not _NAME.fullmatch(self.tag):
            raise ValueError(f"tag is the name without brackets, such as answer; got {self.tag!r:.60}")

    def fill(self, text: str) -> str:
        """A reply with a text where the answer stands."""
        if self.after is not None:
            return f"{self.after} {text}"
        if self.tag is not None:
            return f"<{self.tag}>{text}</{self.tag}>"
        return f"\\boxed{{{text}}}" if self.boxed else text

    def pieces(self, text: str) -> list[str]:
        """What stands there, each time."""
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


# Where the answer stands


def strip_thinking(text: str) -> str:
    """A reply without its thinking: what follows the last `</think>`, up to a `<think>` that is never closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0] if "<" in text else text


def tagged(text: str, tag: str) -> Iterator[str]:
    """What stands between `<tag>` and the next `</tag>`, each time; a pattern would be quadratic in open tags."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    begin = text.find(opening)
    while begin >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
        yield text[begin + len(opening) : end]
        begin = text.find(opening, end + len(closing))


def after(text: str, mark: str) -> list[str]:
    """What follows each mark: the rest of its line or, where that is empty, the next line that says something."""
    if mark not in text:
        return []
    pieces = _MARKS.split(text) if mark == "####" and "#####" in text else text.split(mark)
    return [piece.lstrip().partition("\n")[0].strip() for piece in pieces[1:]]


def boxed(text: str) -> list[str]:
    r"""What each `\boxed{...}` holds, braces inside it counted; of nested ones the outer."""
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
    """The answer that all of them are, told by a key; None is no answer."""
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
    """The one answer that stands at a place."""
    given = place.pieces(text)
    if len(given) == 1:
        return Found(given[0]) if given[0] else Found(None, f"nothing at {place}")
    return one_of(given, lambda said: plain(said) or None, f"no {place}")


def number_after(text: str, mark: str) -> Found:
    """The number after the last mark. Every other mark that a number follows must say the same; `#### Step 1` and
    `#### 1. Add` are headings."""
    given = after(text, mark)
    if len(given) == 1:
        return one_of(given, read_number, "")
    numbers = [said for said in given[:-1] if _BEGINS.match(said) and not _HEADING.match(said)]
    return one_of([*numbers, *given[-1:]], read_number, f"no `{mark}`")


def final_number(text: str) -> Found:
    r"""The number after `####`, else in `\boxed{}`, else the last of the text."""
    if "####" in text:
        return number_after(text, "####")
    if "\\" in text and (boxes := boxed(text)):
        return one_of(boxes, read_number, "")
    return last_number(text)


def final_text(text: str) -> Found:
    r"""What follows `####`, else what `\boxed{}` holds, else the whole text."""
    given = after(text, "####") or boxed(text) or [text.strip()]
    if len(given) == 1 and given[0][:1].isalnum():  # it says something
        return Found(given[0])
    return one_of(given, lambda said: plain(said) or None, "")


def last_number(text: str) -> Found:
    """The last number of a text in words, unless it is one of a list, an operand, denied or asked."""
    # The last line first: a long text need not be split.
    line, numbers = _last_numbers(text[text.rfind("\n") + 1 :])
    if not numbers:
        line, numbers = _last_numbers(text)
    if not numbers:
        return Found(None, "no number")
    *earlier, last = numbers
    prose = _PROSE_OF_SEVERAL if earlier else _PROSE
    in_prose = prose.match(line) and "=" not in line and "\\" not in line
    # One number after words is what the line says, however it is said, and several are no number: neither is tried.
    if not in_prose and (number := read_number(line)) is not None:
        # A line each is a list too, but a line of work is not.
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


# What it says


def same(answer: str, truth: Any) -> bool:
    """Whether an answer says what a ground truth says: as a number where that is one, else as a text."""
    first, second = answer, str(truth)
    if first.strip() == second.strip():
        return bool(first.strip())
    if (expected := read_truth(truth)) is not None:
        return read_number(first) == expected
    return bool(plain(first)) and plain(first) == plain(second)


def same_numbers(one: str, other: str) -> bool:
    """Whether two texts name the same numbers in the same order: `-5` is not `5`, and `1.5` is not `15`."""
    first, second = (
        [read_number(number[0]) for number in find_numbers(with_usual_signs(text))] for text in (one, other)
    )
    return first == second


def list_items(text: str) -> list[str]:
    """The lines that say something, without bullets, numbers and markdown around them."""
    lines = (plain(_BULLET.sub("", line.strip())) for line in text.splitlines())
    return [line for line in lines if line]


def names_one(text: str) -> bool:
    """Whether a text offers a single answer: no `or`, no `not`, no question mark."""
    return "?" not in text and not leaves_open(text)


_NAME = re.compile(r"[A-Za-z][\w-]*")
_BOX = "\\boxed{"
_MARKS = re.compile("#{4,}")
_BEGINS = re.compile(r"[*_`$\\({\s]*(?:boxed\{)?[-+−]?[$€£¥]?\.?\d")
_HEADING = re.compile(r"\d+[.):]\s+\S")
_PART = re.compile(r"(?:\\[dt]?frac\{(?:[^{}]{0,40}\}\{)?|\\sqrt(?:\[\d+\])?\{|[±√]|\\(?:pm|sqrt))\s*$")
"""Before a number that is part of another one."""
_ENDS_OF_PART = "{±√mt"
_RAISED = re.compile(rf"\s?(?:\^(?!\{{?\\circ)|\*\*\d|[²³¹⁰⁴-⁹½⅓¼¾⅔∞√]|{GREEK}|{MATHS})|{VARIABLES}")
"""After a number that is part of an expression: 5^n, 5π, 5xy."""
_POWER_OF_UNIT = re.compile(r"(?:km|cm|mm|dm|m|ft|in|inch|inches|feet|yd|mi|s|meters?|metres?|units?)\}?\s?\^\{?$")
_MAGNITUDE = re.compile(rf"\s?(?:{MAGNITUDES.replace(' ', '|')})\b|\s?[万亿千百]|\s?(?-i:[MB])[\s.*$)]*$", re.I)
"""Words that make another number of the one before them."""
_PROSE = re.compile(r"[*_\s]*[^\W\d_]+[ *]")
_PROSE_OF_SEVERAL = re.compile(
    r"[*_\s]*(?!so|thus|therefore|hence|the|final|answer|result|total|sum|minus|negative)[^\W\d_]+[ *]", re.I
)
"""Words that no number can follow which has several in it, such as 1 1/2."""
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
    """The last line that names numbers, and they; `skip` is how many such lines to leave out."""
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
    """Whether a text has letters that denying words have: quicker than to look for the words."""
    low = text.lower()
    return "not" in low or "n't" in low or "never" in low or "≠" in low or "\\ne" in low or "!=" in low


def _may_be_part(near: str) -> bool:
    """Whether a text ends as `_PART` may: quicker than to look for it."""
    last = near.rstrip()[-1:]
    return last in _ENDS_OF_PART if last else False


def _links(between: str) -> bool:
    """Whether two numbers with this between them are a list or an expression."""
    words = words_of(between)
    if not words:
        return not between.strip(" \t,;/|&~-–—.+*×·^÷\\")
    if between.strip() in _OPERATORS:
        return True
    if len(words) == 1 and words[0] in ("and", "to"):
        return True
    return len(words) <= 4 and not _OFFERS.isdisjoint(words)
