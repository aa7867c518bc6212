"""Words that deny, leave open and take back a value, in nine languages, and what they mean for the text around it.

denied("It is not ")                  # True: before a value
refused(" is wrong.")                 # True: after it
hedged("maybe 5"), hedged("5 or 6")   # True, True
taken_back(". Wait, I meant 6.")      # True: anywhere after it

The words are in `words.toml`.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

NEAR = 80
"""How many characters around a value are checked."""
FAR = 400
"""How many characters after an answer can take it back."""
END = 200
"""How many characters at the end of a reply can say that it has no answer."""

LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))


def listed(words: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in words.split())


def either(*names: str) -> str:
    """A pattern for any word of some lists."""
    return "|".join(re.escape(word) for name in names for word in listed(LISTS[name]))


class Phrases:
    """Finds which of some phrases are in a text. Most texts have none of the few pieces that the phrases share."""

    def __init__(self, phrases: tuple[str, ...]) -> None:
        self._phrases = phrases

    @cached_property
    def _all(self) -> list[tuple[str, list[str]]]:
        return _by_piece(self._phrases)

    @cached_property
    def _ascii(self) -> list[tuple[str, list[str]]]:
        return _by_piece(tuple(filter(str.isascii, self._phrases)))

    def found_in(self, text: str) -> list[str]:
        groups = self._ascii if text.isascii() else self._all
        return [phrase for piece, phrases in groups if piece in text for phrase in phrases if phrase in text]


def _by_piece(phrases: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Phrases by a piece of four characters that they have in common; the piece of the most phrases first."""
    groups, left = [], list(phrases)
    while left:
        pieces = Counter(piece for one in left for piece in {one[at : at + 4] for at in range(max(1, len(one) - 3))})
        piece = max(pieces, key=lambda piece: (pieces[piece], piece))
        those = [one for one in left if piece in one]
        groups.append((piece if len(those) > 1 else those[0], those))
        left = [one for one in left if piece not in one]
    return groups


def usual(text: str) -> str:
    """Write marks in one way: quotes, minus signs, and the signs and digits of Chinese and Japanese."""
    return text if text.isascii() else text.translate(_USUAL)


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def plainly_said(text: str) -> bool:
    """Whether a short text in ASCII has none of the words that deny or leave open. It spares the other questions."""
    if len(text) > NEAR or "?" in text or "!=" in text or not text.isascii():
        return False
    low = text.lower()
    return _DOUBTING.isdisjoint(_LETTERS.findall(low)) and "n't" not in low


def denied(ahead: str) -> bool:
    """Whether the text before a value, in the same clause, says that it is not the answer."""
    for place, word in enumerate(reversed(_tokens(ahead[-NEAR:]))):
        if word in _TURNS:
            return False
        if word in _NOT or word.endswith("n't") or word == "cannot" or (place < 3 and word in _WRONG):
            return True
    return not ahead.isascii() and _NOT_ASIAN.search(ahead[-NEAR:]) is not None


def refused(behind: str) -> bool:
    """Whether the text after a value, in the same clause, says that it is not the answer, or asks."""
    behind = behind[:NEAR].lstrip(" ,)]*_`\"'$}")
    if behind.startswith(_REFUSING):
        return True
    verb = -9
    tokens = _tokens(behind)
    for place, word in enumerate(tokens):
        if word in _TURNS:
            break
        if word.endswith("n't") or word == "cannot" or (place - verb <= 3 and (word in _NOT or word in _WRONG)):
            return True
        if word in _NOT and not _VERBS.isdisjoint(tokens[place + 1 : place + 2]):
            return True
        if word in _VERBS:
            verb = place
    return False


def hedged(text: str) -> bool:
    """Whether a text offers several answers, or none with certainty: `A or B`, `maybe A`, `some say A`, `A?`."""
    if "?" in text:
        return True
    words = words_of(text)
    if not _OPEN.isdisjoint(words):
        return True
    if not _OPEN_FIRST.isdisjoint(words) and not _OPEN_PAIRS.isdisjoint(pairwise(words)):
        return True
    return not text.isascii() and _OPEN_ASIAN.search(text) is not None


def taken_back(behind: str) -> bool:
    """Whether the text after an answer takes it back: `5. Sorry, I meant 6.`"""
    low = behind[:FAR].lower()
    return not _BACK.isdisjoint(_FIRST_WORD.findall(low)) or bool(_BACK_PHRASES.found_in(low))


def unsure(text: str) -> bool:
    """Whether a reply says that it does not know."""
    return bool(_UNSURE.found_in(text[-END:].lower()))


def polite(text: str) -> bool:
    """Whether a sentence is about the reply, not the answer: `I hope this helps!`"""
    return text.lower().startswith(_POLITE)


def _tokens(text: str) -> list[str]:
    """The words and the marks of a text; none if it is ASCII and no word denies."""
    text = text.lower()
    tokens = _TOKEN.findall(text)
    return [] if _DENYING.isdisjoint(tokens) and "n't" not in text and text.isascii() else tokens


_USUAL = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {"‘": "'", "’": "'", "ʼ": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "−": "-", "‐": "-", "‑": "-",
     "﹣": "-", "。": ".\n", "！": "! ", "？": "? ", "、": ", ", "（": " (", "\u00a0": " "}
)  # fmt: skip
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_TOKEN = re.compile(r"rul\w+ out|(?:any|every)thing but|[^\W_]+(?:['-][^\W_]+)*|[,;:.!?–—(\n]|≠|!=|\\neq?")
_NOT, _WRONG, _VERBS, _OPEN = (frozenset(listed(LISTS[name])) for name in ("not", "wrong", "verbs", "open"))
MAGNITUDES = frozenset(listed(LISTS["magnitudes"]))
_DENYING = _NOT | _WRONG
_TURNS = frozenset((*listed(LISTS["turns"]), "\n"))
_OPEN_PAIRS = frozenset(tuple(pair.split()) for pair in listed(LISTS["open_pairs"]))
_OPEN_FIRST = frozenset(first for first, _ in _OPEN_PAIRS)
_LETTERS = re.compile("[a-z]+")
_DOUBTING = frozenset(_LETTERS.findall(" ".join((*_DENYING, *_OPEN, *_OPEN_FIRST))))
_BACK = frozenset(listed(LISTS["back"]))
_BACK_PHRASES, _UNSURE = (Phrases(listed(LISTS[name])) for name in ("back_phrases", "unsure"))
_POLITE = listed(LISTS["polite"])
_REFUSING = ("?", "❌", "✗", "不", "是错", "是不", "错", "ではな", "ではあり", "じゃな", "は間違", "は不")
_NOT_ASIAN = re.compile(r"(?:不是|不|非|并非|没有)[^,.;]*$")
_OPEN_ASIAN = re.compile("或|还是|也许|可能|要么|または|あるいは|どちら|かもしれ|¿|か[A-Za-z\\d]")
_FIRST_WORD = re.compile(r"[.!?;,\n…—–-](?:(?<!-)|(?<=\s-))[\s*_\"'(]*([^\W_]+(?:['-][^\W_]+)*)")
