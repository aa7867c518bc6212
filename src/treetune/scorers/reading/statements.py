r"""Finds what a reply states as its answer, before anything is known about the kind of answer.

    explicit_statements("So \\boxed{5}.")           # [Statement("\\boxed{}", "5")]
    explicit_statements("The answer is Paris.")     # [Statement("the answer is", "Paris.")]
    last_statements("Add them.\nThat makes 5.")     # Statement("the last statement", "That makes 5."), ...

No text makes a function here raise, or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from treetune.scorers.reading import words

HEAD, TAIL = 400, 1000
"""How many characters at the beginning and at the end of a reply may have a sentence with the word `answer`."""
LONGEST = 600
"""The maximum number of characters of a line that are read."""
SHORT = 60
"""The maximum number of characters of a reply that is one statement as a whole."""
TRIED = 3
"""How many sentences at the end of a reply are tried as its last statement."""


class Statement(NamedTuple):
    form: str
    text: str
    begin: int = 0
    """Where in the reply it begins, or earlier."""


class Extraction(msgspec.Struct, frozen=True):
    text: str | None
    """The answer as written; None if there is none, or no single one."""
    why: str = ""
    """Why there is no answer."""
    value: Any = None
    """What the answer means; values are compared."""
    form: str = ""
    """Where the answer was found."""
    begin: int = 0
    """Where in the reply its statement begins, or earlier."""


LAST, WHOLE, ITEM, VERDICT = "the last statement", "the whole reply", "a list item", "a verdict"
FIRST, BOLD = ALONE = ("the first line", "the bold words")
"""Forms that must be an answer as a whole."""
PROSE = (LAST, WHOLE)
SENTENCES = frozenset(
    (*PROSE, *ALONE, ITEM, VERDICT, "the answer is", "is the answer", "last line", "first line", "reply")
)
"""Forms that are sentences. In all others, `5!` is a factorial, and there are no words around the answer."""
SEVERAL, DENIED = "several different answers", "the answer is denied"


# Cleaning


def strip_thinking(text: str) -> str:
    """Remove the thinking from a reply: keep what follows the last `</think>`, up to an unclosed `<think>`."""
    if "<" in text:
        for tag in ("think>", "thinking>", "thought>", "reasoning>"):
            if tag in text:
                text = text.rpartition(f"</{tag}")[2].partition(f"<{tag}")[0]
    return text


def clean(reply: str) -> str:
    """Remove everything that readers ignore: thinking, zero-width characters, LaTeX phantoms, comments, the addresses
    of links, and HTML tags around words."""
    text = reply if reply.isascii() else words.usual(reply.translate(_INVISIBLE))
    if "<" in text:
        text = _MARKUP.sub("", strip_thinking(text))
    if "\\" in text and "phantom" in text:
        text = _PHANTOM.sub("", text)
    return _LINKED.sub("", text) if "](" in text else text


# The forms


def tagged(text: str, tag: str) -> Iterator[str]:
    """The texts between each `<tag>` and the next `</tag>`. A regular expression would be quadratic in open tags."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    begin = text.find(opening)
    while begin >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
        yield text[begin + len(opening) : end].strip()
        begin = text.find(opening, end + len(closing))


def boxed(text: str) -> list[str]:
    r"""The contents of each `\boxed{...}`, with balanced braces; of nested boxes, the inner ones. A placeholder, such
    as `?`, is left out."""
    pieces = text.split(_BOX)[1:]
    inside = [piece[:end].strip() for piece in pieces if (end := closing_brace(piece, 0)) is not None]
    return [said for said in inside if said and not _PLACEHOLDER.fullmatch(said)]


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def after(text: str, mark: str) -> list[str]:
    """The text after each mark: the rest of its line or, if that is empty, the next nonempty line."""
    return [piece.lstrip().partition("\n")[0].strip() for piece in text.split(mark)[1:]] if mark in text else []


def after_hashes(text: str) -> list[str]:
    """The text after each `####`, without headings that Markdown writes in the same way."""
    given = after(_HASHES.sub("####", text) if "#####" in text else text, "####")
    return [said for said in given if said and not _HEADING.match(said)]


class Block(NamedTuple):
    language: str
    body: str


def fenced(text: str) -> list[Block]:
    """The blocks of code, in ``` or ~~~, that are closed."""
    marks = [place for mark in ("```", "~~~") if (place := text.find(mark)) >= 0]
    if not marks:
        return []
    blocks, mark, language, body = [], "", "", list[str]()
    for line in text[text.rfind("\n", 0, min(marks)) + 1 :].split("\n"):
        bare = line.strip()
        if not mark:
            opening = _OPENING.match(bare)
            if opening is None:
                continue
            mark, rest = opening[1], bare[opening.end() :]
            inside, closed, _ = rest.partition(mark)
            first, _, code = inside.strip().partition(" ")
            if closed:  # the whole block is on one line
                blocks.append(Block("", inside) if not code else Block(first.lower(), code))
                mark = ""
            language, body = first.lower(), []
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            blocks.append(Block(language, "\n".join(body)))
            mark = ""
        else:
            body.append(line)
    return blocks


# The statements of a reply


def explicit_statements(text: str) -> list[Statement]:
    """Everything that a reply states as its answer, in the strongest form first."""
    found = []
    if "{" in text and '"' in text:
        begin, end = text.find("{"), text.rfind("}") + 1
        if (fields := _answer_fields(text[begin:end])) is not None:
            found, text = fields, f"{text[:begin]}{text[end:]}"
    if "\\" in text:
        found += [Statement("\\boxed{}", said, text.rfind(_BOX)) for said in boxed(text)]
    if "<" in text:
        found += [Statement("<answer>", said, text.rfind("<answer>")) for said in tagged(text, "answer") if said]
    if "#" in text:
        found += [Statement("####", said, text.rfind("####")) for said in after_hashes(text)]
    return found + _after_words(text, places) if (places := _places(text)) else found


def _answer_fields(text: str) -> list[Statement] | None:
    """The fields of a JSON object that give an answer; None if there is none, or the text is no object."""
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    given = [item for key, item in value.items() if key.casefold().replace("_", " ") in _FIELDS]
    said = [str(one).strip() for item in given for one in (item if isinstance(item, list) else [item])]
    return [Statement("answer:", text) for text in said if text] or None


def _places(text: str) -> list[int]:
    """The places of a word for `answer`, near the beginning and the end of a text."""
    between = len(text) - HEAD - TAIL
    near = text if between <= 0 else f"{text[:HEAD]}{chr(0) * between}{text[-TAIL:]}"
    return find_words(_ANSWER, near)


def find_words(phrases: words.Phrases, text: str) -> list[int]:
    """The places of words in a text, in any case."""
    low = text.replace("İ", "I").lower()  # the only letter that becomes two in lower case
    return sorted([match.start() for word in phrases.found_in(low) for match in re.finditer(word, low)])


def _after_words(text: str, places: list[int]) -> list[Statement]:
    """What follows each `Answer:`, and the sentences with `the answer is 5` or `5 is the answer`."""
    labelled: list[Statement] = []
    sentences: list[Statement] = []
    for place in places:
        ahead = text[max(0, place - 80) : place]
        match = None if _is_other_answer(ahead) else _MARK.match(text, place)
        if match is None:
            continue
        if match.lastgroup == "back":
            if reverse := _BEFORE.search(ahead):
                sentences.append(Statement("is the answer", reverse[1], place))
            continue
        if labelled and _WORDS_BETWEEN.fullmatch(text, labelled[-1].begin, place):
            labelled.pop()  # "Final answer: The final answer is 5."
        said = _said_at(text, match.end())
        if said:
            if match.lastgroup is not None:
                labelled.append(Statement("answer:", said, match.end()))
            else:
                sentences.append(Statement("the answer is", said, match.end()))
    return labelled + sentences


def _is_other_answer(ahead: str) -> bool:
    """Whether the words before `answer` mean another answer: `no answer`, `the wrong answer`, `if the answer`."""
    *before, last = ["", *words.words_of(ahead[-30:])[-3:]]
    if last in _OTHER or not (last in _IF or _IF.isdisjoint(before)):
        return not ahead.rstrip(" *_").endswith((".", ",", ";", ":", "\n", "!")) or ahead.endswith(_OTHER_ASIAN)
    return ahead.endswith(_OTHER_ASIAN)


def _said_at(text: str, begin: int) -> str:
    """The sentence that begins at a place, or the next line that is not empty."""
    for line in text[begin : begin + LONGEST].split("\n"):
        line = (_ANSWER_TAG.sub("", line) if "<" in line else line).strip()
        if line.strip(_DRESS) and not _FENCE.fullmatch(line):
            return line[: sentence_end(line)].strip()
    return ""


def sentence_end(line: str, begin: int = 0) -> int:
    """Where the sentence ends that begins at a place of a line, or before it."""
    for stop in _STOP.finditer(line, begin):
        if not _is_abbreviation(line, stop):
            return stop.end()
    return len(line)


def sentence_begin(line: str, end: int) -> int:
    """Where the sentence begins that ends at a place of a line, or behind it."""
    find, place = line.rfind, end - 1
    while place > 0:
        place = max(find(".", 0, place), find("!", 0, place), find("?", 0, place))
        if place < 0:
            break
        stop = _STOP.match(line, place)
        if stop is not None and stop.end() < end and not _is_abbreviation(line, stop):
            return stop.end()
    return 0


def _is_abbreviation(line: str, stop: re.Match[str]) -> bool:
    """Whether a full stop belongs to an initial or an abbreviation, and so does not end a sentence."""
    place = stop.start()
    return line[place] == "." and _ABBREVIATION.search(line[max(0, place - 6) : place + 1]) is not None


def alone_statements(text: str) -> list[Statement]:
    """An answer by itself in the first line, above an explanation, or in the only bold words."""
    found = []
    first, _, rest = text.partition("\n")
    if 0 < len(first) <= SHORT and len(rest) > len(first) and not is_title(first):
        found.append(Statement(FIRST, first))
    if "*" not in text or "**" not in text:
        return found
    before, *pieces = text.split("**")
    bold = {said.strip() for said in pieces[::2] if not is_title(said.strip())}
    if len(pieces) % 2 == 0 and len(bold) == 1:
        around = before.rpartition("\n")[2], pieces[1].partition("\n")[0]
        if not (words.denied(around[0]) or words.refused(around[1]) or words.hedged(" ".join(around))):
            found.append(Statement(BOLD, bold.pop(), len(before)))
    return found


def is_title(line: str) -> bool:
    """Whether a line only announces what follows."""
    return line.endswith((":", "?", "...", "…")) or "\n" in line or _HEADING.match(line) is not None


def last_statements(text: str) -> Iterator[Statement]:
    """The sentences of a reply from its end, without polite remarks. A reply of a few words is one statement."""
    if len(text) <= SHORT and "\n" not in text and sentence_begin(text, len(text)) == 0:
        if text and not words.polite(text):
            yield Statement(WHOLE, text.removeprefix("=>").lstrip())
        return
    count = 0
    for line in reversed(text[-2 * LONGEST :].split("\n")):
        line, form = line.strip(), LAST
        if not line[:1].isalpha() and (bullet := _BULLET.match(line)):
            line, form = line[bullet.end() :], ITEM
        end = len(line)
        while end > 0:
            begin = sentence_begin(line, end)
            sentence, end = line[begin:end].strip(), begin
            if words.polite(sentence) or (not sentence[:1].isalnum() and _NO_STATEMENT.fullmatch(sentence)):
                continue
            yield Statement(form, sentence, text.rfind(sentence))
            count += 1
            if count == TRIED:
                return


_BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")
_PLACEHOLDER = re.compile(r"(?:\\(?:[,;:! ]|q?quad|square|[cl]?dots)|[?_.…\s~])+")
_PHANTOM = re.compile(r"\\[hv]?phantom\{[^{}]*\}")
_MARKUP = re.compile(
    r"<!--(?:(?!-->).)*(?:-->|$)|<<[^<>\n]{1,80}>>|</?(?:b|i|u|em|strong|span|mark|p|br|div|center|font)(?:\s[^<>]{0,80})?/?>",
    re.S,
)
_LINKED = re.compile(r"(?<=\])\(https?://[^\s()]*\)")
_INVISIBLE = dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), 0xFEFF, *map(ord, "✅✔☑👉🎉"))
)
_INVISIBLE |= dict.fromkeys((0x202F, 0x2009), " ")
_HASHES = re.compile("#{4,}")
_HEADING = re.compile(
    rf"(?:\d+[.):]\s+\S|[*_]*(?:{words.either('steps')})\b|[^\n]{{0,60}}:[*_]*$|[*_#\s]*(?:{words.either('titles')})[*_:\s]*$)",
    re.I,
)
_ANSWER = words.Phrases(
    tuple("answer antwort respuesta resposta risposta tl;dr réponse ответ 答案 正解 正确选项 答え 答:".split())
)
_IS = rf"(?:{words.either('is')})(?![\w'])|应该是|应为|就是|是|为|為|は"
_MARK = re.compile(
    r"(?<![A-Za-zÀ-ÿа-я/])(?:answers?|tl;dr|antwort|réponse|respuesta|resposta|risposta|ответ|答案|答え|正解|正确选项"
    r"|答)(?![^\W\d_答案是为為はがの应就])"
    r"(?:\s(?:choice|option|key|here|then|therefore|thus|final[e]?|correcta|in this case|(?:to|for|of|in|zu|auf"
    r"|à|de|a|al)\s[^\n.:=?!]{1,60}?|\([^()\n]{1,40}\)))?"
    rf"(?:(?P<label>[*_\s`#\"']{{0,6}}(?:[:=→]|[–—-](?=\s)))|[*_\s]{{0,4}}(?:{_IS})\s{{0,2}}:?"
    rf"|(?P<head>[*_#\s]{{0,4}}(?=\n))"
    r"|(?P<back>))",
    re.I,
)
_WORDS_BETWEEN = re.compile(r"[\s*_#]*(?:(?:the|my|our|final|correct|so|thus|is)[\s*_]+){0,5}", re.I)
_BEFORE = re.compile(
    r"(?:^|[.!?,:;\n]|\b(?:so|thus|therefore|hence)\s)\s*((?:(?![.!?,:;\n]\s|\n).){1,60}?)\s+"
    r"(?:is|must be|has to be|ist|est|es|é|è)\s+[*_]*(?:the|my|our|die|la|a)\s+(?:[\w*]+\s+){0,2}[*_]*$",
    re.I,
)
_OTHER, _IF, _FIELDS = (frozenset(words.listed(words.LISTS[name])) for name in ("other_answer", "if", "fields"))
_OTHER_ASIAN = ("错误", "错", "不是", "错误的", "错的")
_ANSWER_TAG = re.compile("</?answer>")
_STOP = re.compile(r"[.!?][*_\"')\]`]*(?=\s)")
_ABBREVIATION = re.compile(
    r"(?:^|[\s.({\"'*_])(?:[A-Z]|St|Dr|Mr|Mrs|Ms|Prof|Jr|Sr|Mt|Ft|vs|approx|ca|bzw|No|i\.e|e\.g)\.$"
)
_DRESS = " \t\r*_`\"'$#>|-=~:.,\\[]{}()!"
_OPENING = re.compile(r"(`{3,}|~{3,})")
_FENCE = re.compile(r"(?:```|~~~)\s*\w*")
_NO_STATEMENT = re.compile(rf"[*_]*\([^)]{{30,}}\)[*_.]*|(?:```|~~~)\s*\w*|[\s{re.escape(_DRESS)}]*")
_BULLET = re.compile(r"(?:[-*•>|]\s+|\d{1,3}[.)]\s+)+")
