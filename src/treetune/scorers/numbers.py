"""The scorer for numbers: `number`."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import Number as Value
from treetune.scorers.reading.numerals import find_amounts, read_amount, read_number
from treetune.scorers.reading.words import LISTS
from treetune.scorers.scorer import Scorer, expected, judged, require_truths


class Number(Scorer, frozen=True, tag="number"):
    tolerance: float | None = None
    """The absolute tolerance: `0.01` is a hundredth of one."""
    relative: float | None = None
    """The relative tolerance, as a share of the ground truth: `0.01` is one percent of it."""

    def __post_init__(self) -> None:
        faults = [
            (key, f"must be a number from 0 on, got {value:g}")
            for key in ("tolerance", "relative")
            if (value := getattr(self, key)) is not None and not (math.isfinite(value) and value >= 0)
        ]
        if faults:
            raise ConfigError(faults)

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the answer equals the number in the ground truth; `5`, `$5`, `5%`, `5 apples` and `x = 5` are 5."""
        truths = [truth] if isinstance(truth, str) else require_truths(truth, task)
        found = extract(answer, self.answer, read_amount)
        if found.text is None:
            return judged(found, False, truths)
        for one in truths:
            wanted, wanted_unit = _read_quantity(str(one))
            if wanted is not None and (found.value == wanted or self._is_near(found.value, wanted)):
                unit = wanted_unit and _unit_beside(answer, found.text)
                if unit not in (None, wanted_unit):
                    return Score(0.0, answer=found.text, explanation=f"the unit is {unit}, {expected(truths)}")
                return judged(found, True, truths)
        return judged(found, False, truths)

    def _is_near(self, value: Value, wanted: Value) -> bool:
        if self.tolerance is None and self.relative is None:
            return False
        said, right = float(value), float(wanted)
        off = abs(said - right)
        near = self.tolerance is not None and off <= self.tolerance
        return math.isfinite(off) and (near or (self.relative is not None and off <= self.relative * abs(right)))

    def fault(self, truth: Any, task: Task | None) -> str | None:
        wrong = [one for one in require_truths(truth, task) if read_number(str(one)) is None]
        return f"is not a number: {wrong[0]!r:.60}" if wrong else None


@lru_cache(maxsize=4096)
def _read_quantity(text: str) -> tuple[Value | None, str | None]:
    """The value of a ground truth, and its unit if it is known."""
    amounts = find_amounts(text)
    return read_number(text), _unit_beside(text, amounts[-1].said) if amounts else None


def _unit_beside(text: str, number: str) -> str | None:
    """The unit of measure next to the last occurrence of a number in a text, if it is a known unit."""
    number = number.lstrip("-$")
    begin = text.rfind(number)
    end = begin + len(number)
    dollar = text[begin - 1 : begin] == "$" and "$" not in text[end : end + 30]  # else it is LaTeX
    if dollar or text[begin - 1 : begin] in ("€", "£", "¥"):
        return _UNITS[text[begin - 1]]
    word = _UNIT.search(number) or _UNIT_BEHIND.match(text, end)
    return _UNITS.get(word[1].lower()) if word else None


_UNIT = re.compile(r"([$€£¥%]|°[CF]|[^\W\d_]+)")
_UNIT_BEHIND = re.compile(r"[\s*_$\\{}]*(?:text|mathrm)?[{\s-]*([€£¥%]|°[CF]|[^\W\d_]+)")
_UNITS: dict[str, str] = {word: unit for unit, words in LISTS["units"].items() for word in words.split()}
