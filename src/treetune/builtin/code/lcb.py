"""Coding problems, one answer: its last code block is run on test cases, in a sandbox.

    Task(prompt="Print the square of a number.", env_class="lcb",
         reward_spec={"ground_truth": [{"input": "5", "output": "25"}, {"input": "-3", "output": "9"}]})

The ground truth is a list of cases or JSON of one. A case is what a program reads and must print, or in LiveCodeBench's
form the call of a function (`cases`). The answer earns 1 if every case is right. Printed lines are compared without the
spaces around them, and as numbers where both sides are. Expected outputs never enter the sandbox, and everything is
compared outside of it.

Where a list of cases says nothing else and the prompt shows the stub of a function, such as `def square(n):`, that
function is called with `5`; a program that reads `5` and prints `25` is right too. Rows written for SkyRL then say that
it is a function, and skyrl-gym rewards only that.

Differences from skyrl-gym 0.4.0:
- code runs in a sandbox, with limits of memory, disk and output; there in the trainer's own process tree.
- an answer is a program of its own: `sys.stdin.buffer`, `os.write(1, ...)`, `global` and `from __future__` work;
  there its lines become the body of a function, and such answers earn 0.
- every case begins afresh; there one case sees what another left behind.
- a case may use 6 seconds of processor time, and 12 by the clock, all together five minutes; there each has 6 by the
  clock, however busy the machine is.
- a function's result must be what JSON can say; there an object that equals everything is right.
- numbers and lists as inputs and outputs become text, and a function's texts that are no JSON are taken literally;
  there such cases earn 0 for ever.
- numpy and pandas are there where the system's Python has them (`apt-get install python3-numpy`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treetune.builtin.code.cases import Case, CasesContract, Problem, code_in
from treetune.builtin.code.python import MAIN, run_python, sandbox_required
from treetune.builtin.conversation import Conversation
from treetune.environment import Action, Kind, Step, Stored
from treetune.sandbox import Ended, Result, SandboxLimits
from treetune.task import Message, Task
from treetune.threads import call

CPU_SECONDS = 6
"""Processor time of one case."""
CLOCK_SECONDS = 12.0
"""The most seconds of one case by the clock, on a busy machine."""
START_SECONDS = 10.0
MOST_SECONDS = 300.0
"""The most seconds of all cases together, by the clock."""
MEMORY_MB = 1024
DISK_MB = 64
OUTPUT_KB = 1024
"""How much an answer may print beyond twice what is expected."""
SHOWN = 200
"""How many characters of a value an explanation quotes."""

_LONGEST_HEAD = 100
_ENDED = {
    Ended.TIMEOUT: "no end in time",
    Ended.MEMORY: f"more than {MEMORY_MB} MB of memory",
    Ended.OUTPUT: "far too much output",
}


class LcbEnvironment(Conversation):
    CONTRACT = CasesContract(
        about="Coding problems: the code block of one answer is run on test cases",
        takes=(Kind.CASES, Kind.TEXT),
        stored=Stored.JSON,
        sandbox=True,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        """`extra_info.solution` where given, else code that knows the cases by heart."""
        solution = task.extra_info.get("solution")
        if isinstance(solution, str) and solution:
            return solution if code_in(solution) else fenced(solution)
        try:
            return fenced(by_heart(Problem.of(task.ground_truth, task.messages)))
        except ValueError:
            return None

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._problem = Problem.of(task.ground_truth, task.messages)

    async def start(self) -> list[Message]:
        await sandbox_required()
        return self.task.messages

    async def step(self, action: Action) -> Step:
        code = code_in(action.text)
        total = len(self._problem.cases)
        if code is None:
            return Step(done=True, info={"explanation": "no code block", "success": False})
        asked = await call(request, self._problem, code)
        result = await run_python({MAIN: _runner()}, stdin=asked, limits=limits_of(self._problem))
        passed, explanation = await call(judged, self._problem, result)
        right = passed == total
        return Step(
            reward=float(right),
            done=True,
            info={
                "answer": code,
                "explanation": explanation,
                "success": right,
                "metrics": {"cases": total, "passed": passed},
            },
        )


class Head(msgspec.Struct, frozen=True):
    """What the runner says of a case; as untrusted as the answer itself."""

    ended: Literal["done", "error", "timeout"]
    kind: Literal["text", "value"]
    size: Annotated[int, msgspec.Meta(ge=0)]


def request(problem: Problem, code: str) -> bytes:
    """The answer and the inputs for the runner."""
    first = {
        "code": code,
        "function": problem.function,
        "program": problem.program,
        "cpu_seconds": CPU_SECONDS,
        "seconds": CLOCK_SECONDS,
    }
    lines = [first, *({"stdin": case.stdin, "arguments": case.arguments} for case in problem.cases)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def limits_of(problem: Problem) -> SandboxLimits:
    inputs = max(len(case.stdin) for case in problem.cases)
    outputs = sum(len(case.stdout) + len(json.dumps(case.returns)) for case in problem.cases)
    return SandboxLimits(
        seconds=min(START_SECONDS + (CLOCK_SECONDS + 1) * len(problem.cases), MOST_SECONDS),
        memory_mb=MEMORY_MB,
        disk_mb=DISK_MB + (4 * (inputs + outputs) >> 20),
        output_kb=OUTPUT_KB + (8 * outputs >> 10),
    )


def judged(problem: Problem, result: Result) -> tuple[int, str]:
    """How many cases are right before the first that is not, and why it is not."""
    total = len(problem.cases)
    reports = reports_in(result.stdout)
    for number, case in enumerate(problem.cases, 1):
        head, content = next(reports, (None, b""))
        wrong = _wrong(problem, case, head, content)
        if wrong is not None:
            limit = _ENDED.get(result.ended) if head is None or head.ended != "done" else None
            return number - 1, f"case {number} of {total}: {limit or wrong}"
    return total, "right"


def reports_in(output: bytes) -> Iterator[tuple[Head, bytes]]:
    """What the runner wrote, case by case, as far as it is well-formed."""
    at = 0
    while (end := output.find(b"\n", at, at + _LONGEST_HEAD)) >= 0:
        try:
            head = msgspec.json.decode(output[at:end], type=Head)
        except msgspec.DecodeError:
            return
        at = end + 1 + head.size
        if at > len(output):
            return
        yield head, output[end + 1 : at]


def _wrong(problem: Problem, case: Case, head: Head | None, content: bytes) -> str | None:
    """Why a case is not right; None if it is."""
    if head is None or not (problem.program if head.kind == "text" else problem.function):
        return "it broke off"
    said = content.decode(errors="replace")
    if head.ended == "timeout":
        return _ENDED[Ended.TIMEOUT]
    if head.ended == "error":
        return _quoted(said.strip().rpartition("\n")[2] or "it failed")
    if head.kind == "text":
        right, expected = same_lines(said, case.stdout), case.stdout
    else:
        right, expected = same_value(said, case.returns), json.dumps(case.returns)
    return None if right else f"{_quoted(said.strip()) or 'nothing'} instead of {_quoted(expected.strip())}"


def same_lines(given: str, expected: str) -> bool:
    """Equal line by line, without the spaces around lines; as numbers where all words of both are numbers."""
    ours, theirs = given.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(given: str, expected: str) -> bool:
    if given.strip() == expected.strip():
        return True
    try:
        return [Decimal(word) for word in given.split()] == [Decimal(word) for word in expected.split()]
    except (InvalidOperation, ValueError):  # no number, or one that cannot be compared
        return False


def same_value(given: str, expected: Any) -> bool:
    try:
        return bool(json.loads(given) == expected)
    except (ValueError, RecursionError):
        return False


def by_heart(problem: Problem) -> str:
    """A program, or a function where one is asked for, that knows every input of the cases."""
    if problem.function is None:
        table = {case.stdin.strip(): case.stdout for case in problem.cases}
        return f"import sys\n\nprint({_literal(table)}[sys.stdin.read().strip()])"
    table = {json.dumps(case.arguments): json.dumps(case.returns) for case in problem.cases}
    return (
        "import json\n\n"
        f"def {problem.function}(*arguments):\n"
        f"    return json.loads({_literal(table)}[json.dumps(list(arguments))])"
    )


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _literal(table: dict[str, str]) -> str:
    return repr(table).replace("`", "\\x60")  # which would end the code block


def _quoted(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@cache
def _runner() -> bytes:
    return Path(__file__).with_name("case_runner.py").read_bytes()
