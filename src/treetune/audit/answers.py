"""How answers to a task are written: what is the same around every gold answer, and what is the answer in it.

    format = AnswerFormat.of("#### 72", "72")        # AnswerFormat(before="#### ", after="")
    format.write("5")                                # "#### 5"

A floor policy writes what it likes in the format of the gold answers, or else it would only be told that nothing was
found in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?![\w])")
_OPTION = re.compile(r"^\s*[(\[]?([A-Ha-h]|\d)[).\]:]\s+(\S.*)$", re.M)
_WORDY_END = re.compile(r"\w+$")
_WORDY_BEGIN = re.compile(r"^\w+")


class AnswerFormat(msgspec.Struct, frozen=True):
    before: str = ""
    after: str = ""

    def write(self, content: str) -> str:
        return f"{self.before}{content}{self.after}"

    def read(self, answer: str) -> str | None:
        """What stands in the format; None where the answer is not written in it."""
        if len(answer) < len(self.before) + len(self.after):
            return None
        if not (answer.startswith(self.before) and answer.endswith(self.after)):
            return None
        return answer[len(self.before) : len(answer) - len(self.after)]

    @classmethod
    def of(cls, gold: str, truth: Any) -> AnswerFormat | None:
        """From a gold answer that holds the ground truth. Of what stands before it, only the line: the rest may be a
        worked solution, which is no format."""
        texts = sorted((text for text in texts_of(truth) if text and text in gold), key=len)
        if not texts:
            return None
        before, _, after = gold.rpartition(texts[-1])
        return cls(before.rpartition("\n")[2], after.partition("\n")[0])

    @classmethod
    def shared(cls, golds: Sequence[str]) -> AnswerFormat:
        """What all gold answers begin and end with, but for words that are cut in two."""
        if len(set(golds)) < 2:
            return cls()
        before = _common_beginning(golds)
        rest = [gold[len(before) :] for gold in golds]
        after = _common_beginning([text[::-1] for text in rest])[::-1]
        if any(text[:1].isalnum() for text in rest):
            before = _WORDY_END.sub("", before)
        if any(text[: len(text) - len(after)][-1:].isalnum() for text in rest):
            after = _WORDY_BEGIN.sub("", after)
        return cls(before, after)


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[
        : next((place for place, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), None)
    ]


def texts_of(truth: Any) -> list[str]:
    """The texts and numbers of a ground truth, as an answer may have them."""
    if isinstance(truth, dict | list | tuple):
        return [text for item in (truth.values() if isinstance(truth, dict) else truth) for text in texts_of(item)]
    if isinstance(truth, float) and truth.is_integer():
        return [str(int(truth)), str(truth)]
    return [str(truth)] if isinstance(truth, str | int | float) and not isinstance(truth, bool) else []


def numbers_in(text: str) -> list[str]:
    """The different numbers of a text, without thousands separators and currency."""
    return list(dict.fromkeys(found.replace(",", "").replace("$", "") for found in NUMBER.findall(text)))


def options_in(text: str) -> list[str]:
    """The marks of the choices that a prompt lists one a line: A, B, C. None where there are fewer than two."""
    marks = list(dict.fromkeys(mark for mark, _ in _OPTION.findall(text)))
    return marks if len(marks) >= 2 and (marks[0] in "Aa1" or marks[0] == "0") else []


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text.strip()) is not None
