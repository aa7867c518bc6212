"""The environments that run code: what is right, what is a fault, and that code cannot cheat, get out or hang."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from episodes import episode, play, rewards, shown, task_of
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Action, Outcome, Task, Taskset, make, run_rollout
from treetune.core.environment import requirements_of
from treetune.core.policy import Completion
from treetune.data.datasets.task_lists import load_task
from treetune.data.rows import read_tasks
from treetune.data.validate import write_tasks
from treetune.errors import EnvironmentFault
from treetune.evaluation import refuse_unservable
from treetune.models.scripted import Replay
from treetune.sandbox import Capability, SandboxUnavailable, probe
from treetune.tasksets.code import lcb
from treetune.tasksets.code.lcb import CodingProblem, find_stub, read_reports, same_lines, same_value
from treetune.tasksets.search import find_tool

SQUARES = [{"input": "5", "output": "25"}, {"input": "-3", "output": "9"}, {"input": "0", "output": "0"}]
STUB = "Write a function that returns the square of a number.\n\n```python\ndef square(n):\n    # YOUR CODE HERE\n```"
FUNCTION = "def square(n):\n    return n * n"
PROGRAM = "print(int(input()) ** 2)"


@pytest.fixture
def sandbox() -> None:
    found = probe()
    if not found.available:
        pytest.skip(f"no sandbox can start here: {found.cause}")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time for cases that use all of it."""
    monkeypatch.setattr(lcb, "CPU_SECONDS", 1)
    monkeypatch.setattr(lcb, "CLOCK_SECONDS", 5.0)


def code(text: str) -> str:
    return f"So this is it:\n```python\n{textwrap.dedent(text)}\n```\n"


def called(cases: list[tuple[str, str]], name: str = "f") -> list[dict[str, Any]]:
    """Cases of a function, in LiveCodeBench's form."""
    return [
        {"input": given, "output": expected, "testtype": "functional", "metadata": {"func_name": name}}
        for given, expected in cases
    ]


def asked(prompt: str, truth: Any = SQUARES) -> Task:
    return Task(
        prompt=[{"role": "system", "content": "You write code."}, {"role": "user", "content": prompt}],
        env_class="lcb",
        reward_spec={"ground_truth": truth},
    )


class TestCases:
    def test_cases_are_programs_unless_they_or_the_prompt_say_otherwise(self):
        program = CodingProblem.of(SQUARES)
        assert (program.function, program.program, program.cases[0].stdin) == (None, True, "5")
        function = CodingProblem.of(called([("5", "25")], "square"))
        assert (function.function, function.program) == ("square", False)
        either = CodingProblem.of(SQUARES, asked(STUB).messages)
        assert (either.function, either.program) == ("square", True)
        assert (either.cases[1].arguments, either.cases[1].returns) == ([-3], 9)

    def test_a_case_that_says_stdin_is_a_program_whatever_the_prompt_shows(self):
        assert CodingProblem.of([{**SQUARES[0], "testtype": "stdin"}], asked(STUB).messages).function is None

    @pytest.mark.parametrize(
        ("prompt", "stub"),
        [
            (STUB, ("square", 1)),
            ("```python\ndef f(a, b):\n    pass\n```", ("f", 2)),
            ("```\ndef f(a, *, b=1) -> int:\n    '''What it does.'''\n    ...\n```", ("f", 1)),
            ("```python\nimport math\n\ndef f():\n\traise NotImplementedError\n```", ("f", 0)),
            ("```python\nclass Solution:\n    def f(self, a: List[int]) -> int:\n        \n```", ("f", 1)),
            ("```python\ndef f(\n    a,\n    b,\n):\n```", ("f", 2)),
            ("```python\ndef f(a):\n    return None\n```", ("f", 1)),
            ("no code", None),
            ("```python\ndef f(a):\n    return a + 1\n```", None),  # an example, not a stub
            ("```python\ndef f(a):\n    pass\n\ndef g(a):\n    pass\n```", None),
            ("```python\ndef f(a):\n    pass\n```\n```\n5\n```", None),
            ("```python\nn = int(input())\n```", None),
            ("```python\ndef f(\n```", None),
            ("```python\n\0\n```", None),
        ],
    )
    def test_the_stub_of_one_function_is_found(self, prompt, stub):
        assert find_stub([{"role": "user", "content": prompt}]) == stub

    @pytest.mark.parametrize(
        ("case", "arguments", "returns"),
        [
            ({"input": "[1, 2]\n3", "output": "[3]"}, [[1, 2], 3], [3]),
            ({"input": "[1, 2]\n3\n", "output": "[3]"}, [[1, 2], 3], [3]),
            ({"input": "hello\n", "output": "olleh"}, ["hello"], "olleh"),
            ({"input": '"5"', "output": "True"}, ["5"], True),
            ({"input": "'a b'", "output": "(1, 2)"}, ["a b"], [1, 2]),
            ({"input": [1, 2], "output": 3}, [1, 2], 3),  # two parameters
            ({"input": [1, 2, 3], "output": {"a": 1}}, [[1, 2, 3]], {"a": 1}),
            ({"input": "", "output": "1"}, [], 1),
        ],
    )
    def test_what_people_write_becomes_a_call(self, case, arguments, returns):
        problem = CodingProblem.of([case], asked("```python\ndef f(a, b):\n    pass\n```").messages)
        assert (problem.cases[0].arguments, problem.cases[0].returns) == (arguments, returns)

    @pytest.mark.parametrize(
        ("truth", "why"),
        [
            (None, "is missing"),
            ("[", "not JSON"),
            ("5", "no test cases"),
            ("[]", "no test cases"),
            ("[5]", "no input and output in case 1"),
            ('[{"input": "5", "output": null}]', "no input and output in case 1"),
            ([{"input": "5"}], "is list"),
            ([{"input": "5", "output": "25", "testtype": "functional"}], "func_name"),
            ([{"input": "5", "output": "25", "testtype": "functional", "metadata": {"func_name": "a b"}}], "func_name"),
            ([{"input": "5", "output": "25", "metadata": "x"}], "metadata"),
            (25, "is number"),
            ("[" * 100_000, "not JSON"),
        ],
    )
    def test_a_ground_truth_without_cases_is_a_fault_that_says_why(self, truth, why):
        requirements = requirements_of("lcb")
        assert why in str(requirements.problem(truth))
        requirements.encode(truth)
        with pytest.raises(EnvironmentFault, match=re.escape(why)):
            make("lcb", task_of("lcb", truth))

    def test_rows_for_skyrl_have_what_its_environment_reads(self):
        encode = requirements_of("lcb").encode
        assert json.loads(encode(SQUARES)) == SQUARES
        assert json.loads(encode([{"input": [1, "a", [2]], "output": 2.5}])) == [
            {"input": "1\na\n[2]", "output": "2.5"}
        ]
        assert json.loads(encode(SQUARES, asked(STUB))) == called(
            [(c["input"], c["output"]) for c in SQUARES], "square"
        )
        (reverse,) = json.loads(encode([{"input": "ab", "output": "ba"}], asked("```\ndef f(s):\n    pass\n```")))
        assert (reverse["input"], reverse["output"]) == ('"ab"', '"ba"')

    def test_json_that_says_it_all_is_stored_as_it_is(self):
        for cases in (SQUARES, called([("[1, 2]\n3", "[3]"), ('"a"', '"b"')])):
            text = json.dumps(cases, indent=1)
            assert requirements_of("lcb").encode(text, asked("?")) is text

    @pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
    def test_written_and_read_again_they_are_the_same(self, tmp_path, name):
        tasks = [asked(STUB), asked("?"), asked("?", json.dumps(SQUARES)), asked("?", called([("5", "25")]))]
        write_tasks(tasks, tmp_path / name, "skyrl")
        back = list(read_tasks(tmp_path / name))
        assert [task.ground_truth for task in back] == [task.ground_truth for task in tasks]
        assert [task.uid for task in back] == [task.uid for task in tasks]


class TestComparing:
    @pytest.mark.parametrize(
        ("given", "expected", "same"),
        [
            ("25", "25", True),
            ("25\n", "  25", True),
            ("1 2\n 3 \n\n", "1 2\n3", True),
            ("1.0 2", "1 2.00", True),
            ("1e3", "1000", True),
            ("1", "1\n1", False),
            ("1\n\n1", "1\n1", False),
            ("1  2", "1 2", True),
            ("a  b", "a b", False),
            ("YES", "Yes", False),
            ("0.1", "0.10000000000000001", False),
            ("50000000000000000", "50000000000000001", False),
            ("", "", True),
            ("", "x", False),
            ("nan", "nan", True),
            ("snan", "NaN", False),
            ("inf", "Infinity", True),
            ("1e999999999", "1", False),
            ("1e99999999999999999999999", "1", False),
            ("\ufffd", "x", False),
        ],
    )
    def test_lines_are_compared_without_spaces_and_as_numbers(self, given, expected, same):
        assert same_lines(given, expected) is same

    @pytest.mark.parametrize(
        ("given", "expected", "same"),
        [
            ("25", 25, True),
            ("25.0", 25, True),
            ("[1, [2]]", [1, [2]], True),
            ('{"a": null}', {"a": None}, True),
            ('"25"', 25, False),
            ("", None, False),
            ("null", None, True),
            ("[" * 100_000, [], False),
            ("9" * 10_000, 9, False),
        ],
    )
    def test_values_are_compared_as_json(self, given, expected, same):
        assert same_value(given, expected) is same

    @given(st.binary(max_size=300) | st.text('{}\n:,0123456789"abcdeghiknpstuvxz ', max_size=300).map(str.encode))
    def test_no_report_of_the_runner_makes_the_judge_fail(self, output):
        list(read_reports(output))

    def test_reports_end_where_they_are_broken(self):
        good = b'{"ended":"done","content":"25"}\n'
        assert [report.content for report in read_reports(good * 2)] == ["25", "25"]
        for bad in (b'{"ended":"won","content":"25"}\n', b'{"ended":"done"}\n', b"25\n"):
            assert len(list(read_reports(good + bad + good))) == 1
        assert len(list(read_reports(good + good[:-2]))) == 1


@pytest.mark.usefixtures("sandbox")
class TestLcb:
    @pytest.mark.parametrize(
        ("answer", "strict", "as_skyrl"),
        [
            (f"```python\n{PROGRAM}\n```\n```bash\npython a.py < 5\n```", 1.0, 0.0),
            (f"~~~python\n{PROGRAM}\n~~~", 1.0, 0.0),
            (f"```py\n{PROGRAM}```", 0.0, 1.0),
            (f"<think>```\n1\n```</think>```python\n{PROGRAM}\n```", 1.0, 1.0),
        ],
    )
    def test_to_the_letter_of_skyrl_gym_the_last_block_counts_whatever_it_is(self, answer, strict, as_skyrl):
        assert rewards(task_of("lcb", SQUARES), answer) == [strict]
        assert rewards(task_of("lcb", SQUARES, strict=False), answer) == [as_skyrl]

    def test_to_the_letter_of_skyrl_gym_leading_zeros_do_not_count(self):
        truth = [{"input": "7", "output": "007"}]
        assert rewards(task_of("lcb", truth), code("print(input())")) == [0.0]
        assert rewards(task_of("lcb", truth, strict=False), code("print(input())")) == [1.0]

    @pytest.mark.parametrize(
        ("answer", "reward", "why"),
        [
            (PROGRAM, 1.0, "right"),
            (f"{FUNCTION}\nif __name__ == '__main__':\n    print(square(int(input())))", 1.0, "right"),
            ("import sys\nprint(int(sys.stdin.buffer.read()) ** 2)", 1.0, "right"),
            ("import os\nos.write(1, str(int(os.read(0, 99)) ** 2).encode())", 1.0, "right"),
            ("for line in open(0):\n    print(int(line) ** 2)", 1.0, "right"),
            ("from __future__ import annotations\nprint(int(input()) ** 2)", 1.0, "right"),
            ("n = 2\ndef f():\n    global n\n    n = int(input()) ** n\nf()\nprint(n)", 1.0, "right"),
            ("print(int(input()) ** 2)\ntry:\n    input()\nexcept EOFError:\n    pass", 1.0, "right"),
            ("print(int(input()) ** 2)\nraise SystemExit(3)", 1.0, "right"),
            ("import os\nprint(int(input()) ** 2, flush=True)\nos._exit(0)", 1.0, "right"),
            ("import sys\nprint(int(input()) ** 2)\nprint('log', file=sys.stderr)", 1.0, "right"),
            ("@dataclass\nclass N:\n    n: int\nprint(N(int(input())).n ** 2)", 0.0, "NameError"),
            (
                "from dataclasses import dataclass\n@dataclass\nclass N:\n    n: 'int'\nprint(N(int(input())).n ** 2)",
                1.0,
                "right",
            ),
            ("print(comb(int(input()), 1) ** 2) if inf else deque()", 0.0, "case 2 of 3: ValueError"),  # names given
            ("import threading\nthreading.Thread(target=lambda: print(int(input()) ** 2)).start()", 1.0, "right"),
            ("import atexit\nn = int(input())\natexit.register(lambda: print(n * n))", 1.0, "right"),
            ("out = open(1, 'w')\nout.write(str(int(input()) ** 2))", 1.0, "right"),  # never closed
            ("import io\nclass Out:\n    to = io.BufferedWriter(io.FileIO(1, 'w'))\n"
             "Out.to.write(b'%d' % int(input()) ** 2)", 1.0, "right"),
            ("import io, os, sys\nsys.stdout = io.StringIO()\nprint(int(input()) ** 2)\n"
             "os.write(1, sys.stdout.getvalue().encode())", 1.0, "right"),
            ("import sys\nprint(int(input()) ** 2)\nsys.stdout.close()", 1.0, "right"),
            ("import threading, time\ndef late():\n    time.sleep(0.2)\n    print(int(input()) ** 2)\n"
             "threading.Thread(target=late).start()\nraise SystemExit", 1.0, "right"),
            (FUNCTION, 0.0, "case 1 of 3: nothing instead of 25"),
            ("print(int(input()) * 5)", 0.0, "case 2 of 3: -15 instead of 9"),
            ("print(25)", 0.0, "case 2 of 3: 25 instead of 9"),
            ("x =", 0.0, "SyntaxError: invalid syntax (line 1)"),
            ("n = int(input())\nprint(n * n)\n1 / 0", 0.0, "ZeroDivisionError: division by zero (line 3)"),
            ("import sys\nprint(25)\nsys.stdout.flush()\nimport os\nos._exit(1)", 0.0, "it failed"),
            ("import nowhere", 0.0, "No module named 'nowhere'"),
            ("\0", 0.0, "null bytes"),
            ("print('\udc80')", 0.0, ""),
            ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", 0.0, "killed by signal 11"),
        ],
    )  # fmt: skip
    def test_a_program_is_run_on_every_case(self, answer, reward, why):
        (step,) = play(task_of("lcb", SQUARES), code(answer))
        assert (step.reward, step.done, step.info["success"]) == (reward, True, reward == 1.0)
        assert why in step.info["explanation"]

    @pytest.mark.parametrize(
        ("answer", "reward"),
        [
            ("def f(a, b):\n    return a + b", 1.0),
            ("class Solution:\n    def f(self, a: List[int], b: List[int]) -> List[int]:\n        return a + b", 1.0),
            ("def f(a, b):\n    print('noise')\n    return tuple(a + b)", 1.0),
            ("def f(a, b):\n    return [(n,) for n in a + b]", 0.0),
            ("def f(a, b):\n    return [float(n) for n in a + b]", 1.0),
            ("def f(a, b):\n    return set(a + b)", 0.0),
            ("def f(a, b):\n    return {1: 2}", 0.0),
            ("def f(a, b):\n    yield from a + b", 0.0),
            ("def f(a):\n    return a", 0.0),
            ("def g(a, b):\n    return a + b", 0.0),
            ("f = lambda a, b: a + b", 1.0),
            ("class Solution:\n    def g(self):\n        pass\ndef f(a, b):\n    return a + b", 0.0),
            ("print(input())", 0.0),
            ("def f(a, b):\n    raise SystemExit(0)", 0.0),
            ("if __name__ == '__main__':\n    1 / 0\ndef f(a, b):\n    return a + b", 1.0),
            (
                "seen = []\ndef f(a, b):\n    seen.append(a)\n    return a + b if len(seen) == 1 else None",
                1.0,
            ),  # afresh
        ],
    )
    def test_a_function_is_called_on_every_case(self, answer, reward):
        assert rewards(task_of("lcb", called([("[1]\n[2]", "[1, 2]"), ("[]\n[3]", "[3]")])), code(answer)) == [reward]

    @pytest.mark.parametrize(
        ("answer", "reward"), [(FUNCTION, 1.0), (PROGRAM, 1.0), ("def square(n):\n    return n", 0.0), ("pass", 0.0)]
    )
    def test_the_prompts_function_may_be_answered_by_a_function_or_a_program(self, answer, reward):
        assert rewards(asked(STUB), code(answer)) == [reward]

    @pytest.mark.parametrize(
        ("answer", "reward"),
        [
            (f"```python\n{PROGRAM}\n```", 1.0),
            (f"```\n{PROGRAM}\n```", 1.0),
            (f"```python\n1/0\n```\nbetter:\n```python\n{PROGRAM}\n```", 1.0),
            (f"```python\n{PROGRAM}\n```\n```\n25\n```", 1.0),  # its output, in a block without a language
            (f"```python {PROGRAM}```", 1.0),
            (f"```python\n{PROGRAM}", 0.0),
            (PROGRAM, 0.0),
            ("", 0.0),
        ],
    )
    def test_the_last_block_of_code_counts(self, answer, reward):
        assert rewards(task_of("lcb", SQUARES), answer) == [reward]

    def test_natural_cases_are_taken_as_text(self):
        truth = [{"input": 5, "output": 25}, {"input": ["2", "ignored"], "output": [4]}]
        assert rewards(task_of("lcb", truth), code(PROGRAM)) == [1.0]

    def test_large_inputs_and_outputs_pass(self):
        numbers = "\n".join(map(str, range(300_000)))
        truth = [{"input": numbers, "output": numbers}] * 2
        assert rewards(task_of("lcb", truth), code("import sys\nprint(sys.stdin.read())")) == [1.0]
        assert rewards(
            task_of("lcb", called([(f'"{"x" * 10**6}"', f'"{"x" * 10**6}"')])), code("def f(s): return s")
        ) == [1.0]

    def test_unicode_passes(self):
        truth = [{"input": "你好 🎲", "output": "🎲 你好"}]
        assert rewards(task_of("lcb", truth), code("print(*reversed(input().split()))\nreversed")) == [1.0]

    @pytest.mark.thorough
    def test_many_episodes_at_once_agree(self):
        async def together() -> list[float]:
            task = task_of("lcb", SQUARES)
            answers = [PROGRAM if number % 3 else "print(0)" for number in range(24)]
            steps = await asyncio.gather(*(episode(task, code(answer)) for answer in answers))
            return [step.reward for (step,) in steps]

        assert asyncio.run(together()) == [float(bool(number % 3)) for number in range(24)]

    def test_a_cancelled_step_gives_its_place_back(self, monkeypatch):
        async def cancelled_then_right() -> float:
            environments = [make("lcb", task_of("lcb", SQUARES)) for _ in range(8)]
            endless = [asyncio.ensure_future(e.step(Action.of(code("while True: pass")))) for e in environments]
            await asyncio.sleep(0.5)
            for step in endless:
                step.cancel()
            assert all(
                isinstance(end, asyncio.CancelledError)
                for end in await asyncio.gather(*endless, return_exceptions=True)
            )
            return (await episode(task_of("lcb", SQUARES), code(PROGRAM)))[-1].reward

        assert asyncio.run(cancelled_then_right()) == 1.0


SECRET = "SECRET-0123456789abcdef"
LOOK = r"""
import glob, os, re
found = set()
def look(data):
    found.update(re.findall(rb"SECRET-[0-9a-f]{16}", data))
def read(path):
    try:
        with open(path, "rb", buffering=0) as file:
            os.set_blocking(file.fileno(), False)
            look(file.read(1 << 22) or b"")
    except OSError:
        pass
for process in filter(str.isdigit, os.listdir("/proc")):
    for path in glob.glob(f"/proc/{process}/fd/*") + [f"/proc/{process}/cmdline", f"/proc/{process}/environ"]:
        read(path)
    try:
        with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
            for line in maps:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(begin)
                    look(memory.read(min(end - begin, 1 << 26)))
                except (OSError, OverflowError, ValueError):
                    pass
    except OSError:
        pass
for folder, _, files in os.walk("/tmp"):
    for file in files:
        read(os.path.join(folder, file))
print(next(iter(found), b"nothing").decode())
"""
FORGE = r"""
import glob, json, os
report = json.dumps({"ended": "done", "content": "1"}).encode() + b"\n"
for path in glob.glob(f"/proc/{os.getppid()}/fd/*") + ["/proc/self/fd/3", "/dev/stdout"]:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(report * 9)
    except OSError:
        pass
"""


@pytest.mark.usefixtures("sandbox", "short")
class TestHostileAnswers:
    @pytest.mark.parametrize(
        ("attempt", "why"),
        [
            (LOOK, "nothing instead of"),
            (FORGE, "instead of"),
            (FORGE + "os.kill(os.getppid(), 9)", "instead of"),
            ("import os\nos._exit(0)", "nothing instead of"),
            ("import os\nos.kill(os.getppid(), 9)", "it broke off"),
            ("import os, signal\nos.killpg(os.getpgid(os.getppid()), 9)", "it broke off"),
            ("import sys\nclass S(str):\n    def __eq__(s, o): return True\nsys.stdout.write(S('1'))", "instead of"),
            ("import sys, io\nsys.stdout = sys.__stdout__ = io.StringIO()\nprint(1)", "nothing instead of"),
            ("""print('{"ended": "done", "content": ""}')""", "instead of"),
            ("import sys\nsys.modules['__main__'].main = print\nsys.exit(0)", "nothing instead of"),
            ("while True: pass", "did not end in time"),
            ("import time\ntime.sleep(60)", "did not end in time"),
            ("import signal\nfor n in (14, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", "not end in time"),
            ("import os\nwhile True: os.fork()", ""),
            ("x = bytearray(3 << 30)", "MemoryError"),
            ("import os\nfor _ in range(9):\n    os.fork()\nx = bytearray(99 << 20)\nimport time\ntime.sleep(9)", ""),
            ("while True: print('x' * 9999)", ""),
            ("with open('/tmp/x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))", ""),
            ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", ""),
            ("import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(60)", "nothing instead of"),
            ("open('/root/x', 'w')", "Error"),
            ("import socket\nsocket.create_connection(('1.1.1.1', 80), 1)", "Error"),
        ],
    )  # fmt: skip
    @pytest.mark.quick_cases(3)
    def test_cheating_or_running_wild_earns_nothing(self, attempt, why):
        task = task_of("lcb", [{"input": "a", "output": SECRET}, {"input": "b", "output": f"{SECRET}2"}])
        (step,) = play(task, code(attempt))
        assert (step.reward, step.info["success"]) == (0.0, False)
        assert why in step.info["explanation"]

    @pytest.mark.parametrize(
        "attempt",
        [
            "class Same:\n    def __eq__(self, other): return True\ndef f(n): return Same()",
            "class Same(int):\n    def __eq__(self, other): return True\ndef f(n): return Same(0)",
            "import json\njson.dumps = lambda value: 'true'\ndef f(n): return 25",
            "import os\nos.write(3, b'25')\nos._exit(1)\ndef f(n): pass",
            "import os\ndef f(n): os._exit(0)",
            "import builtins\nbuiltins.isinstance = lambda *_: True\ndef f(n): return object()",
        ],
    )
    def test_a_function_cannot_answer_for_the_judge(self, attempt):
        assert rewards(task_of("lcb", called([("5", "25"), ("3", "9")])), code(attempt)) == [0.0]

    def test_what_one_case_leaves_running_does_not_answer_for_the_next(self):
        attempt = "import os\nprint(1)\nif os.fork() == 0:\n    os.setsid()\n    while True: pass"
        assert rewards(task_of("lcb", [{"input": "", "output": "1"}, {"input": "", "output": "2"}]), code(attempt)) == [
            0.0
        ]


class TestSearchCode:
    @pytest.fixture
    def ask(self, sandbox: None, tmp_path: Path) -> Any:
        (tmp_path / "corpus.jsonl").write_text('{"contents": "The number of the day is 42. #### 41"}\n')

        def ask(truth: Any = "42", **extra: Any) -> Task:
            return task_of("searchcode", truth, corpus=str(tmp_path / "corpus.jsonl"), **extra)

        return ask

    def test_it_searches_and_computes_before_the_solution(self, ask):
        steps = play(
            ask(max_turns=3),
            "<tool><search>number of the day</search></tool>",
            "<tool><python>print(6 * 7)</python></tool>",
            "<solution>#### 42</solution>",
        )
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
        assert shown(steps[0]) == '{"result": "Doc 1: The number of the day is 42. #### 41\\n"}'
        assert shown(steps[1]) == "42"
        assert steps[-1].info["metrics"] == {
            "turns": 3, "searches": 1, "search_failures": 0, "programs": 1, "program_failures": 0,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("actions", "reward"),
        [
            (["<solution>#### 42</solution>"], 1.0),
            (["#### 42", "no more"], 0.0),
            (["#### 41", "<solution>#### 42</solution>"], 1.0),
            (["<solution>42</solution>"], 1.0),
            (["<tool><python>print('####', 42)</python></tool>", "that is it"], 0.0),  # the program said it
            (["<tool><search>number</search></tool>", "<solution>#### 42</solution>"], 1.0),  # and so did a document
        ],
    )
    def test_the_number_in_the_solution_counts(self, ask, actions, reward):
        assert rewards(ask(), *actions)[-1] == reward

    @pytest.mark.parametrize(
        ("actions", "reward"),
        [
            (["#### 42", "no more"], 1.0),
            (["#### 41", "<solution>#### 42</solution>"], 0.0),
            (["<solution>42</solution>"], 0.0),
            (["<tool><python>print('####', 42)</python></tool>", "that is it"], 0.0),
        ],
    )
    def test_to_the_letter_of_skyrl_gym_the_first_number_counts(self, ask, actions, reward):
        assert rewards(ask(strict=False), *actions)[-1] == reward

    def test_two_turns_unless_the_row_says_otherwise(self, ask):
        assert len(play(ask(), *["?"] * 9)) == 2
        steps = play(ask(max_turns=4), *["?"] * 9)
        assert (len(steps), steps[-1].done, steps[-1].truncated) == (4, True, True)

    @pytest.mark.parametrize(
        ("action", "observed"),
        [
            ("hm", "No <tool>...</tool> block"),
            ("<tool>hm</tool>", "No valid inner tool tag"),
            ("<tool><shell>ls</shell></tool>", "Tool 'shell' not found"),
            ("<tool><python>print(1</python></tool>", "SyntaxError"),
            ("<tool><python>import sys; print(1); print(2, file=sys.stderr)</python></tool>", "Python code: 2"),
            ("<tool><python>print('x' * 20_000)</python></tool>", "x\n...\nx"),
            ("<tool><python>while True: print('x' * 9999)</python></tool>", "It printed too much."),
            ("<tool><python>bytearray(2 << 30)</python></tool>", "MemoryError"),
            ("<tool><python>open('/etc/shadow')</python></tool>", "Error"),
            ("<tool><python>import socket; socket.create_connection(('1.1.1.1', 80), 1)</python></tool>", "Error"),
            ("<tool><python>'\udc80'</python></tool>", "SyntaxError"),
            ("<tool><python>pass</python></tool>", ""),
        ],
    )  # fmt: skip
    def test_the_policy_is_told_what_a_tool_says(self, ask, action, observed):
        (step,) = play(ask(), action)
        assert observed in shown(step)
        assert len(shown(step)) < 10_000
        if not observed:
            assert step.observation.messages() == []

    def test_a_program_without_end_is_stopped(self, ask, monkeypatch):
        monkeypatch.setattr("treetune.tasksets.search.SECONDS", 0.5)
        (step,) = play(ask(), "<tool><python>while True: pass</python></tool>")
        assert shown(step) == "Error executing Python code: Execution timed out after 0.5 seconds."

    @pytest.mark.parametrize("truth", [42, 42.0])
    def test_a_number_is_a_ground_truth_too(self, ask, truth):
        assert rewards(ask(truth), "<solution>#### 42</solution>") == [1.0]

    def test_a_list_is_none(self):
        with raises_code("environment", "reward_spec.ground_truth"):
            make("searchcode", task_of("searchcode", ["42"]))

    @given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", "\n", "<", "</c>"])).map("".join))
    def test_the_tool_is_what_the_pattern_finds(self, text):
        found = re.search(r"<(\w+)>(.*?)</\1>", text, re.DOTALL)
        assert find_tool(text) == ((found[1], found[2].strip()) if found else (None, ""))

    @pytest.mark.parametrize("part", ["<tool>", "<tool><a>", "<a>", "</a>", "<solution>", "<aaaa"])
    def test_a_huge_action_is_read_once(self, ask, part):
        action = "<tool>" + part * (500_000 // len(part)) + "</tool>"
        assert len(play(ask(), action, action)) == 2

    def test_no_action_makes_it_fail(self, ask):
        for action in ("", " ", "\0", "\udc80", "<tool></tool>", "<tool><search></search></tool>", {"a": 1}, None, 5):
            for step in play(ask(), action, action):
                assert step.reward == 0.0


class TestWithoutASandbox:
    """Code does not run at all: neither unconfined nor later."""

    @pytest.fixture
    def none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unavailable(*_: Any, **__: Any) -> Any:
            raise SandboxUnavailable("bwrap not installed", remedy="apt-get install bubblewrap")

        monkeypatch.setattr("treetune.sandbox.require", unavailable)

    @pytest.mark.parametrize(("name", "truth"), [("lcb", SQUARES), ("searchcode", "42")])
    def test_the_episode_is_refused_before_the_policy_is_asked(self, none, name, truth):
        task = task_of(name, truth)
        said = Replay([])
        trace = asyncio.run(run_rollout(Rows(), task, said))
        assert trace.outcome is Outcome.ENVIRONMENT_ERROR
        assert "bwrap not installed" in trace.failure.message
        assert "apt-get install bubblewrap" in trace.failure.message

    def test_a_step_alone_is_refused_too(self, none):
        with raises_code("no-sandbox", "bwrap"):
            asyncio.run(make("lcb", task_of("lcb", SQUARES)).step(Action.of(code(PROGRAM))))
        with raises_code("no-sandbox", "bwrap"):
            asyncio.run(
                make("searchcode", task_of("searchcode", "42")).step(Action.of("<tool><python>1</python></tool>"))
            )

    @pytest.mark.parametrize(("name", "refused"), [("lcb", True), ("searchcode", True), ("gsm8k", False)])
    def test_a_dataset_that_names_such_an_environment_is_refused_before_its_first_task(
        self, monkeypatch, tmp_path, name, refused
    ):
        (tmp_path / "rows.jsonl").write_text('{"q": "?", "a": "5"}')
        taskset = load_task(
            {
                "loading_params": {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "rows.jsonl")}},
                "prompt_template": "{q}",
                "ground_truth": "a",
                "env_class": name,
            }
        )
        monkeypatch.setattr("treetune.sandbox.probe", lambda: Capability(cause="no bwrap", remedy="install it"))
        with raises_code("taskset", "DatasetTaskset", "bwrap") if refused else nullcontext():
            refuse_unservable(taskset)

    def test_the_contracts_say_who_needs_one(self):
        needing = {"lcb", "searchcode"}
        names = ("aime", "gsm8k", "gsm8k_multi_turn", "lcb", "search", "searchcode", "text2sql")
        assert {name for name in names if requirements_of(name).sandbox} == needing


class Rows(Taskset):
    """Tasks that name their environment."""

    def load_tasks(self) -> list[Task]:
        return [task_of("lcb", SQUARES)]


def test_a_rollout_keeps_what_was_found(sandbox):
    trace = asyncio.run(run_rollout(Rows(), asked(STUB), Replay([Completion(text=code("def square(n): return 25"))])))
    assert (trace.outcome, trace.reward, trace.success) == (Outcome.COMPLETED, 0.0, False)
    assert trace.metrics == {"cases": 3, "passed": 1}
    assert trace.explanation == "case 2 of 3: 25 instead of 9"


def test_gold_is_right_whatever_the_cases_are(sandbox):
    awkward = [
        SQUARES,
        called([("5", "25"), ("-3", "9")]),
        [{"input": "```\n'\"\\`", "output": "`\\``'\n```"}],
        [{"input": " 1 2\n", "output": "3\n\n4\n"}, {"input": "", "output": ""}],
        called([('[1, {"a": null}]\n"`"', '{"b": [1.5, "```"]}'), ("", "1")]),
        [{"input": 5, "output": 25}],
    ]

    async def golds() -> list[float]:
        tasks = [asked("?", truth) for truth in awkward] + [
            asked(STUB, truth) for truth in (SQUARES, [{"input": "ab", "output": "ba"}])
        ]
        tasks.append(task_of("lcb", SQUARES, solution=PROGRAM))
        tasks.append(task_of("lcb", SQUARES, solution=f"It is\n```python\n{PROGRAM}\n```"))
        return [(await episode(task, lcb.LcbEnvironment.gold(task)))[-1].reward for task in tasks]

    assert asyncio.run(golds()) == [1.0] * 10


def test_gold_of_a_solution_that_is_wrong_earns_nothing(sandbox):
    task = task_of("lcb", SQUARES, solution="print(0)")
    assert rewards(task, lcb.LcbEnvironment.gold(task)) == [0.0]


def test_there_is_no_gold_without_cases():
    assert lcb.LcbEnvironment.gold(task_of("lcb", "nothing")) is None
    assert lcb.LcbEnvironment.gold(Task(prompt="?", env_class="lcb")) is None


def test_the_runner_needs_nothing_of_treetune():
    text = lcb.CASE_RUNNER.decode()
    assert not re.search(r"^(import|from) (treetune|msgspec)", text, re.M)  # what is indented is for type checkers
