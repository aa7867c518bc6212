r"""Competition math, one answer: what follows the last `Answer:` against the ground truth, for 1 or -1.

    Task(prompt="...", env_class="aime", reward_spec={"ground_truth": "204"})   # "Answer: $\boxed{204}$" earns 1

As in skyrl-gym, only the last 300 characters are read, the answer ends at a line end or a `<`, a box without `Answer:`
does not count, and both sides are normalised: units, dollar signs, `\text`, `\boxed` and spaces go, `\frac12` becomes
`\frac{1}{2}`, whole numbers lose their commas. `reward_spec: {method: math_verify}` compares by meaning too.
"""

from __future__ import annotations

import re

from treetune.builtin.math_verifier import compare, require_math_verify
from treetune.builtin.turns import TurnEnvironment, list_answers
from treetune.environment import Action, Contract, Kind, Step, Stored
from treetune.task import Task
from treetune.threads import call, limit_to_cores

TAIL = 300
"""How many characters at the end are searched for the answer."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n<]+)")
# The normalisation of Minerva (Lewkowycz et al. 2022, appendix D), in the order in which verl and skyrl-gym apply it.
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


class AimeEnvironment(TurnEnvironment):
    CONTRACT = Contract(
        about="Competition math in one answer that ends in `Answer: ...`",
        takes=(Kind.TEXT, Kind.NUMBER),
        stored=Stored.TEXT,
        column="reward_model",
        rewards="1 or -1",
    )

    GOLD = "Answer: {}"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._answers = list_answers(task.ground_truth)
        self._normal = [normalise(text) for text in self._answers]
        self._by_meaning = task.reward_spec.get("method") in ("math_verify", "math-verify")
        if self._by_meaning:
            require_math_verify()

    async def step(self, action: Action) -> Step:
        found = _ANSWER.findall(action.text[-TAIL:])
        if not found:
            return self.end(-1.0, f"no `Answer:` in the last {TAIL} characters")
        answer = normalise(found[-1])
        right = answer in self._normal
        if not right and self._by_meaning:
            async with limit_to_cores():
                right = await call(compare, self._answers[0], found[-1].strip())
        return self.end(1.0 if right else -1.0, "right" if right else f"expected {self._normal[0]}", answer=answer)


def normalise(answer: str) -> str:
    """Removes what does not change the meaning of an answer."""
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
