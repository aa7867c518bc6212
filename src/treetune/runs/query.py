"""Queries over the rollouts of a run.

    mask = Query('reward<0.5 & source=gsm8k "therefore"').select(columns, folder)

    reward<0.5            numbers: reward, turns, tokens, prompt_tokens, seconds, policy and environment (seconds of
                          each), retries, agent_calls, task, rollout, step, any metric
    source=gsm8k          texts: source, outcome, failure, answer, uid, mark; `~` for a part of one: failure~timeout
    failed  scored  solved  truncated  mixed  all0  all1  allfailed
    "therefore"           a text in its messages, ignoring case
    a & b   a b           both;  a | b  either;  !a  not;  ( ) group;  AND, OR, NOT are the same
    17/3                  task 17, rollout 3

Adjacent words must all match.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treetune.errors import UsageError, did_you_mean, truncate
from treetune.runs.columns import NOTES, NUMBERS, TEXTS, Columns, Mask

_TOKENS = re.compile(
    r"""\s*(?:
        (?P<mark>[()&|!])
      | "(?P<text>(?:[^"\\]|\\.)*)"
      | (?P<name>[A-Za-z_][\w.@/-]*)\s*(?P<sign><=|>=|!=|==?|<|>|~)\s*
          (?:"(?P<quoted>(?:[^"\\]|\\.)*)" | (?P<value>[^\s()&|]+))
      | (?P<word>[^\s()&|!"]+)
    )""",
    re.VERBOSE,
)
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_MARKS = {"AND": "&", "OR": "|", "NOT": "!"}
"""Words in capitals that are operators; in quotation marks they are words."""
_CUT_SHORT = re.compile(r"[A-Za-z_][\w.@/-]*(?:<=|>=|!=|==?|<|>|~)")
_ROLLOUT = re.compile(r"(\d+)/(\d+)")

_DEEPEST = 100
_WORDS_OF_OURS = (b'"role":', b'"type":', b'"finish_reason":', b'"outcome":')
"""Fields whose texts belong to the format, not to a message."""
_LONGEST = 32
"""The maximum size of such texts in bytes."""
_TOOLS, _AFTER_TOOLS = b'],"tools":[', b'],"final":['

Test = Callable[[Columns, Mask], Mask]
"""Returns the rollouts that it selects; it may skip those outside of the mask."""


def _word_failed(columns: Columns) -> Mask:
    return np.isnan(columns.reward)


def solved(columns: Columns, threshold: float = 1.0) -> Mask:
    """Returns which rollouts are solved: by the environment's `success`, otherwise by a reward that reaches the
    threshold; failed ones never are."""
    success = columns.numbers("success")
    said: Mask = np.where(np.isnan(success), columns.reward >= threshold, success == 1)
    return said & ~np.isnan(columns.reward)


WORDS: dict[str, Callable[[Columns], Mask]] = {
    "failed": _word_failed,
    "scored": lambda columns: ~_word_failed(columns),
    "solved": solved,
    "truncated": lambda columns: _is_text(columns, "outcome", lambda text: text == "truncated"),
    "mixed": lambda columns: columns.groups().mixed[columns.groups().task],
    "all0": lambda columns: columns.groups().all_of(0.0)[columns.groups().task],
    "all1": lambda columns: columns.groups().all_of(1.0)[columns.groups().task],
    "allfailed": lambda columns: columns.groups().failed[columns.groups().task],
}
"""The meaning of the words in queries; `all...` and `mixed` refer to a rollout's group."""


def _is_text(columns: Columns, name: str, test: Callable[[str], bool]) -> Mask:
    fitting = np.array([*map(test, columns.texts(name)), False], bool)  # the last is for a missing text: code -1
    return fitting[columns.codes(name)]


class Query:
    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._traces: Path | None = None
        self._tokens = list(self._read(self.text))
        self._at = 0
        if sum(token["mark"] in ("(", "!") for token in self._tokens) > _DEEPEST:
            raise self._wrong(f"it has more than {_DEEPEST} ( and !")
        self._test = self._either() if self._tokens else None
        if self._at < len(self._tokens):
            raise self._wrong("a ) too many")

    def select(self, columns: Columns, traces: Path | None = None) -> Mask:
        """Returns which rollouts the query selects. `traces` is the file to search for words."""
        self._traces = traces
        everything = np.ones(len(columns), bool)
        return everything if self._test is None else self._test(columns, everything)

    # Parsing

    def _read(self, text: str) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(text):
            found = _TOKENS.match(text, at)
            if found is None or found.end() == at:
                raise self._wrong(f"cannot be parsed from {text[at : at + 20]!r} on")
            yield found
            at = found.end()

    def _wrong(self, problem: str) -> UsageError:
        words = ", ".join(WORDS)
        remedy = f'write for example: reward<0.5 & source=gsm8k "therefore"; words are {words}'
        return UsageError(f"the query {truncate(self.text, 200)!r}: {problem}", remedy=remedy)

    def _next(self) -> str | None:
        """The next operator; "" if a condition comes next."""
        if self._at >= len(self._tokens):
            return None
        token = self._tokens[self._at]
        return token["mark"] or _MARKS.get(token["word"] or "", "")

    def _either(self) -> Test:
        tests = [self._all()]
        while self._next() == "|":
            self._at += 1
            tests.append(self._all())
        if len(tests) == 1:
            return tests[0]

        def either(columns: Columns, within: Mask) -> Mask:
            found = np.zeros(len(columns), bool)
            for test in tests:
                found |= test(columns, within & ~found)
            return found

        return _read_by(either, tests)

    def _all(self) -> Test:
        tests = [self._one()]
        while (mark := self._next()) is not None and mark not in ("|", ")"):
            if mark == "&":
                self._at += 1
            tests.append(self._one())
        # Words are searched last, in the rollouts that are left, because that reads the file.
        tests.sort(key=_reads)

        def both(columns: Columns, within: Mask) -> Mask:
            for test in tests:
                within = within & test(columns, within)
            return within

        return _read_by(both, tests)

    def _one(self) -> Test:
        if (mark := self._next()) is None:
            raise self._wrong("something is missing at its end")
        token = self._tokens[self._at]
        self._at += 1
        if mark == "!":
            negated = self._one()
            return _read_by(lambda columns, within: within & ~negated(columns, within), [negated])
        if mark == "(":
            inner = self._either()
            if self._next() != ")":
                raise self._wrong("a ( is not closed")
            self._at += 1
            return inner
        if mark:
            raise self._wrong(f"something is missing before {mark}")
        if token["name"] is not None:
            value = token["value"] if token["quoted"] is None else _unquote(token["quoted"])
            return self._comparison(token["name"], token["sign"], value)
        if token["word"] is not None and token["word"] in WORDS:
            word = WORDS[token["word"]]
            return lambda columns, within: word(columns)
        if token["text"] is not None:
            return _Words(self, _unquote(token["text"]))
        return self._bare_word(token["word"])

    def _bare_word(self, word: str) -> Test:
        """A word to search for, unless it looks like something else. In quotation marks it is always a word."""
        if (named := _ROLLOUT.fullmatch(word)) is not None:
            task, rollout = (self._comparison(name, "=", named[at]) for at, name in ((1, "task"), (2, "rollout")))
            return lambda columns, within: task(columns, within) & rollout(columns, within)
        if _CUT_SHORT.fullmatch(word):
            raise self._wrong(f"a value is missing after {word}")
        name, colon, value = word.partition(":")
        if colon and (name in NUMBERS or name in TEXTS or name in NOTES):
            raise self._wrong(f"write {name}={value or 'VALUE'} instead of {word}")
        return _Words(self, word)

    def _comparison(self, name: str, sign: str, value: str) -> Test:
        if name in TEXTS or name in NOTES:
            return self._text_comparison(name, sign, value)
        try:
            wanted = {"true": 1.0, "false": 0.0, "none": float("nan")}.get(value.lower())
            wanted = float(value) if wanted is None else wanted
        except ValueError:
            known = f"{', '.join([*TEXTS, *NOTES])} are texts; {name} is not"
            raise self._wrong(f"{known}, and a number cannot be compared with {value!r}") from None
        if sign == "~":
            raise self._wrong(f"~ searches for a part of a text, but {name} is a number")

        def compare(columns: Columns, within: Mask) -> Mask:
            if name not in NUMBERS and name not in columns.metrics:
                known = [*NUMBERS, *TEXTS, *columns.metrics]
                raise self._wrong(f"there is no {name!r}{did_you_mean(name, known)}; available: {', '.join(known)}")
            numbers = columns.numbers(name)
            if np.isnan(wanted):
                return np.isnan(numbers) if sign != "!=" else ~np.isnan(numbers)
            with np.errstate(invalid="ignore"):
                found: Mask = _SIGNS[sign](numbers, wanted) & ~np.isnan(numbers)
            return found

        return compare

    def _text_comparison(self, name: str, sign: str, value: str) -> Test:
        lower = value.lower()
        if sign == "~":
            return lambda columns, within: _is_text(columns, name, lambda text: lower in text.lower())
        if sign == "!=":
            return lambda columns, within: ~_is_text(columns, name, value.__eq__)
        if sign not in ("=", "=="):
            raise self._wrong(f"{name} is a text: compare it with =, != or ~")

        def is_value(columns: Columns, within: Mask) -> Mask:
            known = columns.texts(name) if name in ("source", "outcome") else []
            if known and value not in known and (meant := did_you_mean(value, known)):
                raise self._wrong(f"there is no {name} {value!r}{meant}")
            return _is_text(columns, name, lambda text: text.startswith(value) if name == "uid" else text == value)

        return is_value


def _reads(test: Test) -> bool:
    """Whether the test reads the traces, which takes longer than all others."""
    return getattr(test, "reads", False)


def _read_by(test: Test, parts: Sequence[Test]) -> Test:
    test.reads = any(map(_reads, parts))  # type: ignore[attr-defined]
    return test


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


class _Words:
    """Finds a text in the traces of a run, ignoring case. Lines are read without their tokens and searched as they are,
    without decoding. Names of fields, numbers, roles and descriptions of tools do not count."""

    reads = True

    def __init__(self, query: Query, text: str) -> None:
        self._query = query
        # Escaped as in a line of JSON; letters of other alphabets are not escaped.
        self._wanted = json.dumps(text.lower(), ensure_ascii=False)[1:-1].encode()

    def __call__(self, columns: Columns, within: Mask) -> Mask:
        found = np.zeros(len(columns), bool)
        if self._query._traces is None:
            return found
        rows = np.flatnonzero(within)
        places = columns.places("offset")[rows].tolist()
        lengths = columns.places("text_length")[rows].tolist()
        is_plain = self._wanted.isascii()
        with open(self._query._traces, "rb", buffering=0) as file:
            number = file.fileno()
            for row, offset, length in zip(rows.tolist(), places, lengths, strict=True):
                line = os.pread(number, length, offset)
                if self._is_said(line.lower() if is_plain else line.decode(errors="replace").lower().encode()):
                    found[row] = True
        return found

    def _is_said(self, line: bytes) -> bool:
        wanted, start = self._wanted, 0
        while (at := line.find(wanted, start)) >= 0:
            start = at + len(wanted)
            if not _is_said_text(line, at, start):
                continue
            tools = line.find(_TOOLS)
            after = line.find(_AFTER_TOOLS, tools)
            if not tools < at < after:
                return True
            start = after
        return False


def _is_said_text(line: bytes, start: int, stop: int) -> bool:
    """Whether this part of a line is inside a text. The next quote after a text ends it, and a comma or a closing
    bracket follows. After a number, the next quote begins another text; after a name, a colon follows the quote."""
    quote = line.find(b'"', stop)
    while quote > 0 and _is_escaped(line, quote):
        quote = line.find(b'"', quote + 1)
    if quote < 0 or line[quote + 1 : quote + 2] not in (b",", b"}", b"]"):
        return False
    begin = line.rfind(b'"', max(0, start - _LONGEST), start + 1)
    return begin < 0 or not line.endswith(_WORDS_OF_OURS, 0, begin)


def _is_escaped(line: bytes, quote: int) -> bool:
    at = quote
    while line[at - 1] == 0x5C:
        at -= 1
    return (quote - at) % 2 == 1
