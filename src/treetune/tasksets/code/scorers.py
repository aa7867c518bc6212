"""The scorers that run a reply's code in a sandbox: `code` on test cases, `tests` with tests written in Python.

    result = await run_tests("def add(a, b): return a + b", ["assert add(2, 3) == 5"])
    result.passed, result.why       # 1, ""

Tests are HumanEval's `check(candidate)` or MBPP's asserts. The answer never sees them and cannot claim to have passed:
`test_runner.py` explains how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import TasksetError
from treetune.sandbox import Ended, SandboxLimits
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract, read_as_written
from treetune.scorers.reading.statements import strip_thinking
from treetune.scorers.scorer import Scorer, require_truths, truths_of
from treetune.tasksets.code import run_python
from treetune.tasksets.code.lcb import CodingProblem, find_code, write_solution

TEST_RUNNER = Path(__file__).with_name("test_runner.py").read_bytes()
CPU_SECONDS, CLOCK_SECONDS = 10, 25.0
"""Limits of all tests together: the answer's processor time, and seconds as sandboxes count them, including waiting."""
LIMITS = SandboxLimits(seconds=CLOCK_SECONDS, memory_mb=1024, processes=64, disk_mb=64, output_kb=64)

_CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")
_ENDED = {Ended.TIMEOUT: "did not end in time", Ended.MEMORY: f"over {LIMITS.memory_mb} MB of memory"}


class Code(Scorer, frozen=True, tag="code"):
    partial: bool = False
    """Whether a partly right answer earns the share of cases that are right before the first wrong one."""

    async def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Score whether a reply's code passes every test case of the ground truth, in LiveCodeBench's form."""
        problem = _read(truth, task)
        found = find_declared_code(answer, self.answer, problem.names)
        if not found:
            return Score(0.0, explanation=f"no {self.answer or 'code'}")
        passed, why = await problem.run(found)
        total = len(problem.cases)
        reward = passed / total if self.partial else float(passed == total)
        return Score(
            reward, answer=found, explanation=_with_form(why, self.answer), metrics={"cases": total, "passed": passed}
        )

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        return self.say(write_solution(task) or _read(truth, task).write_solution())

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        try:
            _parse(truth, task)
        except (ValueError, TypeError) as error:
            return str(error)
        return None


def find_declared_code(answer: str, form: AnswerFormat | None, names: Collection[str]) -> str | None:
    """The code of a reply: in the declared form or, if none is declared, the block that defines one of some names, or
    else the whole reply."""
    if form is None:
        return find_code(answer, names) or strip_thinking(answer).strip("\n")
    text = extract(answer, form, read_as_written).text
    return None if text is None else find_code(text, names) or text


def _with_form(why: str, form: AnswerFormat | None) -> str:
    return why if form is None else f"{why}; read from {form}"


def _parse(truth: Any, task: Task | None) -> CodingProblem:
    one = truth[0] if isinstance(truth, list) and len(truth) == 1 and isinstance(truth[0], str) else truth
    return CodingProblem.of(one, task.messages if task is not None else ())


def _read(truth: Any, task: Task | None) -> CodingProblem:
    try:
        return _parse(truth, task)
    except (ValueError, TypeError) as error:
        remedy = 'give a list of cases: [{"input": "5", "output": "25"}]'
        raise TasksetError(f"the ground truth {error}", remedy=remedy) from None


class Tests(Scorer, frozen=True, tag="tests"):
    """1 if the code of the answer passes every test in a sandbox.

    The ground truth is a test or a list of tests: code with `assert`, or with a function `check(candidate)` if there is
    an `entry_point`.
    """

    setup: str | None = None
    """The column with code that the tests need to run first."""
    beginning: str | None = None
    """The column with the beginning of the program, which the answer continues or rewrites."""
    entry_point: str | None = None
    """The column with the name of the function that `check` gets."""
    solution: str | None = None
    """The column with a right answer, or with the part of one that follows the beginning."""

    async def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        tests = [str(test) for test in require_truths(truth, task)]
        beginning, entry_point = self._text(self.beginning, task), self._text(self.entry_point, task)
        names = [entry_point] if entry_point else [name for test in tests for name in _CALLED.findall(test)]
        code = find_declared_code(answer, self.answer, names)
        if code is None or not code.strip():
            return Score(0.0, explanation=f"no {self.answer or 'code'}")
        program = complete_code(code, beginning, entry_point) if beginning else code
        setup = f"{beginning}\n    pass\n" if beginning else ""
        tested = await run_tests(
            program, tests, setup=setup + self._text(self.setup, task), entry_point=entry_point or None
        )
        right = tested.passed == len(tests)
        return Score(
            float(right),
            answer=code,
            explanation=_with_form("every test passes" if right else tested.why or "a test fails", self.answer),
            metrics={"tests": float(len(tests)), "passed": float(tested.passed)},
        )

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        solution = self._text(self.solution, task)
        code = f"{self._text(self.beginning, task)}{solution}"
        return None if not solution else f"```python\n{code}\n```" if self.answer is None else self.say(code)

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        tests = truths_of(truth)
        return None if tests and all(isinstance(test, str) and test.strip() for test in tests) else "holds no tests"

    def columns(self) -> list[str]:
        return [name for name in (self.setup, self.beginning, self.entry_point, self.solution) if name is not None]

    def _text(self, column: str | None, task: Task | None) -> str:
        return "" if column is None or task is None else str(task.extra_info.get(column) or "")


class Tested(msgspec.Struct, frozen=True):
    """How many tests passed before the first that failed, and why that one failed."""

    passed: int
    why: str = ""


async def run_tests(code: str, tests: Sequence[str], *, setup: str = "", entry_point: str | None = None) -> Tested:
    """Run the tests in order, up to the first that fails. `setup` is code that they need. With `entry_point`, each test
    defines `check`, which is called with that function of the answer; otherwise tests call its functions by name."""
    request = {"code": code, "setup": setup, "tests": tests, "entry_point": entry_point, "cpu_seconds": CPU_SECONDS}
    result = await run_python(TEST_RUNNER, stdin=json.dumps(request).encode(), limits=LIMITS)
    try:
        report = msgspec.json.decode(result.stdout, type=Tested)
    except ValueError:
        return Tested(0, _ENDED.get(result.ended, "the tests were aborted"))
    return report if 0 <= report.passed <= len(tests) else Tested(0, "the tests were aborted")


def complete_code(code: str, beginning: str, entry_point: str) -> str:
    """Combine an answer with the beginning that it continues. The answer may be the whole function, which then follows
    the beginning and may rely on its imports, or only the body."""
    if re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        return f"{beginning}\n    pass\n\n{code}\n"
    return f"{beginning}{code if code[0].isspace() else indent(code, '    ')}\n"
