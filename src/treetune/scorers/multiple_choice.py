"""The scorer for multiple choice, `choice`, and how it reads which option a statement chooses: by label, or by text.

reader = option_reader(Options(("A", "B"), ("London", "Paris")))
reader.read(Statement("the answer is", "(B) Paris"))            # Extraction("B")
reader.read(Statement("the last statement", "A is wrong."))     # Extraction(None, "the answer is denied")
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple, cast

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, TasksetError
from treetune.scorers.reading import statements
from treetune.scorers.reading.extraction import Mention, extract, settle
from treetune.scorers.reading.numerals import plain
from treetune.scorers.reading.statements import ALONE, TAIL, VERDICT, Extraction, Statement
from treetune.scorers.reading.wording import text_key
from treetune.scorers.reading.words import LISTS, Phrases, listed
from treetune.scorers.scorer import Scorer, judged, require_truths

_ANY_OF = "choice: a ground truth is a list of options, any of which is right; all: true if all must be chosen"
LETTERS = tuple(ascii_uppercase[:10])
"""The labels if the options are unknown."""


class Choice(Scorer, frozen=True, tag="choice"):
    choices: str | list[str] | dict[str, str] | None = None
    """The options: a list of texts, labelled A, B, ...; texts by label (`{"1": yes, "2": no}`); or the column (the key
    of `extra_info`) that holds them for each task. Absent: `extra_info.choices` if the task has it, else the letters
    only."""
    truth: Literal["label", "index", "text"] | None = None
    """What the ground truth is: a label, the index of the right option from 0, or its text. Absent: an integer is an
    index, and a text is a label or else an option's text."""

    all: bool = False
    """Whether the truth is a list of options, all of which must be chosen, and no others. If not, any of a list is
    right."""

    def __post_init__(self) -> None:
        if isinstance(self.choices, list | dict) and len(self.choices) < 2:
            raise ConfigError([("choices", "there must be at least two options")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the reply chooses the right option, by its label or its text."""
        options = self._options(task)
        right = self._labels_of(truth, options, task)
        reader = option_reader(options)
        if self.all:
            found = extract(answer, self.answer, partial(reader.read, several=True))
            return judged(found, found.value == frozenset(right), [", ".join(sorted(right))])
        if len(right) > 1:
            warnings.warn(_ANY_OF, stacklevel=1)  # Python shows it once
        found = extract(answer, self.answer, reader.read, verdicts=reader.verdicts)
        return judged(found, found.value in right, sorted(right))

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        right = self._labels_of(truth, self._options(task), task)
        return self.say(", ".join(sorted(right)) if self.all else right[0])

    def fault(self, truth: Any, task: Task | None) -> str | None:
        try:
            options = self._options(task)
            for one in require_truths(truth, task):
                self._labels_of(one, options, task)
        except TasksetError as error:
            return error.message
        return None

    def columns(self) -> list[str]:
        return [self.choices] if isinstance(self.choices, str) else []

    def _options(self, task: Task | None) -> Options:
        given: Any = self.choices
        if given is None or isinstance(given, str):
            given = None if task is None else task.extra_info.get(given or "choices")
            if given is None and self.choices is not None:
                raise TasksetError(f"there is no extra_info.{self.choices} with the options")
        if given is None:
            return _LETTERS_ALONE
        if not isinstance(given, list) and isinstance(given, Mapping):  # the Mapping check is slow
            if "label" in given and "text" in given:  # as in ARC
                return _make_options(tuple(map(str, given["label"])), tuple(map(str, given["text"])))
            return _make_options(tuple(map(str, given)), tuple(map(str, given.values())))
        if not isinstance(given, list | tuple) or not 0 < len(given) <= len(ascii_uppercase):
            raise TasksetError(f"the options are not a list of 1 to 26: {given!r:.80}")
        texts = tuple(given)
        return _make_options(None, texts if isinstance(texts[0], str) else tuple(map(str, texts)))

    def _labels_of(self, truth: Any, options: Options, task: Task | None) -> Sequence[str]:
        """The labels of the right options."""
        if isinstance(truth, str):
            if (label := _find_label(truth, False, self.truth, options)) is not None:
                return (label,)
            if self.all:  # "A, C" or "AC"
                truth = [one.strip() for one in truth.split(",")] if "," in truth else list(truth.strip())
        truths = require_truths(truth, task)
        labels = [_find_label(str(one), isinstance(one, int), self.truth, options) for one in truths]
        if None not in labels:
            return cast(list[str], labels)
        where = f"task {task.idx}: " if task is not None else ""
        known = ", ".join(options.texts or options.labels)
        problem = f"{where}the ground truth {truths[labels.index(None)]!r:.60} is not one of the options: {known:.200}"
        remedy = "name the column of the options (choices), and the form of the truth: truth: index counts from 0"
        raise TasksetError(problem, remedy=remedy)


@lru_cache(maxsize=4096)
def _make_options(labels: tuple[str, ...] | None, texts: tuple[str, ...]) -> Options:
    return Options(labels or tuple(ascii_uppercase[: len(texts)]), texts)


@lru_cache(maxsize=4096)
def _find_label(truth: str, is_whole: bool, kind: str | None, options: Options) -> str | None:
    labels, texts = options
    if kind == "index" or (kind is None and is_whole and truth not in labels):
        return labels[int(truth)] if truth.isdecimal() and int(truth) < len(texts or labels) else None
    if kind != "text":
        label = option_reader(Options(labels)).label_of(truth)
        if label is not None or kind == "label":
            return label
    folded = [text.strip().casefold() for text in texts]
    wanted = truth.strip().casefold()
    return labels[folded.index(wanted)] if wanted in folded else None


LONGEST = 10_000
"""The maximum number of characters of a statement that chooses an option."""


class Options(NamedTuple):
    labels: tuple[str, ...]
    texts: tuple[str, ...] = ()
    """The texts of the labels; empty if only the labels are known."""


_LETTERS_ALONE = Options(LETTERS)


class OptionReader:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._labels = {label.casefold(): label for label in options.labels}
        self._label_pattern = _label_pattern(tuple(self._labels.values()))
        lengths = [len(text) for text in options.texts] or [0]
        self._shortest, self._longest = min(lengths) // 2, 2 * max(lengths) + 30

    @cached_property
    def _texts(self) -> dict[str, str]:
        pairs = zip(self._options.texts, self._options.labels, strict=False)
        return {text_key(plain(text)) or text.strip(): label for text, label in pairs if text.strip()}

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """The texts to search for in a sentence, the longest first. A letter is not a name."""
        pairs = zip(self._options.texts, self._options.labels, strict=False)
        names = [(text.strip().rstrip(".").casefold(), label) for text, label in pairs]
        return sorted((pair for pair in names if len(pair[0]) > 1), key=lambda pair: -len(pair[0]))

    def label_of(self, text: str) -> str | None:
        """The option that a text consists of: a label such as `(B)` or `Option B`, a text, or a label and its text."""
        said = plain(text)
        if label := self._labels.get(said.casefold()):
            return label
        if len(said) > self._longest:
            return None
        head = _HEAD.match(said)
        if head and (label := self._labels.get(head[1].casefold())):
            rest = said[head.end() :].strip(_DRESS)
            if not rest or self._option_with(plain(rest)) == label:
                return label
            if said[head.end(1) :][:1] in (")", "]", ".", ":"):
                return None
        return self._option_with(said)

    def _option_with(self, text: str) -> str | None:
        known = self._options.texts and self._shortest <= len(text) <= self._longest
        return self._texts.get(text_key(text) or text) if known else None

    def read(self, statement: Statement, several: bool = False) -> Extraction | None:
        """The option that a statement chooses or, with `several`, the set of all of them: `A and C`, `AC`."""
        text = statement.text
        if label := self.label_of(text):
            return Extraction(label, value=frozenset((label,)) if several else label)
        if several and (said := plain(text)) and set(said) <= {*self._options.labels}:
            return Extraction(", ".join(sorted(set(said))), value=frozenset(said))
        if statement.form in ALONE or len(text) > LONGEST:
            return None
        return settle(text, self._mentions(text), agree=True, several=several)

    def verdicts(self, text: str) -> list[Statement]:
        """The sentences that choose without the word `answer`: `I'd go with C`, `That leaves B`, `B is correct`."""
        text = text[-TAIL:]
        found: dict[str, None] = {}
        end = 0
        for place in statements.find_words(_CHOOSING, text):
            if place >= end:
                begin = max(text.rfind("\n", 0, place) + 1, statements.sentence_begin(text, place + 1))
                said = text[begin : statements.sentence_end(text, place)].partition("\n")[0]
                end = begin + len(said)
                found[said.strip()] = None
        return [Statement(VERDICT, said) for said in found if not _IF.match(said)]

    def _mentions(self, text: str) -> list[Mention]:
        """Where a text names an option, by its label or its text."""
        found: list[Mention] = []
        low = text.casefold()
        for name, label in self._names:
            begin = low.find(name)
            while begin >= 0:
                end = begin + len(name)
                goes_on = _GOES_ON_NAME if name not in _SMALL else _GOES_ON_SMALL
                if not (_is_part(low, begin, end) or goes_on.match(text, end)) and not any(
                    one.begin < end and begin < one.end for one in found
                ):
                    found.append(Mention(begin, end, label, label))
                begin = low.find(name, end)
        for match in self._label_pattern.finditer(text):
            begin, end = match.span()
            label = match[0]
            if not any([one.begin <= begin < one.end for one in found]):
                ahead = text[max(0, begin - 20) : begin]
                in_list = bool(found) and _IN_LIST.fullmatch(text, found[-1].end, begin) is not None
                if _is_label(label, ahead, text[end : end + 20], in_list):
                    found.append(Mention(begin, end, label, label))
        return sorted(found)


@lru_cache(maxsize=256)
def _label_pattern(labels: tuple[str, ...]) -> re.Pattern[str]:
    """Finds labels of at most three letters and digits, as words."""
    known = [label for label in labels if label.isascii() and label.isalnum() and len(label) <= 3]
    if all(len(label) == 1 for label in known):  # faster: a set of characters first, then what is before it
        words = rf"[{''.join(known)}](?<![^\W_].)(?<!\w[-/.].)" if known else "(?!)"
    else:
        words = rf"(?<![^\W_])(?<!\w[-/.])(?:{'|'.join(known)})"
    return re.compile(rf"{words}(?![^\W_]|['/+#-]\w|[+#]|\.\d|\s?=)", re.ASCII)


option_reader = lru_cache(maxsize=4096)(OptionReader)


def _is_label(label: str, ahead: str, behind: str, in_list: bool) -> bool:
    """Whether a letter or number is a label: in brackets or bold, at the beginning of a sentence, after a word such as
    `option` or `is`, or in a list with another label."""
    if ahead.endswith(("(", "[", "**", "{")) and behind.startswith((")", "]", "**", "}", ".", ":")):
        return True
    if label in "AI" and _GOES_ON.match(behind):  # a word: `A city`, `I think`
        return False
    bare = ahead.rstrip(_QUOTES)
    word = _BETWEEN_WORDS.split(bare)[-1].lower()
    if label.isdigit() or behind.startswith("%"):
        return not bare or bare.endswith(":") or word in _BEFORE_NUMBER
    return not bare or in_list or word in _BEFORE_LABEL or bare.endswith(_BEFORE_LABEL_ASIAN)


def _is_part(text: str, begin: int, end: int) -> bool:
    """Whether a name in a text is a part of a word or a number."""
    before, after = text[begin - 1 : begin], text[end : end + 1]
    if (before.isalnum() and text[begin].isalnum()) or (after.isalnum() and text[end - 1].isalnum()):
        return text[begin].isascii() and before < "\u2e80" and after < "\u2e80"
    number = text[begin].isdigit() and bool(before) and before in "-./"
    return number or (text[end - 1].isdigit() and after in ".," and text[end + 1 : end + 2].isdigit())


_DRESS = " \t*_`\"'.,:;)(]["
_QUOTES = " \t*_`\"'([{:$>#"
_SMALL = frozenset("the an is it no not or and of in to".split())
_GOES_ON_NAME, _GOES_ON_SMALL = re.compile(" [A-Z][a-z]"), re.compile(r"\s\w")
_BETWEEN_WORDS = re.compile(r"\s|(?<!t)'")
_HEAD = re.compile(
    r"[\s*_`\"'$>#-]*(?:(?:option|choice|answer|letter|antwort|réponse|opción|the|la|el|die|le|选项|选)\b[\s*_:]*|选项?)*"
    r"(?:[(\[]|\\text\{)?"
    r"[*_\"']*([A-Za-z0-9]{1,3})(?![A-Za-z0-9'/+#])[*_\"']*[)\]}]?[*_]*",
    re.I,
)
_BEFORE_LABEL, _BEFORE_NUMBER = (frozenset(listed(LISTS["options"][key])) for key in ("before_label", "before_number"))
_GOES_ON = re.compile(rf"\s\d|\s(?!(?:{'|'.join(listed(LISTS['options']['after_label']))})\b)[a-z]|\s?[-/]")
_BEFORE_LABEL_ASIAN = tuple("选 是 为 項 项 は 选择 : . ! ? , — – →".split())
_IN_LIST = re.compile(
    r"[\s)\]*_\"']{0,4}(?:,|/|&|\||\+|;|\band\b|\bor\b|\bund\b|\bet\b|\by\b|和|或|\s)\s?[\s(\[*_\"']{0,4}"
)
_IF = re.compile(r"(?:if|whether|why|suppose|wenn|falls|si|если|如果)\b", re.I)
_CHOOSING = Phrases(listed(LISTS["options"]["choosing"]))
