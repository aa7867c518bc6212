"""Coding problems, one answer: its last code block is run on test cases, in a sandbox.

    Task(prompt="Print the square of a number.", env_class="lcb",
         ground_truth=[{"input": "5", "output": "25"}, {"input": "-3", "output": "9"}])

The answer earns 1 if every case is right. Expected outputs never enter the sandbox; everything is compared outside of
it. docs/environments.md describes the cases.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import msgspec

from treetune.chat.message import Message
from treetune.core.environment import Action, Kind, Step, Stored, TaskRequirements
from treetune.core.task import Task
from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.sandbox.runtime import join_scripts
from treetune.scorers.reading.statements import fenced, strip_thinking
from treetune.system import time_limit
from treetune.system.threads import call
from treetune.tasksets.code import run_python
from treetune.tasksets.turns import TurnEnvironment

CASE_RUNNER = join_scripts(Path(time_limit.__file__), Path(__file__).with_name("case_runner.py"))
CPU_SECONDS, CLOCK_SECONDS = 6, 12.0
"""Limits of one case: a process's processor time, and its seconds as sandboxes count them, including waiting."""
START_SECONDS, MOST_SECONDS = 10.0, 300.0
"""The maximum seconds before the first case, and for all cases together, as sandboxes count them."""
MEMORY_MB, DISK_MB = 1024, 64
OUTPUT_KB = 1024
"""How much an answer may print beyond what is expected."""
SHOWN = 200
"""How many characters of a value an explanation quotes."""

_LATE = "did not end in time"
_ENDED = {Ended.TIMEOUT: _LATE, Ended.MEMORY: f"over {MEMORY_MB} MB of memory", Ended.OUTPUT: "far too much output"}
_BLOCK = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)
_PYTHON = ("", "python", "py", "python3", "python2", "py3", "ipython")
_NOTHING = object()


class TestCase(msgspec.Struct, frozen=True):
    stdin: str
    stdout: str
    arguments: list[Any]
    returns: Any
    """The expected result of the function call, in JSON types."""


class CodingProblem(msgspec.Struct, frozen=True):
    cases: list[TestCase]
    function: str | None = None
    """The function to call, if the answer defines it."""
    program: bool = True
    """Whether a program that reads standard input may solve it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The definition that answers must contain: the function to call, alone or in LiveCodeBench's class."""
        return () if self.function is None else (self.function, "Solution")

    def choose_function(self, code: str) -> str | None:
        """Return the function to call: if it is required, or if the answer defines it."""
        defined = self.function is not None and re.search(rf"\bdef\s+{self.function}\b", code)
        return self.function if defined or not self.program else None

    @classmethod
    def of(cls, truth: Any, messages: Sequence[Message] = ()) -> CodingProblem:
        """Build a problem from a list of cases or its JSON. Raises ValueError with what is wrong with it."""
        cases = _decode_cases(truth)
        if cases[0].get("testtype") == "functional":
            name = (cases[0].get("metadata") or {}).get("func_name")
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError("has functional cases without metadata.func_name")
            return cls([TestCase("", "", *_read_call(case, None)) for case in cases], name, program=False)
        stub = None if cases[0].get("testtype") else find_stub(messages)
        texts = [(_write_text(case["input"]), _write_text(case["output"])) for case in cases]
        if stub is None:
            return cls([TestCase(*text, [], None) for text in texts])
        name, parameters = stub
        calls = [_read_call(case, parameters) for case in cases]
        return cls([TestCase(*text, *call) for text, call in zip(texts, calls, strict=True)], name)

    async def run(self, code: str, strict: bool = True) -> tuple[int, str]:
        """Run code on the cases. Return how many are right before the first wrong one, and why that one is wrong."""
        function = self.choose_function(code)
        request = await call(make_request, self, code, function)
        result = await run_python(CASE_RUNNER, stdin=request, limits=limits_of(self))
        passed, why = await call(judge, self, result, function is not None, strict)
        return passed, why

    def write_solution(self) -> str:
        """Return a right answer: code with a table of the cases."""
        return f"```python\n{memorise(self)}\n```"


class CodeRequirements(TaskRequirements, frozen=True, kw_only=True):
    """The ground truth is test cases, stored as in LiveCodeBench: JSON in which all values are text."""

    def problem(self, truth: Any) -> str | None:
        problem = super().problem(truth)
        try:
            CodingProblem.of(truth)
        except ValueError as error:
            problem = problem or str(error)
        return problem

    def is_free(self, truth: Any) -> bool:
        """A program that prints nothing is right if nothing is expected."""
        problem = CodingProblem.of(truth)
        return problem.function is None and not any(case.stdout.strip() for case in problem.cases)

    def encode(self, truth: Any, task: Task | None = None) -> Any:
        try:
            problem = CodingProblem.of(truth, task.messages if task is not None else ())
        except ValueError:
            return super().encode(truth, task)
        given = _decode_cases(truth)
        stored = [_store_case(problem, case, raw) for case, raw in zip(problem.cases, given, strict=True)]
        return truth if isinstance(truth, str) and stored == given else json.dumps(stored)


class LcbEnvironment(TurnEnvironment):
    REQUIREMENTS = CodeRequirements(
        about="Coding problems: the code block of one answer is run on test cases",
        takes=(Kind.CASES, Kind.TEXT),
        stored=Stored.JSON,
        sandbox=True,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        """Return `extra_info.solution` if given, else code with a table of the cases."""
        try:
            return write_solution(task) or CodingProblem.of(task.ground_truth, task.messages).write_solution()
        except ValueError:
            return None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._problem = CodingProblem.of(task.ground_truth, task.messages)

    async def step(self, action: Action) -> Step:
        read = find_code if self.strict else find_code_as_skyrl
        code = read(action.text, self._problem.names)
        if code is None:
            return Step(done=True, info={"explanation": "no code block", "success": False})
        passed, explanation = await self._problem.run(code, self.strict)
        total = len(self._problem.cases)
        return self.end(float(passed == total), explanation, answer=code, metrics={"cases": total, "passed": passed})


def make_request(problem: CodingProblem, code: str, function: str | None) -> bytes:
    """Build the case runner's input: an answer and its cases, but never an expected output."""
    answer = {"code": code, "function": function, "cpu_seconds": CPU_SECONDS, "seconds": CLOCK_SECONDS}
    cases = [{"stdin": case.stdin, "arguments": case.arguments} for case in problem.cases]
    return "".join(json.dumps(line) + "\n" for line in [answer, *cases]).encode()


def limits_of(problem: CodingProblem) -> SandboxLimits:
    inputs = max(len(case.stdin) for case in problem.cases)
    outputs = sum(len(case.stdout) + len(json.dumps(case.returns)) for case in problem.cases)
    return SandboxLimits(
        seconds=min(START_SECONDS + (CLOCK_SECONDS + 1) * len(problem.cases), MOST_SECONDS),
        memory_mb=MEMORY_MB,
        disk_mb=DISK_MB + (4 * (inputs + outputs) >> 20),
        output_kb=OUTPUT_KB + (8 * outputs >> 10),
    )


class CaseReport(msgspec.Struct, frozen=True):
    """The case runner's report on a case; as untrusted as the answer itself."""

    ended: Literal["done", "error", "timeout"]
    content: str
    """The output, or as JSON the returned value; or the error."""


def read_reports(output: bytes) -> Iterator[CaseReport]:
    """Yield the case runner's reports, case by case, as long as they are well-formed."""
    for line in output.split(b"\n"):
        try:
            yield msgspec.json.decode(line, type=CaseReport)
        except ValueError:
            return


def judge(problem: CodingProblem, result: Result, called: bool, strict: bool = True) -> tuple[int, str]:
    """Return how many cases are right before the first wrong one, and why that one is wrong."""
    total = len(problem.cases)
    reports = read_reports(result.stdout)
    for number, case in enumerate(problem.cases, 1):
        report = next(reports, None)
        fault = _find_fault(case, report, called, strict)
        if fault is not None:
            limit = _ENDED.get(result.ended) if report is None or report.ended != "done" else None
            return number - 1, f"case {number} of {total}: {limit or fault}"
    return total, "right"


def _find_fault(case: TestCase, report: CaseReport | None, called: bool, strict: bool) -> str | None:
    """Return why a case is wrong; None if it is right."""
    if report is None:
        return "it broke off"
    if report.ended == "timeout":
        return _LATE
    said = report.content.strip()
    if report.ended == "error":
        return _shorten(said.rpartition("\n")[2] or "it failed")
    expected = json.dumps(case.returns) if called else case.stdout
    right = same_value(said, case.returns, strict) if called else same_lines(said, expected, strict)
    return None if right else f"{_shorten(said) or 'nothing'} instead of {_shorten(expected.strip())}"


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def same_lines(given: str, expected: str, strict: bool = True) -> bool:
    """Whether texts are equal line by line, ignoring spaces around lines; as numbers if all words of both are
    numbers."""
    ours, theirs = given.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(map(partial(_same_line, strict=strict), ours, theirs))


def _same_line(given: str, expected: str, strict: bool) -> bool:
    if given.strip() == expected.strip():
        return True
    same, ours, theirs = partial(_same_word, strict=strict), given.split(), expected.split()
    try:
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    except (InvalidOperation, ValueError):  # not a number, or one that cannot be compared
        return False


def _same_word(given: str, expected: str, strict: bool) -> bool:
    """Whether they are equal as numbers or, if strict, as texts if one begins with a zero: `0101` is not 101."""
    padded = any(word.lstrip("+-")[:1] == "0" and word.lstrip("+-")[1:2].isdigit() for word in (given, expected))
    return given == expected if padded and strict else Decimal(given) == Decimal(expected)


def same_value(given: str, expected: Any, strict: bool = True) -> bool:
    """Whether values are equal as JSON; if strict, `true` is not 1."""
    value = _parse_json(given)
    return bool(value == expected) and (not strict or _same_types(value, expected))


def _same_types(one: Any, other: Any) -> bool:
    """Whether two equal values have booleans in the same places."""
    if isinstance(one, list):
        return all(map(_same_types, one, other))
    if isinstance(one, dict):
        return all(_same_types(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool)


def _parse_json(text: Any) -> Any:
    """Parse JSON text; return `_NOTHING` if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return _NOTHING


def write_solution(task: Task | None) -> str | None:
    """Return `extra_info.solution` as an answer."""
    solution = None if task is None else task.extra_info.get("solution")
    if not isinstance(solution, str) or not solution:
        return None
    return solution if find_code(solution) else f"```python\n{solution}\n```"


def memorise(problem: CodingProblem) -> str:
    """Write a program, or a function if one is required, that knows every input of the cases."""
    if problem.function is None:
        table = {case.stdin.strip(): case.stdout for case in problem.cases}
        code = "import sys\n\nprint(TABLE[sys.stdin.read().strip()])"
    else:
        table = {json.dumps(case.arguments): json.dumps(case.returns) for case in problem.cases}
        code = f"import json\n\ndef {problem.function}(*given):\n    return json.loads(TABLE[json.dumps(list(given))])"
    literal = repr(table).replace("`", "\\x60")  # a backtick would end the code block
    return f"TABLE = {literal}\n{code}"


def find_code(text: str, names: Collection[str] = ()) -> str | None:
    """Return the code of an answer: the last block that defines one of the names, else the last block in Python, else
    the last that names no language."""
    blocks = [block for block in fenced(strip_thinking(text)) if block.language in _PYTHON]
    defining = [block for block in blocks if any(_defines(dedent(block.body), name) for name in names)]
    chosen = defining or [block for block in blocks if block.language] or blocks
    return dedent(chosen[-1].body).strip("\n") if chosen else None


def find_code_as_skyrl(text: str, names: Collection[str] = ()) -> str | None:
    blocks = _BLOCK.findall(text)
    return dedent(blocks[-1]).strip() if blocks else None


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^\s*(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M)
        is not None
    )


def find_stub(messages: Sequence[Message]) -> tuple[str, int] | None:
    """Return the one function that the user's last message shows without a body: its name and number of parameters."""
    asked = [message.get("content") for message in messages if message.get("role") == "user"]
    blocks = fenced(asked[-1]) if asked and isinstance(asked[-1], str) else []
    if len(blocks) != 1:
        return None
    lines = [
        line.rstrip() for line in blocks[0].body.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    if lines and lines[-1].endswith(":"):  # a comment alone is not a body
        lines.append(lines[-1][: -len(lines[-1].lstrip())] + "    pass")
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return None
    found = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    method = len(found) == 1 and isinstance(found[0], ast.ClassDef) and found[0].name == "Solution"
    if method:
        found = list(found[0].body)  # type: ignore[attr-defined]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef) or not all(map(_is_empty, found[0].body)):
        return None
    arguments = found[0].args
    return found[0].name, len(arguments.posonlyargs) + len(arguments.args) - method


def _is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr | ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Raise)


def _decode_cases(truth: Any) -> list[dict[str, Any]]:
    if isinstance(truth, str) and (truth := _parse_json(truth)) is _NOTHING:
        raise ValueError("is text, but not JSON with test cases")
    if not isinstance(truth, list) or not truth:
        raise ValueError("contains no test cases")
    for number, case in enumerate(truth, 1):
        if not isinstance(case, dict) or case.get("input") is None or case.get("output") is None:
            raise ValueError(f"has no input and output in case {number}")
        if not isinstance(case.get("metadata") or {}, dict):
            raise ValueError(f"has a metadata that is not a mapping in case {number}")
    return truth


def _write_text(value: Any) -> str:
    """Return a value as a program reads or prints it: lists become lines, other values that are not text become
    JSON."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join(str(line) if isinstance(line, str | int | float) else json.dumps(line) for line in lines)


def _read_call(case: dict[str, Any], parameters: int | None) -> tuple[list[Any], Any]:
    """Return arguments and result: text has one argument per line; a list holds all of them if its length matches the
    parameters."""
    given, expected = case["input"], case["output"]
    if isinstance(given, str):
        arguments = [_read_value(line) for line in given.removesuffix("\n").split("\n")] if given.strip() else []
    elif isinstance(given, list) and parameters not in (None, 1) and len(given) == parameters:
        arguments = given
    else:
        arguments = [given]
    return arguments, _read_value(expected) if isinstance(expected, str) else expected


def _read_value(text: str) -> Any:
    """Return the value of a text: JSON, else a Python literal, else the text itself."""
    if (value := _parse_json(text)) is not _NOTHING:
        return value
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _store_case(problem: CodingProblem, case: TestCase, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a case as skyrl-gym reads it."""
    if problem.function is None:
        return {**raw, "input": case.stdin, "output": case.stdout}
    given, expected = raw["input"], raw["output"]
    if not isinstance(given, str) or any(_parse_json(line) is _NOTHING for line in given.split("\n")):
        given = "\n".join(map(json.dumps, case.arguments))
    return {
        **raw,
        "input": given,
        "output": json.dumps(case.returns) if _parse_json(expected) is _NOTHING else expected,
        "testtype": "functional",
        "metadata": {**(raw.get("metadata") or {}), "func_name": problem.function},
    }
