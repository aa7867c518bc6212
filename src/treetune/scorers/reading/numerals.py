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
from typing import Any

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
                if closing != "}" or closing_brace(text, len(opening)) == len(text) - 1:
                    text = inner
        if text == before:
            break
    return text


def read_number(text: str) -> Number | None:
    """The value of a text that is one number, with or without a unit: `$1,000`, `5 apples`, `-2.50`, `1/2`, `5e9`,
    `x = 5`. None for anything else: `5 or 6`, `5?`, `5 million`, `not 5`."""
    if simple := _SIMPLE.fullmatch(text):  # the fast path, for most answers
        return Decimal((simple[1] or simple[2]).replace(",", ""))
    text = plain(with_usual_signs(text))
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


def is_bare(text: str) -> bool:
    """Whether a text is only a number."""
    return _TOKEN.fullmatch(plain(text)) is not None


def with_usual_signs(text: str) -> str:
    """Replace Unicode minus signs and digits by ASCII ones."""
    return text if text.isascii() else text.translate(_USUAL)


def leaves_open(text: str) -> bool:
    """Whether a text has words that leave the answer open or deny it."""
    return any(word in _OPEN for word in words_of(text))


def is_negated(ahead: str) -> bool:
    """Whether the text before a number calls it negative in words."""
    low = ahead.lower()
    return ("minus" in low or "negative" in low) and _NEGATIVE.search(ahead) is not None


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower().replace("’", "'"))


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


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
_COMMAND = re.compile(r"\\[a-z]+", re.I)
_DIGIT = re.compile(r"\d")
_BRACE = re.compile(r"[{}]")
_AROUND = " \t\r\n*_`\"'“”‘’\u00a0"
_STOPS = ".,;: \t\n"
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
_WORD = re.compile(r"[a-z']+")
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
    "than except is wrong incorrect if zero one two three four five six seven eight nine ten eleven twelve twenty "
    "thirty forty fifty sixty seventy eighty ninety squared cubed".split()
)
"""Words that change the value of the number before them, or take it back."""
