"""The scorer of code by tests that are written in Python: `tests`."""

from __future__ import annotations

from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers.reading.answers import strip_thinking
from treetune.scorers.scorer import Scorer, require_truths, truths_of
from treetune.tasksets.code.lcb import find_code
from treetune.tasksets.code.unit_tests import complete_code, run_tests


class Tests(Scorer, frozen=True, tag="tests"):
    """1 where the code of the answer passes every test, in a sandbox. The ground truth is a test or a list of them:
    code with `assert`, or with a function `check(candidate)` where there is an `entry_point`."""

    setup: str | None = None
    """The column with code that the tests need before them."""
    beginning: str | None = None
    """The column with the beginning of the program, which the answer goes on from or writes anew."""
    entry_point: str | None = None
    """The column with the name of the function that `check` is called with."""
    solution: str | None = None
    """The column with a right answer, or with what follows the beginning in it."""

    async def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        tests = [str(test) for test in require_truths(truth, task)]
        code = find_code(strip_thinking(answer)) or strip_thinking(answer).strip("\n")
        if not code.strip():
            return Score(0.0, explanation="no code")
        beginning, entry_point = self._text(self.beginning, task), self._text(self.entry_point, task)
        program = complete_code(code, beginning, entry_point) if beginning else code
        setup = f"{beginning}\n    pass\n" if beginning else ""
        tested = await run_tests(
            program, tests, setup=setup + self._text(self.setup, task), entry_point=entry_point or None
        )
        right = tested.passed == len(tests)
        return Score(
            float(right),
            answer=code,
            explanation="every test passes" if right else tested.why or "a test fails",
            metrics={"tests": float(len(tests)), "passed": float(tested.passed)},
        )

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        solution = self._text(self.solution, task)
        return f"```python\n{self._text(self.beginning, task)}{solution}\n```" if solution else None

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        tests = truths_of(truth)
        return None if tests and all(isinstance(test, str) and test.strip() for test in tests) else "holds no tests"

    def columns(self) -> list[str]:
        return [name for name in (self.setup, self.beginning, self.entry_point, self.solution) if name is not None]

    def _text(self, column: str | None, task: Task | None) -> str:
        return "" if column is None or task is None else str(task.extra_info.get(column) or "")
