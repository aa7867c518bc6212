r"""Competition math, one answer: compares the text after the last `Answer:` with the ground truth, for a reward of 1 or
-1.

    Task(prompt="...", env_class="aime", ground_truth="204")   # "Answer: $\boxed{204}$" earns 1

As in skyrl-gym, only the last 300 characters are read, the answer ends at a line end or a tag, and a box without
`Answer:` does not count. A ground truth that is a number is compared as a number. Any other ground truth is normalised,
and so is the answer: units, dollar signs, `\text`, `\boxed` and spaces are removed, `\frac12` becomes `\frac{1}{2}`. A
reply with several different answers earns nothing. `reward_spec: {method: math_verify}` also compares by meaning.
`extra_info.strict: false` follows skyrl-gym exactly: the last `Answer:`, in it the first `$...$`, both sides
normalised.
"""

from __future__ import annotations

import re
from typing import Any

from treetune.core.environment import Action, Kind, Step, Stored, TaskRequirements
from treetune.core.task import Task
from treetune.errors import EnvironmentFault
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import read_number, read_truth
from treetune.scorers.reading.statements import Extraction, Statement, strip_thinking
from treetune.scorers.scorer import explain
from treetune.system.threads import call, limit_to_cores
from treetune.tasksets.math_scorer import read_formula
from treetune.tasksets.math_verifier import compare, is_single, require_math_verify
from treetune.tasksets.turns import TurnEnvironment, list_answers

TAIL = 300
"""The answer is searched in this many characters at the end of a reply."""

_TAG = re.compile("<[/|]?[a-z]", re.I)
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n<]+)")
# The normalisation of Minerva (Lewkowycz et al. 2022, appendix D), in the order that verl and skyrl-gym use.
_REPLACEMENTS = {"an ": "", "a ": "", ".$": "$", r"\$": "", "\\ ": "", " ": "", "mbox": "text"}
_REPLACEMENTS |= {r",\text{and}": ",", r"\text{and}": ",", r"\text{m}": r"\text{}"}
_WITHOUT_MEANING = (
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents".split(),
    *"degrees cm gm pounds meters meals edges students childrentickets multiples".split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REWRITES = {
    r"(.*?)(\$)(.*?)(\$)(.*)": r"$\3$",
    r"(\\text\{)(.*?)(\})": r"\2",
    r"(\\textbf\{)(.*?)(\})": r"\2",
    r"(\\overline\{)(.*?)(\})": r"\2",
    r"(\\boxed\{)(.*)(\})": r"\2",
    r"(frac)([^{])(.)": r"frac{\2}{\3}",
    r"(sqrt)([^{])": r"sqrt{\2}",
}


class AimeRequirements(TaskRequirements, frozen=True, kw_only=True):
    def is_free(self, truth: Any) -> bool:
        """skyrl-gym accepts an empty answer if the ground truth normalises to nothing."""
        return not normalise(list_answers(truth)[0])


class AimeEnvironment(TurnEnvironment):
    REQUIREMENTS = AimeRequirements(
        about="Competition math in one answer that ends in `Answer: ...`",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        column="reward_model",
        rewards="1 or -1",
    )

    ANSWER = AnswerFormat(line="Answer:")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._answers = list_answers(task.ground_truth)
        self._normal = [normalise(text) for text in self._answers]
        self._value = read_truth(self._normal[0])
        self._by_meaning = task.reward_spec.get("method") in ("math_verify", "math-verify")
        if self.strict and not self._normal[0]:
            why = f"aime: the ground truth {self._answers[0]!r:.60} normalises to nothing, so no answer can be compared"
            raise EnvironmentFault(why, remedy="correct it, or leave the row out")
        if self._by_meaning:
            require_math_verify()

    async def step(self, action: Action) -> Step:
        found = find_answer(action.text) if self.strict else find_answer_as_skyrl(action.text)
        if found.text is None:
            return self.end(-1.0, found.why)
        answer = normalise(found.text)
        right = self._is_same(found.text, answer)
        if not right and self._by_meaning and (not self.strict or is_single(found.text, self._answers[0])):
            async with limit_to_cores():
                right = await call(compare, self._answers[0], found.text)
        why = explain(found, "" if right else f"expected {self._normal[0]}")
        return self.end(1.0 if right else -1.0, why, answer=answer)

    def _is_same(self, text: str, normal: str) -> bool:
        if self.strict and self._value is not None:
            number = read_number(text)
            return number is not None and number == self._value
        return bool(normal or not self.strict) and normal in self._normal


def find_answer(text: str) -> Extraction:
    """Return the one expression that every `Answer:` gives."""
    return extract(strip_thinking(text).rstrip()[-TAIL:], AimeEnvironment.ANSWER, _read, _same)


def _read(statement: Statement) -> Extraction | None:
    return read_formula(statement._replace(text=_TAG.split(statement.text)[0]))


def _same(one: str, other: str) -> bool:
    return (
        read_number(one) == read_number(other) if read_number(one) is not None else normalise(one) == normalise(other)
    )


def find_answer_as_skyrl(text: str) -> Extraction:
    found = _ANSWER.findall(text[-TAIL:])
    return Extraction(found[-1].strip()) if found else Extraction(None, f"no `Answer:` in the last {TAIL} characters")


def normalise(answer: str) -> str:
    """Remove what does not change the meaning of an answer."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACEMENTS.items():
        answer = answer.replace(before, after)
    for expression in _WITHOUT_MEANING:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITES.items():
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()
