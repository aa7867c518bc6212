r"""The scorer for mathematics: `math`. An answer is right if it means what the truth says: `\frac12` is `0.5`."""

from __future__ import annotations

import re
from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers import Scorer
from treetune.scorers.reading.answers import (
    Found,
    boxed,
    names_one,
    one_of,
    placed,
    plain,
    read_number,
    read_truth,
    same,
    statement,
    strip_thinking,
)
from treetune.scorers.reading.answers import after as pieces_after
from treetune.scorers.scorer import expected, require_truths
from treetune.tasksets.math_verifier import compare, is_single, require_math_verify

LONGEST = 300
"""The maximum length of an answer. In a longer reply without `####`, a box or `answer is`, the last line counts."""
_FORMULA = re.compile(r"(?<!\\)\$+([^$]+?)(?<!\\)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


class Math(Scorer, frozen=True, tag="math"):
    def check(self) -> None:
        require_math_verify()

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Score whether the answer in a reply means what the ground truth says. It waits for another process."""
        truths = [str(one) for one in require_truths(truth, task)]
        found = self.find(answer)
        if found.text is None:
            return Score(0.0, explanation=found.why)
        right = any(_means(found.text, one) for one in truths)
        return Score(float(right), answer=found.text, explanation="right" if right else expected(truths))

    def find(self, answer: str) -> Found:
        reply = strip_thinking(answer)
        if self.answer is not None:
            return placed(reply, self.answer)
        given = pieces_after(reply, "####") or boxed(reply)
        if not given:
            said = statement(reply).strip()
            said = said if len(said) <= LONGEST else said[-LONGEST - 1 :].rpartition("\n")[2]
            formulas = ["".join(match.groups("")) for match in _FORMULA.finditer(said)]
            given = formulas[-1:] if formulas and names_one(said) else [said]
        return one_of(given, _key, "no answer")

    def fault(self, truth: Any, task: Task | None) -> str | None:
        require_math_verify()
        empty = any(not plain(str(one)) for one in require_truths(truth, task))
        return "says nothing" if empty else None


def _key(said: str) -> object:
    value = read_number(said)
    return (plain(said) or None) if value is None else value


def _means(said: str, truth: str) -> bool:
    if same(said, truth):
        return True
    if read_number(said) is not None and read_truth(truth) is not None:
        return False  # two numbers that differ
    if len(said) > LONGEST or not is_single(said, truth):
        return False
    return compare(truth, said)
