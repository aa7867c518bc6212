"""Tests written in Python, run on answers: only an answer that solves the problem passes them."""

from __future__ import annotations

import asyncio

import pytest

from treetune import Task
from treetune.sandbox import probe
from treetune.scorers import tests as by_tests
from treetune.tasksets.code import scorers
from treetune.tasksets.code.scorers import complete_code, run_tests

TESTS = ["assert add(2, 3) == 5", "assert add(1, 1) == 2"]


@pytest.fixture(autouse=True)
def _needs_sandbox():
    if not probe().available:
        pytest.skip(str(probe()))


def report_of(code, tests=TESTS, **options):
    return asyncio.run(run_tests(code, tests, **options))


SOLVES = {
    "plainly": "def add(a, b):\n    return a + b",
    "with a helper and prints": "import sys\nprint('hello')\ndef plus(a, b): return a + b\ndef add(a, b):\n"
    "    print(a, file=sys.stderr)\n    return plus(a, b)",
    "with a number of its own kind": "class N(int): pass\ndef add(a, b): return N(a + b)",
    "with an object that is callable": "class Add:\n    def __call__(self, a, b): return a + b\nadd = Add()",
}


@pytest.mark.parametrize("how", SOLVES)
def test_code_that_solves_the_problem_passes(how):
    assert report_of(SOLVES[how]).passed == len(TESTS)


CHEATS = {
    "ends its process": "import os\nos._exit(0)",
    "leaves the program": "import sys\nsys.exit(0)",
    "ends its process when called": "import os\ndef add(a, b): os._exit(0)",
    "returns what equals everything": "class Same:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def add(a, b): return Same()",
    "returns a number that equals everything": "class Same(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = None\ndef add(a, b): return Same()",
    "writes the verdict itself": "import os\nfor process in filter(str.isdigit, os.listdir('/proc')):\n"
    "    for number in range(6):\n        try:\n            if process != str(os.getpid()):\n"
    "                open(f'/proc/{process}/fd/{number}', 'w').write('{\"passed\": 2, \"why\": \"\"}')\n"
    "        except OSError: pass\ndef add(a, b): return 0",
    "writes to every stream": "import os\nfor number in range(1, 50):\n    try:\n"
    '        os.write(number, b\'{"passed": 2, "why": ""}\\n\')\n    except OSError: pass\ndef add(a, b): return 0',
    "kills the tests": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return 0",
    "reads the tests": "import os\ndef add(a, b):\n    text = open(f'/proc/{os.getppid()}/mem', 'rb').read(10)\n"
    "    return 5",
    "makes assertions harmless": "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b): return 0",
    "takes the pipe over": "import __main__\n__main__.encode = lambda value, keep=None: 5\ndef add(a, b): return 0",
    "defines the check": "def add(a, b): return 0\ndef check(candidate): pass",
    "says nothing": "",
    "is not a code": "The sum of both.",
    "knows one test": "def add(a, b): return 5",
}


@pytest.mark.parametrize("how", CHEATS)
@pytest.mark.quick_cases(6)
def test_code_that_only_claims_to_pass_does_not(how):
    report = report_of(CHEATS[how])
    assert report.passed < len(TESTS)
    assert report.why


def test_the_first_test_that_fails_is_quoted():
    report = report_of("def add(a, b): return 5")
    assert (report.passed, report.why) == (1, "assert add(1, 1) == 2: AssertionError")
    assert "ZeroDivisionError" in report_of("def add(a, b): return 1 / 0").why
    assert "SyntaxError" in report_of("def add(a, b) return a").why


def test_an_answer_without_an_end_is_told_as_such(monkeypatch):
    monkeypatch.setattr(scorers, "CPU_SECONDS", 1)
    report = report_of("def add(a, b):\n    while True: pass")
    assert report.why == "assert add(2, 3) == 5: RuntimeError: did not end within 1 seconds of processor time"


VALUES = {
    "tuples are no lists": ("def f(x): return [1, 2]", ["assert f(0) == (1, 2)"], 0),
    "sets, dicts and nested values": (
        "def f(x): return {1: {2, 3}, 'a': (None, [1.5, b'x', 2j])}",
        ["assert f(0) == {1: {3, 2}, 'a': (None, [1.5, b'x', 2j])}"],
        1,
    ),
    "arguments of every kind": (
        "def f(*a, **k): return a, k",
        ["assert f((1,), {2}, x={'y': [3]}) == (((1,), {2}), {'x': {'y': [3]}})"],
        1,
    ),
    "iterators": ("def f(x): return map(str, range(x))", ["assert list(f(2)) == ['0', '1']"], 1),
    "ranges": ("def f(x): return range(0, x, 2)", ["assert list(f(6)) == [0, 2, 4]"], 1),
    "large numbers": ("def f(x): return 10 ** x", ["assert f(5000) == 10 ** 5000"], 1),
    "infinity and not a number": (
        "def f(x): return [float('inf'), float('nan')]",
        ["got = f(0)\nassert got[0] == float('inf') and got[1] != got[1]"],
        1,
    ),
    "objects of the answer's, given back": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(pairs): return pairs[0].b",
        ["assert f([Pair(5, 24)]) == 24"],
        1,
    ),
    "errors that are expected": (
        "def f(x): raise ValueError('no')",
        ["try:\n    f(0)\n    raise AssertionError\nexcept ValueError:\n    pass"],
        1,
    ),
    "an iterator without an end": ("import itertools\ndef f(x): return itertools.count()", ["list(f(0))"], 0),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_cross_between_tests_and_answer_as_they_are(kind):
    code, tests, passed = VALUES[kind]
    assert report_of(code, tests).passed == passed, report_of(code, tests).why


def test_tests_have_what_their_setup_defines():
    assert (
        report_of("def half(x): return x / 2", ["assert math.isclose(half(3), 1.5)"], setup="import math").passed == 1
    )


CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert double(3) == 6\n"
BEGINNING = 'from math import prod\n\ndef double(x: int):\n    """Twice."""\n'


@pytest.mark.parametrize(
    "code", ["    return prod([2, x])", "return prod([2, x])", "def double(x):\n    return prod([2, x])"]
)
def test_an_answer_may_be_the_body_or_the_whole_function(code):
    program = complete_code(code, BEGINNING, "double")
    assert report_of(program, [CHECK], setup=f"{BEGINNING}    pass\n", entry_point="double").passed == 1


def test_the_scorer_says_how_many_tests_hold_and_knows_the_solution():
    scorer = by_tests(solution="code")
    task = Task(prompt="", extra_info={"code": "def add(a, b): return a + b"})
    assert asyncio.run(scorer.score(scorer.gold(TESTS, task), TESTS, task)).reward == 1.0
    score = asyncio.run(scorer.score("```python\ndef add(a, b): return 5\n```", TESTS, task))
    assert (score.reward, score.metrics) == (0.0, {"tests": 2.0, "passed": 1.0})
    assert scorer.problem([], task) == scorer.problem([3], task) == "holds no tests"
    assert scorer.columns() == ["code"]
