r"""Numbers as people and models write them. A text is read as a whole or not at all.

    read_number("$1,000"), read_number("5 apples"), read_number(r"\frac{1}{2}")      # 1000, 5, 1/2
    read_number("5 or 6"), read_number("5 million"), read_number("not 5")           # None

Values are exact, however long. No text makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from treetune.scorers.reading.statements import (
    BOLD,
    FIRST_LINE,
    PROSE,
    SENTENCES,
    SEVERAL,
    Extraction,
    Statement,
    closing_brace,
)
from treetune.scorers.reading.words import denied, hedged, refused, words_of

Number = Decimal | Fraction

LAYERS = 8
"""The most layers of marks around an answer, such as `**$\\boxed{5}$**`."""
UNIT_WORDS = 6
"""The most words after a number that may be its unit; more are prose."""
FRACTION_DIGITS = 300
"""The maximum number of digits in the parts of a fraction."""
SIDES = 20
"""The maximum number of equals signs in an answer."""


def plain(text: str) -> str:
    r"""Strip surrounding spaces, quotes, markdown, LaTeX and full stops: `**$\boxed{5}$.**` is `5`."""
    for _ in range(LAYERS):
        before = text
        text = text.strip(_AROUND).rstrip(_STOPS)
        if text[:1].isalnum() and text[-1:].isalnum():  # nothing left to strip
            break
        if text.endswith("!") and not text[-2:-1].isdigit():  # 5! is 120
            text = text[:-1]
        for opening, closing in _PAIRS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
                inner = text[len(opening) : -len(closing)]
                if closing == "}" and closing_brace(text, len(opening)) != len(text) - 1:
                    continue
                if closing != ")" or ")" not in inner or inner.find("(") < inner.find(")") >= 0 <= inner.find("("):
                    text = inner
        if text == before:
            break
    return text


def read_number(text: str) -> Number | None:
    """The value of a text that is one number, with or without a unit: `$1,000`, `5 apples`, `-2.50`, `1/2`, `5e9`,
    `x = 5`. None for anything else: `5 or 6`, `5?`, `5 million`, `not 5`."""
    if simple := _SIMPLE.fullmatch(text):  # the fast path, for most answers
        return Decimal((simple[1] or simple[2]).replace(",", ""))
    text = plain(_with_points(with_usual_signs(text)))
    if "10" in text:
        text = _SCIENTIFIC.sub(r"\1e\2", text)
    if text.count("=") > SIDES:
        return None
    *sides, text = (plain(side) for side in text.split("=")) if "=" in text else (text,)
    value = None if _WORDY.match(text) else _read_value(text)
    if value is None and (lead := _LEAD.match(text)):
        value = _read_value(plain(text[lead.end() :]))
    if any(_DIGIT.search(side) and any(word in _JOINING for word in words_of(side)) for side in sides):
        return None
    stated = {_read_value(side) for side in sides} - {None}
    return value if stated <= {value} else None


def _with_points(text: str) -> str:
    """Write decimal commas as points: `1.000,5`, `3,5`, and `1.234.567` are numbers in many languages."""
    if ("," in text or text.count(".") > 1) and "(" not in text and "[" not in text:
        text = _WITH_COMMA.sub(lambda number: re.sub(r"[.\s]", "", number[0]).replace(",", "."), text)
    return text


def read_truth(truth: Any) -> Number | None:
    """The value of a ground truth that is a number without a unit: `10 km` must not match `10 m`."""
    return _read_truth(str(truth))


@lru_cache(maxsize=1024)
def _read_truth(truth: str) -> Number | None:
    words = words_of(_COMMAND.sub("", truth))
    return None if any(word != "e" for word in words) else read_number(truth)


def find_numbers(text: str) -> list[re.Match[str]]:
    """Every number in a text, with its sign and currency."""
    digit = _DIGIT.search(text)
    # A sign, a space, a currency and a point may come before the digit. Starting there is faster.
    found = None if digit is None else _TOKEN.search(text, max(0, digit.start() - 4))
    numbers = []
    while found is not None:
        numbers.append(found)
        found = _TOKEN.search(text, found.end())
    return numbers


def with_usual_signs(text: str) -> str:
    """Replace Unicode minus signs and digits by ASCII ones."""
    return text if text.isascii() else text.translate(_USUAL)


def is_negated(ahead: str) -> bool:
    """Whether the text before a number calls it negative in words."""
    low = ahead.lower()
    return ("minus" in low or "negative" in low) and _NEGATIVE.search(ahead) is not None


def read_amount(statement: Statement) -> Extraction | None:
    """The number that a statement gives: after its last equals sign, else the first number of an explicit statement,
    or the last one of a sentence. Numbers joined by `or`, `to`, a comma or an operator are several."""
    text = statement.text
    if simple := _SIMPLE.fullmatch(text):
        return Extraction(text.strip(), value=Decimal((simple[1] or simple[2]).replace(",", "")))
    text = _with_points(with_usual_signs(text))
    if statement.form == FIRST_LINE:
        value = None if "=" in text else read_number(text)
        return None if value is None else Extraction(plain(text), value=value)
    if text.rstrip(_AROUND).endswith(("?", "？", "吗", "か")):
        return Extraction(None, f"{text[-60:].strip()} is a question") if _DIGIT.search(text) else None
    if (value := read_number(text)) is not None:
        return Extraction(plain(text.rpartition("=")[2]), value=value)
    if statement.form == BOLD:
        return None
    if _PLACEHOLDER.fullmatch(text):
        return Extraction(None, f"a placeholder: {text:.60}")
    doubtful = hedged(text)
    text = _without_asides(text)
    if statement.form in SENTENCES:
        text = _SENTENCE_STOP.sub("", text)
    numbers = [found for found in find_numbers(text) if not _POWER_OF_UNIT.search(text, 0, found.start())]
    if not numbers:
        return None
    if (value := read_number(text)) is not None:
        return Extraction(plain(text.rpartition("=")[2]), value=value)
    equals = max(text.rfind("="), text.rfind("≈"))
    if equals > 0 and not words_of(text):  # "3 = 5"
        sides = {read_number(side) for side in re.split("[=≈]", text)} - {None}
        if len(sides) > 1:
            return Extraction(None, SEVERAL)
    explicit = statement.form not in PROSE
    if explicit and _CLAUSE.search(text, numbers[0].end(), max(equals, 0)):
        equals = -1  # the sum is a remark: "290 litres, because 35 × 6 = 210"
    after = [found for found in numbers if found.start() > equals]
    chosen = after[0 if explicit or equals >= 0 else -1] if after else numbers[-1]
    return _check_number(text, numbers, numbers.index(chosen), equals + 1 if after else 0, doubtful)


def _check_number(text: str, numbers: list[re.Match[str]], chosen: int, begin: int, doubtful: bool) -> Extraction:
    number = numbers[chosen]
    ahead, behind = text[begin : number.start()][-NEAR:], text[number.end() :][:NEAR]
    said = f"-{number[0]}" if is_negated(ahead) else number[0]
    if denied(ahead) or refused(behind):
        return Extraction(None, f"{said} is denied")
    if _PART.search(ahead) or _RAISED.match(behind) or _MAGNITUDE.match(behind) or _ORDINAL.search(ahead):
        return Extraction(None, f"not a plain number: {ahead[-20:]}{said}{behind[:20]}".strip())
    value = read_number(said)
    for one, other in pairwise(numbers):
        linked = number in (one, other) and _links(text[one.end() : other.start()])
        if linked and read_number(one[0]) != read_number(other[0]):
            return Extraction(None, SEVERAL)
    if doubtful:
        return Extraction(None, SEVERAL)
    return Extraction(said, value=value) if value is not None else Extraction(None, f"no number: {said:.60}")


def _without_asides(text: str) -> str:
    """Remove remarks in brackets, and what the answer is said not to be: `42 (6 x 7)`, `42, not 41`."""
    if "(" in text:
        text = _BRACKETS.sub(lambda aside: aside[0] if hedged(aside[0]) else " ", text)
    return _CONTRAST.sub("", text) if _CONTRASTS.search(text) else text


def _links(between: str) -> bool:
    """Whether this text between two numbers makes them a list or an expression."""
    words = words_of(between)
    if not words:
        return not between.strip(" \t,;/|&~-–—.+*×·^÷<>≤≥\\")
    if between.strip() in ("x", "\\times", "\\cdot"):
        return True
    return len(words) <= 4 and not _JOINS.isdisjoint(words)


def _read_value(text: str) -> Number | None:
    low = text.lower()
    if "minus" in low or "negative" in low:
        text = _NEGATIVE.sub("-", text, count=1)
    match = _SIGNED.fullmatch(text)
    if match is None or (match["sign"] and match["late"]) or not _is_unit(match["unit"]):
        return None
    sign = -1 if "-" in (match["sign"], match["late"]) else 1
    if match["number"] is None:
        top, bottom = match["top"] or match["a"] or match["over"], match["bottom"] or match["b"] or match["under"]
        part = _divide(Decimal(top), Decimal(bottom))
        return None if part is None else sign * (part + int(match["whole"] or 0))
    value: Number | None = _read_decimal(match["number"])
    if value is not None and match["divisor"] is not None:
        value = _divide(value, _read_decimal(match["divisor"]))
    if value is None or sign > 0:
        return value
    return value.copy_negate() if isinstance(value, Decimal) else -value  # `-` would round a Decimal


def _read_decimal(text: str) -> Decimal | None:
    digits, exponent, power = text.lower().partition("e")
    digits = digits.replace(",", "")
    if not digits.isdecimal():
        digits = re.sub(r"[^\d.]", "", digits)
    try:
        return Decimal(digits + exponent + power)
    except InvalidOperation:
        return None


def _divide(top: Number | None, bottom: Number | None) -> Fraction | None:
    for part in (top, bottom):
        if not isinstance(part, Decimal):
            return None
        if len(part.as_tuple().digits) > FRACTION_DIGITS or abs(part.adjusted()) > FRACTION_DIGITS:
            return None
    return Fraction(top) / Fraction(bottom) if bottom else None  # type: ignore[arg-type]


def _is_unit(text: str) -> bool:
    """Whether the text after a number is only its unit."""
    if not text.strip():
        return True
    match = None if _MATHS.match(text) else _UNIT.fullmatch(text)
    if match is None:
        return False
    said = match["words"] or ""
    if not said.isascii() and _ASIAN_DOUBT.search(said):
        return False
    if _SYMBOL.search(said) or _VARIABLES.match(text):
        return False
    words = words_of(said)
    if len(words) > UNIT_WORDS or any(word in _CHANGING for word in words) or any(map(str.isnumeric, said)):
        return False
    letters = _LETTERS | ({"a"} if len(words) > 1 else set()) | ({"c", "f"} if match["degrees"] else set())
    return all(len(word) > 1 or word in letters for word in words)


_SIMPLE = re.compile(
    r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*|[$€£¥]?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\.?", re.ASCII
)
_WITH_COMMA = re.compile(
    r"(?<![\w.,])(?:\d{1,3}(?:[.  ]\d{3})+|\d+),(?:\d{1,2}|\d{4,})(?![\d,]|\.\d)"
    r"|(?<![\w.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])"
    r"|(?<![\w.,])\d{1,3}(?:[.  ]\d{3})+,\d{3}(?![\d,]|\.\d)"
)
_SCIENTIFIC = re.compile(r"(\d)\s?(?:[×x·*]|\\times|\\cdot)\s?10(?:\^|\*\*)\{?([-+]?\d+)\}?")
_COMMAND = re.compile(r"\\[a-z]+", re.I)
_DIGIT = re.compile(r"\d")
_AROUND = " \t\r\n*_`\"'“”‘’\u00a0"
_STOPS = ".,;: \t\n。！"
_PAIRS = (
    *((f"\\{name}{{", "}") for name in "boxed text textbf mathbf mathrm mbox".split()),
    ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("(", ")"),
)  # fmt: skip
_USUAL = str.maketrans("−–﹣－＋０１２３４５６７８９．，％", "----+0123456789.,%")
_GROUPED = r"\d{1,3}(?:(?:,|\{,\}|,\\!|\\,| | )\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,6},\d{3}(?!\d)"
_PLAIN = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,9}(?!\d))?"
_SIGNED = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:\\?[$€£¥]\s?)?(?P<late>[-+]?)"
    rf"(?:\\[dt]?frac(?:\{{(?P<top>[-+]?\d+)\}}\{{(?P<bottom>\d+)\}}|(?P<a>\d)(?P<b>\d))"
    rf"|(?P<whole>\d{{1,9}}) (?P<over>\d{{1,9}})/(?P<under>\d{{1,9}})"
    rf"|(?P<number>{_PLAIN}{_EXPONENT})(?:\s?/\s?(?P<divisor>{_PLAIN}))?)(?P<unit>.*)",
    re.DOTALL,
)
# Most characters do not begin a number, and most numbers are plain digits, so checking that first is faster.
_TOKEN = re.compile(
    r"(?=[-+$€£¥.\d])(?:(?<![\w.)])[-+]\s?)?[$€£¥]?"
    rf"(?:\d+(?![\d,{{\\eE/%]|\s\d|\.[\deE/%])\.?|{_PLAIN}{_EXPONENT}(?:/\d+)?%?)"
)
_LEAD = re.compile(
    r"\s*(?:so |thus |therefore |hence )?,?\s*(?:the )?(?:final )?(?:answer|result|total|sum)\s?(?:is|:)*\s", re.I
)
_WORDY = re.compile(r"(?!minus|negative)[a-z]", re.I)
"""Text that cannot begin a number."""
_NEGATIVE = re.compile(r"(?:minus|negative)\s+(?=[\d$.]|$)", re.I)
_UNIT = re.compile(
    r"\s?(?:%|\\%|[$€£¥]|(?P<degrees>°|\^\\circ|\^\{\\circ\}))?\s?(?:\\(?:text|mathrm|mbox)\{|[\\ ]|\\[,;:!]|\()*"
    r"(?:(?P<words>[^\W\d_][^\d\\{}=+*<>?^]*)(?:\}?\^?\{?[23²³]\}?)?)?[\s)}]*"
)
MATHS = r"\\(?:pi|sqrt|ln|log|exp|sin|cos|tan|theta|alpha|beta|gamma|lambda|phi|infty|cdot|times|div|pm|[dt]?frac)\b"
"""LaTeX commands that make a formula of the number before them. Other commands may be units."""
GREEK = r"[\u0391-\u03a8\u03b1-\u03bb\u03bd-\u03c9](?!\w)"
"""A letter that stands for a number: π, θ. The letters μ and Ω are units."""
VARIABLES = r"[abxyz]{2}(?![^\W_])"
"""Variables, as in 5xy."""
_SYMBOL = re.compile(rf"{GREEK}|[∞√½⅓¼¾⅔万亿千百]|\b[MB]\s*$")
"""Symbols that change the value of the number before them: 5π, 5M, 5万."""
_VARIABLES = re.compile(VARIABLES)
_MATHS = re.compile(rf"[\s\\,;:!]*{MATHS}")
_ASIAN_DOUBT = re.compile("[不或吗か还もに]|です|ません|ない")
_LETTERS = frozenset("m g l s h d".split())
"""Single letters that are units. Any other letter is a variable: `5x`."""
MAGNITUDES = "hundred thousand million billion trillion dozen lakh lakhs crore crores k"
_JOINING = frozenset("or and nor vs versus".split())
_OPEN = frozenset(
    "or nor not no never neither either maybe perhaps possibly isn't aren't wasn't don't but vs versus unless".split()
)
"""Words that leave the answer open or deny it."""
_CHANGING = _OPEN | frozenset(
    f"{MAGNITUDES} and plus minus times over divided half quarter third point to "
    "choose mod thirds halves quarters fifths tenths than except is wrong incorrect if oder ou bzw oppure ist sind"
    " est sont es son nicht pas falsch faux falso et und "
    "zero one two three four five six seven eight nine ten eleven twelve twenty "
    "thirty forty fifty sixty seventy eighty ninety squared cubed".split()
)
"""Words that change the value of the number before them, or take it back."""
NEAR = 60
"""How many characters before and after a number are checked."""
_JOINS = frozenset(
    "or nor o u vs versus and to maybe perhaps possibly alternatively otherwise then oder ou und et bis y".split()
)
"""Words that make two numbers several answers, or parts of one."""
_BRACKETS = re.compile(r"(?<=[\w*.%°$] )\([^()]*\)")
_CONTRASTS = re.compile(r"\b(?:not|rather|instead|nicht|non|pas|no)\b|不|ではなく", re.I)
_CONTRAST = re.compile(
    r"[,，]?\s*(?:\b(?:and |und |et |y )?(?:not|rather than|instead of|nicht|non(?: pas)?|pas|no)\s|而?不是)"
    r"[^,.;:，。]*?(?:[,.;:，]?\s?(?:\b(?:but|sondern|mais|sino)\b|而是)|(?=[,.;:，。](?:\s|$))|$)|[^\s、，。]*ではなく、?",
    re.I,
)
_CLAUSE = re.compile(r"[,;:.]\s|\b(?:because|since|as|for|weil|denn|car|porque)\b", re.I)
_PLACEHOLDER = re.compile(r"\W*\[[^\]\d]*\]\W*")
_SENTENCE_STOP = re.compile(r"(?<=\d)!(?=[^\w!]*$)")
_PART = re.compile(
    r"(?:\\[dt]?frac\{(?:[^{}]{0,40}\}\{)?|\\sqrt(?:\[\d+\])?\{|[±√<>≤≥]"
    r"|\b(?:greater|less|more|fewer|larger|smaller|other|at (?:least|most)|over|under|above|below"
    r"|up to|bis zu)(?: than)?"
    r"|\\(?:pm|sqrt|leq?|geq?))\s*$"
)
"""Precedes a number that is part of an expression."""
_RAISED = re.compile(
    rf"\s?(?:\^(?!\{{?\\circ)|\*\*\d|[²³¹⁰⁴-⁹½⅓¼¾⅔∞√]|{GREEK}|{MATHS})|{VARIABLES}|[ij](?!\w)|[abcefnpqrtuvwxyz]\W*$|!(?=\S|$)|%\S|\s?[<>≤≥±]|[:_][\d{{]"
)
"""Follows a number that is part of an expression: 5^n, 5π, 5xy, 5!!."""
_POWER_OF_UNIT = re.compile(r"(?:km|cm|mm|dm|m|ft|in|inch|inches|feet|yd|mi|s|meters?|metres?|units?)\}?\s?\^\{?$")
_ORDINAL = re.compile(
    r"\b(?:page|step|chapter|question|problem|figure|table|equation|section|half of|double|twice)\s$", re.I
)
"""Precedes a number that names or changes something."""
_MAGNITUDE = re.compile(
    rf"\s(?:and|&) (?:a|an|one) (?:half|third|quarter|fifth)|\s?(?:{MAGNITUDES.replace(' ', '|')}|choose|mod|factorial"
    rf"|halves|thirds|quarters|fifths|tenths)\b|\s?[万亿千百]|\s?(?-i:[MB])[\s.*$)]*$",
    re.I,
)
"""Multiplies the number before it."""
