r"""Numbers as people and models write them. A text is read as a whole or not at all.

    read_number("$1,000"), read_number("5 apples"), read_number(r"\frac{1}{2}")      # 1000, 5, 1/2
    read_number("5 or 6"), read_number("5 million"), read_number("not 5")           # None

Values are exact, however many digits they have. No text makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any

from treetune.scorers.reading.extraction import Mention, settle
from treetune.scorers.reading.statements import ALONE, PROSE, SENTENCES, SEVERAL, Extraction, Statement, closing_brace
from treetune.scorers.reading.words import LISTS, hedged, listed, usual, words_of

Number = Decimal | Fraction

LAYERS = 8
"""The maximum number of layers of marks around an answer, such as `**$\\boxed{5}$**`."""
UNIT_WORDS = 6
"""The maximum number of words after a number that may be its unit; more are prose."""
FRACTION_DIGITS = 300
"""The maximum number of digits in the parts of a fraction."""
SIDES = 20
"""The maximum number of equals signs in an answer."""
LONGEST = 10_000
"""The maximum number of characters of a statement that gives a number."""


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
    text = plain(usual_number(text))
    if "=" not in text:
        return _read_value(text)
    if text.count("=") > SIDES or hedged(text):
        return None
    *sides, last = (_read_value(plain(side)) for side in text.split("="))
    return last if {*sides} <= {None, last} else None


def read_truth(truth: Any) -> Number | None:
    """The value of a ground truth that is a number without a unit: `10 km` must not match `10 m`."""
    return _read_truth(str(truth))


@lru_cache(maxsize=1024)
def _read_truth(truth: str) -> Number | None:
    words = words_of(_COMMAND.sub("", truth))
    return None if any(word != "e" for word in words) else read_number(truth)


def usual_number(text: str) -> str:
    """Write numbers in one way: ASCII signs and digits, decimal points, exponents, units without LaTeX."""
    text = usual(text).replace("–", "-")
    text = _SPACED.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    if "\\" in text:
        text = _LATEX_SPACE.sub(" ", _LATEX_TEXT.sub(r" \1 ", text)).replace("^{\\circ}", "°").replace("^\\circ", "°")
    if ("," in text or "€" in text or text.count(".") > 1) and "(" not in text and "[" not in text:
        text = _WITH_COMMA.sub(lambda number: re.sub(r"[.\s]", "", number[0]).replace(",", "."), text)
    return _SCIENTIFIC.sub(r"\1e\2", text) if "10" in text else text


def read_amount(statement: Statement) -> Extraction | None:
    """The number that a statement gives: the whole statement, else the number after its last equals sign, else its
    first number; in a sentence of no form, its last number."""
    text = statement.text
    if simple := _SIMPLE.fullmatch(text):
        return Extraction(text.strip(), value=Decimal((simple[1] or simple[2]).replace(",", "")))
    if len(text) > LONGEST or _DIGIT.search(text) is None:
        return None
    text = usual_number(text)
    if statement.form in SENTENCES and "!" in text:
        text = _SENTENCE_STOP.sub("", text)
    is_prose = text[:1].isalpha() and text[:1].isascii() and "=" not in text
    value = None if is_prose else read_number(text)
    if value is not None and not (statement.form in ALONE and "=" in text):
        return Extraction(plain(text.rpartition("=")[2]), value=value)
    if statement.form in ALONE:
        return None
    mentions = find_amounts(text)
    equals = max(text.rfind("="), text.rfind("≈"))
    after = [one for one in mentions if one.begin > equals]
    if equals > 0 and after:
        if len({read_number(side) for side in re.split("[=≈]", text)} - {None}) > 1:
            return Extraction(None, SEVERAL)
        mentions = after
    return settle(text, mentions, first=statement.form not in PROSE or mentions is after)


def find_amounts(text: str) -> list[Mention]:
    """Every word of a text with a digit, and its value, if it is a plain number."""
    words = [word.span() for word in _RUN.finditer(text) if _DIGIT.search(word[0])]
    return [mention for begin, end in words if (mention := _read_word(text, begin, end))]


def _read_word(text: str, begin: int, end: int) -> Mention | None:
    said = text[begin:end]
    if not said.isalnum():
        said = said.rpartition("=")[2].lstrip(_LEADING)
        said = plain(said.rstrip(_TRAILING if "{" in said else _TRAILING + "}"))
    if _WORDY.match(said):  # a name: `H2O`
        return None
    value = read_number(said)
    ahead, behind = text[max(0, begin - 30) : begin].lower(), text[end : end + 30].lower()
    *_, tail = ["", *ahead.split()]
    last = words_of(tail)[-1] if tail[-1:].isalpha() else ""
    if last in _NEGATIVE:
        said, value = f"-{said}", None if value is None else 0 - value
    compared = tail.endswith(_COMPARING) or (tail in ("to", "of") and _UP_TO.search(ahead))
    if compared or last in _LIMITS or _CHANGED.match(behind):
        value = None
    return Mention(begin, end, value, said)


def _read_value(text: str) -> Number | None:
    match = None if _WORDY.match(text) else _SIGNED.fullmatch(text)
    if match is None or (match["sign"] and match["late"]) or not _is_unit(match["unit"]):
        return None
    if match["number"] is None:
        top, bottom = match["top"] or match["a"] or match["over"], match["bottom"] or match["b"] or match["under"]
        part = _divide(Decimal(top), Decimal(bottom))
        value: Number | None = None if part is None else part + int(match["whole"] or 0)
    else:
        value = _read_decimal(match["number"])
        if value is not None and match["divisor"] is not None:
            value = _divide(value, _read_decimal(match["divisor"]))
    if value is None or not (match["sign"] or match["late"] or "").strip(" +"):
        return value
    return value.copy_negate() if isinstance(value, Decimal) else -value  # `-` would round a Decimal


def _read_decimal(text: str) -> Decimal | None:
    digits, exponent, power = text.lower().partition("e")
    if digits[-1:] != "." and not digits.isdecimal():
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
    if not text:
        return True
    match = _UNIT.fullmatch(text)
    if match is None or _ALTERS.search(text):
        return False
    words = _WORDS.findall(match["words"])
    if len(words) > UNIT_WORDS or not _NO_UNIT.isdisjoint(word.lower() for word in words):
        return False
    letters = _LETTERS + ("a" if len(words) > 1 else "") + ("CFK" if "°" in text else "")
    return all(len(word) > 1 or word in letters or word >= "\u2e80" for word in words)


_SIMPLE = re.compile(
    r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*|[$€£¥₹]?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\.?", re.ASCII
)
_WITH_COMMA = re.compile(
    r"(?<![\w.,])\d{1,3}(?:\.\d{3})+(?=\s?€)|"  # no price has three decimals
    r"(?<![\w.,])(?:\d{1,3}(?:[.  ]\d{3})+|\d+),(?:\d{1,2}|\d{4,})(?![\d,]|\.\d)"
    r"|(?<![\w.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.,])"
    r"|(?<![\w.,])\d{1,3}(?:[.  ]\d{3})+,\d{3}(?![\d,]|\.\d)"
)
_SCIENTIFIC = re.compile(r"(\d)\s?(?:[×x·*]|\\times|\\cdot)\s?10(?:\^|\*\*)\{?([-+]?\d+)\}?")
_COMMAND = re.compile(r"\\[a-z]+", re.I)
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}\\]*)\}")
_LATEX_SPACE = re.compile(r"\\(?=[%$ ])|\\[,;:!](?=\D)|~")
_DIGIT = re.compile(r"\d")
_RUN = re.compile(r"[^\s|—\u3040-\u30ff\u3400-\u9fff]+")
_AROUND = " \t\r\n*_`\"'"
_STOPS = ".,;: \t\n"
_LEADING, _TRAILING = "([~≈→", ")],"
_PAIRS = (
    *((f"\\{name}{{", "}") for name in "boxed fbox text textbf mathbf mathrm mbox".split()),
    ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("(", ")"),
)  # fmt: skip
_GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,6},\d{3}(?!\d)"
_PLAIN = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,9}(?!\d))?"
_SIGNED = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:\\?[$€£¥₹]\s?)?(?P<late>[-+]?)"
    rf"(?:\\[dt]?frac(?:\{{(?P<top>[-+]?\d+)\}}\{{(?P<bottom>\d+)\}}|(?P<a>\d)(?P<b>\d))"
    rf"|(?P<whole>\d{{1,9}}) (?P<over>\d{{1,9}})/(?P<under>\d{{1,9}})"
    rf"|(?P<number>{_PLAIN}{_EXPONENT})(?:\s?/\s?(?P<divisor>{_PLAIN}))?)(?P<unit>.*)",
    re.DOTALL,
)
_SPACED = re.compile(r"(?<![\w.,])\d{1,3}(?:(?:\{,\}|,\\!|\\,|[ \u00a0])\d{3})+(?!\d)")
_WORDY = re.compile(r"[a-z]", re.I)
_UNIT = re.compile(r"(?P<words>[^\d\\{}=+*<>?!^]*)(?:(?<=[a-z])\s?\^\{?[23]\}?)?\s*")
_WORDS = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_ALTERS = re.compile(r"[∞万亿千百不或吗か还もに]|ません|ない|^\s?[abxyz]{2}\b")
_LETTERS = "mglLshdΩ"
"""Single letters that are units. Any other letter is a variable: `5x`."""
_NO_UNIT = frozenset(listed(" ".join(LISTS[name] for name in ("no_unit", "open", "magnitudes"))))
_NEGATIVE = ("minus", "negative")
_LIMITS = frozenset(listed(LISTS["limits"]))
_COMPARING = tuple(r"< > ≤ ≥ ± √ \pm \sqrt \le \leq \ge \geq \lt \gt".split())
_UP_TO = re.compile(r"(?:(?<![a-z]s )\bup to|\bhalf of)\s*$")
_CHANGED = re.compile(
    rf"[\s*_$-]*(?:(?:{'|'.join(listed(LISTS['magnitudes']))})\b|(?:and|&) (?:a|an|one) (?:half|third|quarter|fifth)\b"
    r"|[万亿千百])"
)
_SENTENCE_STOP = re.compile(r"(?<=\d)!(?=[^\w!]*$)")
