"""Checks whether a prose reply names a text as its answer.

    why_unnamed("The capital is Paris.", "Paris")       # "": it is named
    why_unnamed("Paris or London", "Paris")             # "left open"

A text that is denied, left open, taken back or part of a list does not count as named: guessing twice must not earn
more than guessing once. No text makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

NEAR = 80
"""How many characters before and after a name are checked for a denial or a hedge."""
LINE = 200
"""The maximum length of a line that can be just a label."""


def statement(text: str) -> str:
    """The sentence after the last `answer is` or `answer:` of a text; the whole text if there is none."""
    markers = find_markers(text)
    said = text[markers[-1].end() :].lstrip(EMPTY) if markers else ""
    if not said:
        return text
    end = _SENTENCE.search(said)
    return said[: end.start() + 1] if end else said


def why_unnamed(text: str, wanted: str, others: Iterable[str] = (), written: str | None = None) -> str:
    """Why a text does not give `wanted` as its answer; "" if it does. `others` are answers that must not be named in
    addition; `written` is the text in its original case."""
    begin = _last_place(text, wanted)
    if begin < 0:
        return "not named"
    end = begin + len(wanted)
    # Lower case can change the length of a text: İ becomes two characters.
    why = why_doubtful(written if written is not None and len(written) == len(text) else text, begin, end)
    if not why and others:
        around = text[text.rfind("\n", 0, begin) + 1 : begin] + " " + text[end:]
        if other := next((other for other in others if _last_place(around, other) >= 0), None):
            return f"{other} is named too"
    return why


def why_doubtful(text: str, begin: int, end: int) -> str:
    """Why the name at this place is not the answer of the text; "" if it is."""
    before, behind = text[max(0, begin - NEAR) : begin], text[end : end + NEAR]
    line = before[before.rfind("\n") + 1 :]
    sentence = line[max(line.rfind(". "), line.rfind("! "), line.rfind("? ")) + 1 :]
    ahead = sentence[sentence.rfind("; ") + 1 :]
    if ahead and _may_doubt(ahead):
        if _DENIES.search(ahead):
            return "denied"
        if _OPENS.search(ahead):
            return "left open"
    if text[end - 1].isdigit() and _is_among_numbers(ahead, behind):
        return "one of several"
    if len(before) + len(behind) > NEAR // 2 and " is " not in before and _is_among_many(text, begin, end):
        return "one of several"
    # An item of a list has marks or one of a few words before its name.
    may_be_item = not line[:2].isalpha() or line[:2].lower() in _ITEM_BEGINS
    if not behind:
        listed = (sentence and _is_listed(sentence, "", text[begin:end])) or (
            may_be_item and _is_line_of_list(text, begin, end)
        )
        return "one of several" if listed else ""
    said = behind
    if len(behind) > 1:  # not needed for a single full stop at the end
        stop = _ENDS.search(behind)
        said = behind[: stop.start() + 1] if stop else behind
        if _REFUSES.match(said):
            return DENIED
        if len(said) > 1 and _may_doubt(said) and _OPENS.search(said):
            return "left open"
    elif behind == "?":
        return DENIED
    stop = SENTENCE_END.search(behind) if len(behind) > 1 else None
    if _is_listed(sentence, behind[: stop.start() + 1] if stop else behind, text[begin:end]):
        return "one of several"
    if may_be_item and _is_line_of_list(text, begin, end):
        return "one of several"
    return "taken back" if end + 2 < len(text) and _TAKES_BACK.search(text, end) else ""


def _may_doubt(text: str) -> bool:
    """Whether a text may contain a denial or a hedge, by a few letters: faster than searching for the words."""
    low = text.lower()
    return (
        "or" in low or "not" in low or "n't" in low or "n’t" in low or "never" in low or "either" in low
        or "be" in low or "perhaps" in low or "poss" in low or "vs" in low or "vers" in low or "altern" in low
        or "un" in low or "isnt" in low or "except" in low or "with" in low or "rather" in low or "instead" in low
        or "≠" in low or "!=" in low or "wrong" in low or "incorrect" in low or "anything" in low or "rul" in low
        or "elimin" in low or "exclu" in low or "doubt" in low
    )  # fmt: skip


def _last_place(text: str, wanted: str) -> int:
    """The last place where a text contains another as whole words and whole numbers; -1 if there is none."""
    begin = text.rfind(wanted)
    while begin >= 0:
        end = begin + len(wanted)
        if not (_joins(text, begin - 1, begin) or _joins(text, end, end - 1)):
            return begin
        begin = text.rfind(wanted, 0, end - 1)
    return -1


def _joins(text: str, outside: int, inside: int) -> bool:
    """Whether the character next to a name continues its word or number."""
    if not 0 <= outside < len(text):
        return False
    letter, edge = text[outside], text[inside]
    if letter.isalnum():
        return edge.isalnum()
    if not edge.isdigit():
        return False
    if letter in "-−" and outside < inside:
        return outside == 0 or not text[outside - 1].isalnum()
    beyond = 2 * outside - inside
    return letter in ".,/:" and 0 <= beyond < len(text) and text[beyond].isdigit()


def _is_listed(ahead: str, behind: str, wanted: str) -> bool:
    """Whether other names of the same kind are directly next to one: `Paris, London`, `Paris and London`."""
    capital = wanted[:1].isupper()
    if len(behind) > 1 and (after := _NEXT.match(behind)) and (not capital or not after["name"][0].islower()):
        return True
    link = ahead.rstrip(_DRESS)
    if not link.endswith(_LINKS) or not _ENDS_LIST.match(behind) or (before := _PREVIOUS.search(ahead)) is None:
        return False
    return before["name"].lower() not in _LEADS and (not capital or not before["name"][0].islower())


def _is_among_numbers(ahead: str, behind: str) -> bool:
    """Whether two more numbers are next to one, separated only by spaces: `12 48 7`. A single one may be part of the
    phrase: `48 12-packs`, `in 2024 48 people`."""
    words = [list(reversed(ahead.split()[-2:])), behind.partition("\n")[0].split(maxsplit=2)[:2]]
    return sum(len(list(takewhile(_NUMBER.fullmatch, side))) for side in words) > 1


def _is_line_of_list(text: str, begin: int, end: int) -> bool:
    """Whether a name is alone on its line, and the line above or below is a name of the same kind."""
    start, stop = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
    if start == 0 and stop < 0:
        return False
    stop = len(text) if stop < 0 else stop
    lead, tail = _ITEM_LEAD.fullmatch(text[start:begin][-LINE:]), text[end : min(stop, end + LINE)]
    if lead is None or not _ITEM_TAIL.fullmatch(tail):
        return False
    above, below = text[:start].rstrip().rpartition("\n")[2], text[stop:].lstrip().partition("\n")[0]
    for line in (above[-LINE:].strip(), below[:LINE].strip()):
        item = _ITEM.fullmatch(line)
        number = item["number"] if item is not None else None
        if item is None or (number is not None) != text[end - 1].isdigit() or (number or "").endswith("%"):
            continue
        apart = _kind_of_mark(item["lead"]) != _kind_of_mark(lead["lead"]) or ("(" in line) != ("(" in tail)
        introduces = line.startswith("```") or line.endswith("...") or _INTRODUCES.search(line) is not None
        introduces |= line.rstrip("*_ ").endswith(":") and ":" not in tail
        # At the end of a text, a few words above may be a sentence, or a step of the solution.
        if not apart and not introduces and (below or len(line[item.end("lead") :].split()) <= 2):
            return True
    return False


def _kind_of_mark(lead: str) -> str:
    """The kind of a list item's mark: `-`, `1` for any number, `a` for letters and words; empty if there is none."""
    first = lead.strip()[:1]
    return "1" if first.isdigit() else "a" if first.isalpha() else first


def _is_among_many(text: str, begin: int, end: int) -> bool:
    """Whether a name is surrounded by many names or numbers and nothing else: a list, however it is separated."""
    first, last = max(0, begin - NEAR), end + NEAR
    if _OF_SENTENCES.search(text, first, begin) or _OF_SENTENCES.search(text, end, last):
        return False
    words = [*text[first:begin].split()[first > 0 :], *text[end:last].split()[: -1 if last < len(text) else None]]
    begins = [word.lstrip(_BEFORE_NAMES)[:1] for word in words]
    return len(words) >= _MANY and all(letter.isupper() or letter.isdigit() or not letter for letter in begins)


def find_markers(text: str) -> list[re.Match[str]]:
    """Every `answer is` and `answer:`. Searching for letters first is faster than the pattern."""
    found = []
    for letters in ("nswer", "NSWER"):
        begin = text.find(letters, 1)
        while begin > 0:
            match = MARKER.match(text, begin - 1)
            if match and not text.endswith(WRONG, 0, begin - 1):
                found.append(match)
            begin = text.find(letters, begin + 5)
    return found if len(found) < 2 else sorted(found, key=lambda match: match.start())


DENIED = "denied or asked"
EMPTY = " \t\r\n*_`\"'“”‘’.:"
_DRESS = " \t*_`\"'“‘("
_LINKS = (",", "/", "|", ";", "&", "+", "and", "、", "as well as", "then", "plus")
_LEADS = frozenset(
    "yes so sure well thus hence therefore ok okay answer finally overall indeed then now of in to as".split()
)
"""Words that may precede a comma and a name without being a name themselves."""
_OPENING, CLOSING = r"[*_`\"'“‘(]*", r"[*_`\"'”’)]*"
_NAME = r"(?P<name>\w[\w'’-]*)(?: [\w'’-]+){0,2}"
MARKER = re.compile(
    r"(?:answer|option|choice)(?:\s(?:to|for|of)\s[^.\n:]{1,60}?)?[*_]*\s*"
    r"(?:(?:is|was|would be|should be|must be)\b|[:=])[*_]*:?",
    re.I,
)
WRONG = ("wrong ", "Wrong ", "incorrect ", "Incorrect ")
"""After these, `answer is` and `option is` do not give the answer."""
_ENDS = re.compile(r"[.!?;](?=\s)|\n")
SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")
_SENTENCE = re.compile(r"(?<=\w\w\w)(?<!\bMrs)[*_\"'”’)]*[.!?][*_\"'”’)]*\s+(?=[A-Z])|\n")
_OPENS = re.compile(
    r"\b(?:or|nor|either|neither|maybe|perhaps|possibly|vs|versus|alternatively|unsure|uncertain|not certain)\b", re.I
)
_DENIES = re.compile(
    r"(?:\b(?:not|never|cannot|isnt|except|unlike|without(?! (?:a |any )?doubt)|rather than|instead of|anything but"
    r"|(?:wrong|incorrect) (?:answer|option|choice)s? (?:is|are))|n['’]t|≠|!=)[^\w,;:]+(?:\w+[^\w,;:]+){0,3}$"
    r"|\b(?:rules? out|ruled out|eliminated?|excluded?)[^\w,;:]+$|\bI (?:really |strongly )?doubt\b[^,;:]*$",
    re.I,
)
_WRONG_WORD = r"(?:wrong|incorrect|false|ruled out|eliminated)\b"
_ADVERB = r"[*_]*(?:(?:clearly|definitely|obviously|certainly|simply|also|both|all|thus|therefore|a|the)\s)?[*_]*"
DENIAL = (
    r"(?:❌|:\s*(?:wrong|incorrect)\b|(?:does|do)(?: not|n['’]t)\s(?:fit|work|match)\b"
    rf"|(?:is|was|would be|must be|seems|seems to be|looks|are|were)\s{_ADVERB}{_WRONG_WORD}"
    r"|(?:is|was|are|were)(?:\s[*_]*not[*_]*|n['’]t)\s(?:right|correct|true|it|valid|possible|the|a|an)\b"
    r"|(?:cannot|can['’]?t|could(?: not|n['’]t))\s(?:be (?:right|correct|true|it|the)\b|fit\b)"
    r"|can be (?:ruled out|eliminated|excluded)\b)"
)
"""Follows a name to say that it is not the answer."""
_REFUSES = re.compile(rf"\]?{CLOSING},?\s*(?:\?|(?:is|was|are|were)(?:n['’]t\b|\s[*_]*(?:not|never)\b)|{DENIAL})", re.I)
_TAKES_BACK = re.compile(
    r"[.!?;,\n—-][ *_]{0,3}(?:no|wait|actually|sorry|correction|scratch that|i mean|on second thought)\b", re.I
)
_NEXT = re.compile(
    rf"{CLOSING}\s*(?:[,/|;&+、→]|\b(?:and|plus|as well as)\b)\s*(?:(?:and|then)\s)?"
    rf"(?!\S+(?: \S+)? (?:is|was|are|has)\b){_OPENING}{_NAME}{CLOSING}\s*(?:[,/|;&+.!、→\]]|$|\n|\band\b)"
)
_PREVIOUS = re.compile(
    rf"(?:^|[,/|;&+:.!]|\b(?:is|are|be)\b)\s*{_OPENING}{_NAME}{CLOSING}\s*"
    rf"(?:[,/|;&+、]|,?\s\b(?:and|then|plus|as well as)\b)\s*{_OPENING}$"
)
_NUMBER = re.compile(r"[-−]?\d[\d.,]*")
_ENDS_LIST = re.compile(rf"{CLOSING}\s*(?:[.,;!/|]|$|\n)")
_ITEM_WORDS = ("guess", "option", "candidate")
_ITEM_BEGINS = tuple(word[:2] for word in _ITEM_WORDS)
_LEAD = rf"(?P<lead>(?:[-*•>|#\s]|\d{{1,3}}[.):]|[A-Za-z][.)]\s|(?:{'|'.join(_ITEM_WORDS)})\s?\d*\s?[:.)])*)"
_TAIL = r"[*_`\"'”’)\]]*(?:\s?\([^()]{0,30}\))?[\s|.,;:*_]*"
_ITEM_LEAD = re.compile(rf"{_LEAD}[\s*_`\"'“”‘’(\[$€£]*", re.I)
_ITEM_TAIL = re.compile(_TAIL)
_ITEM = re.compile(
    rf"{_LEAD}[*_`\"'“‘(\[]*(?:[^\W\d_][\w'’-]*(?: [\w'’-]+){{0,3}}|(?P<number>[-−+$€£]{{0,2}}\d[\d.,]*%?)){_TAIL}",
    re.I,
)
_INTRODUCES = re.compile(r"\b(?:answer|conclusion|result|solution)\b", re.I)
_OF_SENTENCES = re.compile(r"(?<!\S)[a-z]|=|:(?!\S)")
"""Occurs in sentences but not in lists of names: lower-case words, formulas, headings."""
_BEFORE_NAMES = "\"'“”‘’()[]{}*_`-•–—.,;|/&+>#"
_MANY = 8
"""The number of surrounding names that makes a list rather than a sentence."""
