"""The real skyrl-gym beside our environments of the same name: the same actions, the same rewards, step by step, where
rows say `strict: false`; and what differs where they do not."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import venvs
from retriever import Retriever

from treetune import Action, Task, make
from treetune.core.environment import requirements_of
from treetune.sandbox import probe
from treetune.system.threads import call
from treetune.tasksets.code.lcb import LcbEnvironment

pytestmark = pytest.mark.slow

THEIRS = """
import functools, json, sys
from types import SimpleNamespace
import skyrl_gym
from skyrl_gym.envs.searchcode import env as searchcode

def play(case):
    # The one environment that takes no address.
    url = case["config"]["search_url"]
    searchcode.SearchToolGroup = functools.partial(searchcode.SearchToolGroup.func, search_url=url)
    try:
        env = skyrl_gym.make(case["env_class"], env_config=SimpleNamespace(**case["config"]), extras=case["extras"])
        env.init([{"role": "user", "content": "?"}])
        steps = []
        for action in case["actions"]:
            out = env.step(action)
            steps.append([float(out["reward"]), bool(out["done"]), [m["content"] for m in out["observations"]]])
            if out["done"]:
                break
        env.close()
        return steps
    except Exception as error:
        return type(error).__name__

searchcode.SearchToolGroup = functools.partial(searchcode.SearchToolGroup)
json.dump([play(case) for case in json.load(open(sys.argv[1]))], open(sys.argv[2], "w"))
"""

Steps = list[list[Any]]
"""Reward, done and observations of each step; or the name of the error that ended it."""

MATH = [
    "#### 5", "#### 6", "####5", "#### 5.", "#### -5", "#### 1,000", "#### 1000", "#### $5", "####  5", "5", "",
    "#### ", "#### 5 #### 6", "#### 6\n#### 5", "##### 5", "so\n#### 5\n", "#### 5.0", "#### ,", "#### .",
    "#### 0.25", "####\n5", "你好 #### 5", "#### ５", "\0#### 5", "x" * 100_000 + "#### 5",
]  # fmt: skip
AIME = [
    "Answer: 204", "Answer: $204$", "Answer: \\boxed{204}", "Answer: $\\boxed{204}$", "answer:204", "ANSWER : 204.",
    "\\boxed{204}", "204", "", "Answer:", "Answer: ", "Answer:\n\n204", "Answer: 1\nAnswer: 204",
    "Answer: 204\nAnswer: 1", "Answer: x=204", "Answer: 204<|im_end|>", "Answer: 1,204", "Answer: {1,}204",
    "Answer: 204 degrees", "Answer: 204^\\circ", "Answer: \\text{204}", "Answer: \\frac12", "Answer: \\frac{1}{2}",
    "Answer: \\sqrt3", "Answer: a 204", "Answer: the 204", "Answer: 204" + " " * 290, "Answer: 204" + " " * 280,
    "Answer: \\$204", "Answer: 204.$", "Answer: $a$ and $204$", "Answer: \\mathrm{th}204", "Answer: \\overline{204}",
    "Answer: \\textbf{204}", "**Answer:** 204", "Answer: \\mbox{204}", "Answer: 204\\ units", "Answer: ２０４",
    "Answer: [INVALID]", "Answer: 204 = 205", "Answer: 204,\\!000", "Answer: 0204",
]  # fmt: skip
SQL_PARTS = [
    "<think>t</think>", "<think>", "</think>", "<THINK>t</THINK>", "text", " \n", "</observation>", "<observation>",
    "<sql>SELECT name FROM pet</sql>", "<sql>SELEC</sql>", "<sql>", "</sql>", "<SQL>SELECT 1</SQL>",
    "<solution>SELECT name FROM pet</solution>", "<solution>SELECT name FROM pet ORDER BY age, name</solution>",
    "<solution>SELECT age FROM pet</solution>", "<solution>SELEC</solution>", "<solution></solution>",
    "<solution>", "</solution>", "<solution>SELECT DISTINCT name FROM pet WHERE age > 0 OR age IS NULL</solution>",
]  # fmt: skip
SEARCH_PARTS = [
    "<search>capital</search>", "<search> </search>", "<search>", "</search>", "<answer>Paris</answer>", "text",
    "<answer> the PARIS! </answer>", "<answer>Rome</answer>", "<answer>", "</answer>", "Paris", "<answer></answer>",
    "<answer>An a the</answer>", "<Answer>Paris</Answer>", "<answer>Pa ris</answer>", "<answer>\nParis\n</answer>",
]  # fmt: skip

SEARCHCODE_PARTS = [
    "<tool><search>capital</search></tool>", "<tool><python>print(40 + 2)</python></tool>", "<tool>", "</tool>", "text",
    "<tool><python>print('a');print('b')</python></tool>", "<tool><shell>ls</shell></tool>", "<tool><a>b</a></tool>",
    "<tool>search</tool>", "<tool> <search> x </search> <python>print(1)</python></tool>", "<search>x</search>",
    "<solution>#### 42</solution>", "<solution>", "</solution>", "#### 42", "#### 41", "<solution>42</solution>", "\n",
]  # fmt: skip
PROGRAMS = [
    "import sys\nwhile line := sys.stdin.readline():\n    print(int(line) ** 2)", "input()\ninput()",
    "n = int(input())\ntry:\n    input()\nexcept EOFError:\n    print(n * n)",
    "print(int(input()) ** 2)", "import sys\nprint(int(sys.stdin.read()) ** 2)", "print(int(input()) * 5)", "1 / 0",
    "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2)", "print(25)", "", "pass", "x =", "import nowhere",
    "def main():\n    n = int(input())\n    print(n * n)\n\nif __name__ == '__main__':\n    main()", "print()",
    "print(int(open(0).read()) ** 2)", "n = int(input())\nprint(n * n)\nexit(3)", "print(float(int(input()) ** 2))",
    "n = int(input())\nprint(n * n)\nraise ValueError", "print(' ', int(input()) ** 2, '  ')\nprint()", "print(nan)",
    "print(reduce(lambda a, b: a * b, [int(input())] * 2))", "print(int(input()) ** 2)\nprint('more')", "exit()",
    "import math, collections\nprint(math.prod([int(input())] * 2))", "def square(n):\n    return n * n", "print('25')",
    "n = int(input('? '))\nprint(n * n)", "import sys\nn = int(input())\nsys.stdout.write(str(n * n))",
    "while True: 1/0",
    "class A:\n    def f(self, n):\n        return n * n\nprint(A().f(int(input())))",
    "lines = [input()]\nprint(lines)",
    "s = input()\nprint(f'{int(s) ** 2:.6f}')", "print(int(input()) ** 2, file=sys.stderr)",
    "print(*[int(input()) ** 2])",
    "import time\nprint(int(input()) ** 2)", "from math import *\nprint(int(pow(int(input()), 2)))", "raise SystemExit",
]  # fmt: skip
FUNCTIONS = [
    "def f(a, b):\n    return a + b",
    "class Solution:\n    def f(self, a: List[int], b: List[int]):\n        return a + b",
    "def f(a, b):\n    print(a)\n    return tuple(a + b)", "def f(a, b):\n    return [(n,) for n in a + b]",
    "f = 5", "",
    "def f(a, b):\n    return [float(n) for n in a + b]", "def f(a, b):\n    return set(a + b)",
    "def f(a):\n    return a",
    "def g(a, b):\n    return a + b", "f = lambda a, b: a + b", "def f(a, b):\n    return str(a + b)",
    "class Solution:\n    def g(self):\n        pass\ndef f(a, b):\n    return a + b", "def f(a, b):\n    exit(0)",
    "x =",
    "if __name__ == '__main__':\n    1 / 0\ndef f(a, b):\n    return a + b", "def f(*both):\n    return sum(both, [])",
    "def f(a, b):\n    return None", "def f(a, b):\n    a.extend(b)\n    return a",
    "def f(a, b):\n    yield from a + b",
    "def f(a, b):\n    return {n: n for n in a}", "def f(a, b):\n    return list(chain(a, b))", "1 / 0",
    "def f(a, b): 1/0",
    "def f(a, b=None):\n    return Counter(a)", "def f(a, b):\n    return json.dumps(a)",
    "def f(a, b):\n    return -inf",
]  # fmt: skip


@pytest.fixture(scope="module")
def python() -> Path:
    return venvs.venv(*venvs.SKYRL_GYM)


@pytest.fixture(scope="module")
def search_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("databases")
    for layout in ("spider/database", "bird/train/train_databases", "SynSQL-2.5M/databases"):
        file = root / layout / "pets" / "pets.sqlite"
        file.parent.mkdir(parents=True)
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE pet (name TEXT, age INTEGER)")
            connection.executemany("INSERT INTO pet VALUES (?, ?)", [("Rex", 3), ("Mia", 5), ("Mia", 5), ("Tom", None)])
        connection.close()
    return root


class Sides:
    """Plays the same cases on both sides."""

    def __init__(self, python: Path, search_url: str, databases: Path, folder: Path) -> None:
        self._python, self._folder = python, folder
        self._config = {"db_path": str(databases), "search_url": search_url}
        self._config |= {"topk": 3, "timeout": 5, "log_requests": False}

    def theirs(self, cases: list[tuple[Task, list[str]]]) -> list[Steps | str]:
        given, taken = self._folder / "cases.json", self._folder / "steps.json"
        rows = [
            {"env_class": task.env_class, "config": self._config, "extras": row_of(task), "actions": actions}
            for task, actions in cases
        ]
        given.write_text(json.dumps(rows))
        venvs.run(self._python, "-c", THEIRS, given, taken, PATH=f"{self._python.parent}:{os.environ['PATH']}")
        steps: list[Steps | str] = json.loads(taken.read_text())
        return steps

    def ours(self, cases: list[tuple[Task, list[str]]]) -> list[Steps | str]:
        async def play(task: Task, actions: list[str]) -> Steps | str:
            steps = []
            try:
                environment = make(str(task.env_class), task)
                await call(environment.start)
                for action in actions:
                    step = await call(environment.step, Action.of(action))
                    observations = [message["content"] for message in step.observation.messages()]
                    steps.append([step.reward, step.done, observations])
                    if step.done:
                        break
                await call(environment.close)
            except Exception as error:
                return type(error).__name__
            return steps

        async def all_of_them() -> list[Steps | str]:
            return await asyncio.gather(*(play(task, actions) for task, actions in cases))

        return asyncio.run(all_of_them())

    def differing(self, cases: list[tuple[Task, list[str]]]) -> list[tuple[Any, ...]]:
        """The cases whose rewards or ends differ."""
        pairs = zip(cases, self.ours(cases), self.theirs(cases), strict=True)
        return [(task, actions, ours, theirs) for (task, actions), ours, theirs in pairs if ends(ours) != ends(theirs)]


def ends(steps: Steps | str) -> Any:
    return steps if isinstance(steps, str) else [(reward, done) for reward, done, _ in steps]


def row_of(task: Task) -> dict[str, Any]:
    """A task as skyrl-gym's environment of its name reads it."""
    requirements = requirements_of(task.env_class)
    assert requirements is not None
    extras = {key: task.extra_info[key] for key in ("db_id", "data", "max_turns") if key in task.extra_info}
    return {requirements.column: task.reward_spec, "extra_info": task.extra_info, **extras}


def task_of(env_class: str, truth: Any, **extra: Any) -> Task:
    """To the letter of skyrl-gym, unless `strict` says otherwise."""
    given = {"strict": False, **extra}
    return Task(prompt="?", env_class=env_class, reward_spec={"ground_truth": truth}, extra_info=given)


def transcripts(parts: list[str], count: int, turns: int) -> list[list[str]]:
    chance = random.Random(7)
    return [
        ["".join(chance.choices(parts, k=chance.randint(1, 4))) for _ in range(chance.randint(1, turns))]
        for _ in range(count)
    ]


@pytest.fixture
def sides(python, search_url, databases, tmp_path, monkeypatch) -> Sides:
    monkeypatch.setenv("TREETUNE_SEARCH_URL", search_url)
    monkeypatch.setenv("TREETUNE_TEXT2SQL_DB", str(databases))
    return Sides(python, search_url, databases, tmp_path)


def test_gsm8k_rewards_agree(sides):
    truths = ["5", "1000", "-5", "0.25", "1,000", "5.0"]
    assert sides.differing([(task_of("gsm8k", truth), [action]) for truth in truths for action in MATH]) == []


def test_gsm8k_multi_turn_rewards_and_observations_agree(sides):
    chance = random.Random(7)
    cases = [
        (task_of("gsm8k_multi_turn", "5", **extra), chance.choices(MATH, k=6))
        for extra in ({}, {"max_turns": 1}, {"max_turns": 2}, {"max_turns": 3}, {"max_turns": "4"})
        for _ in range(40)
    ]
    assert sides.ours(cases) == sides.theirs(cases)


def test_aime_rewards_agree(sides):
    truths = ["204", "1204", "\\frac{1}{2}", "\\sqrt{3}", "$204$", "204 degrees", "204000"]
    assert sides.differing([(task_of("aime", truth), [action]) for truth in truths for action in AIME]) == []


def test_text2sql_rewards_agree(sides):
    gold = "SELECT name FROM pet"
    cases = [
        (task_of("text2sql", gold, db_id="pets", data=data, max_turns=3), actions)
        for data, count in (("spider", 400), ("bird", 20), ("synsql", 20))
        for actions in transcripts(SQL_PARTS, count, 3)
    ]
    think, solve = "<think>t</think>", "<solution>SELECT name FROM pet</solution>"
    look = think + "<sql>SELECT * FROM pet</sql>"
    cases += [
        (task_of("text2sql", gold, db_id="pets", data="spider"), actions)
        for actions in (
            [think + solve], [look, think + solve], [look, solve], [look, " \n" + think + solve], [look] * 9, ["?"] * 9,
            [look, "</observation>" + think + solve], [look, "</OBSERVATION>\n" + think + solve], [think + solve * 2],
        )
    ]  # fmt: skip
    assert sides.differing(cases) == []
    assert {steps[-1][0] for steps in sides.ours(cases)} == {-1.0, 0.0, 1.0}


def test_search_rewards_and_observations_agree(sides):
    cases = [
        (task_of("search", {"target": target}, **extra), actions)
        for target, extra in ((["Paris", "Lutetia"], {}), ("Paris", {"max_turns": 4}), (["the"], {"max_turns": 1}))
        for actions in transcripts(SEARCH_PARTS, 150, 4)
    ]
    assert sides.ours(cases) == sides.theirs(cases)
    assert {steps[-1][0] for steps in sides.ours(cases)} == {0.0, 1.0}


@pytest.fixture
def sandbox() -> None:
    if not probe().available:
        pytest.skip(f"no sandbox can start here: {probe().cause}")


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def called(*cases: tuple[str, str], name: str = "f") -> list[dict[str, Any]]:
    said = {"testtype": "functional", "metadata": {"func_name": name}}
    return [{"input": given, "output": expected, **said} for given, expected in cases]


def test_lcb_rewards_agree(sides, sandbox):
    squares = [{"input": "5", "output": "25"}, {"input": "-3", "output": "9\n"}, {"input": "0", "output": "0.0"}]
    words = [{"input": "2\na b", "output": "b a\n2", "testtype": "stdin", "metadata": {}}]
    word_programs = [
        "n = input()\nprint(*input().split()[::-1])\nprint(n)", "print('b a')\nprint('  2.0 ')", "print('b  a\\n2')",
        "print('b a')\nprint()\nprint(2)", "print('b a 2')", "print('B a\\n2')", "print('b a\\n2\\n\\n\\n')",
        "print('b a\\n2\\n3')",
        "import sys\nn, words = sys.stdin.readlines()\nprint(*words.split()[::-1])\nprint(n)",
    ]  # fmt: skip
    lists = called(("[1]\n[2]", "[1, 2]"), ("[]\n[3]", "[3]"))
    odd = (
        called(("[]\n[]", "null"), ("[]\n[]", "NaN")),
        called(("[]\n[]", "-Infinity")),
        called(("[1]\n[]", '{"1": 1}')),
    )
    cases = [(task_of("lcb", json.dumps(squares)), [fenced(code)]) for code in PROGRAMS]
    cases += [(task_of("lcb", json.dumps(words)), [fenced(code)]) for code in word_programs]
    cases += [(task_of("lcb", json.dumps(truth)), [fenced(code)]) for truth in (lists, *odd) for code in FUNCTIONS]
    right = "print(int(input()) ** 2)"
    cases += [
        (task_of("lcb", json.dumps(squares)), [answer])
        for answer in (
            right, f"```\n{right}\n```", f"```{right}```", f"```py\n{right}```",
            f"```python\n1\n```\n```python\n{right}\n```",
            f"```python\n{right}\n```\n```\n1\n```", f"```python\n{right}", f"~~~python\n{right}\n~~~", "", "``````",
            f"```python \n{right}\n```", f"```c++\n{right}\n```", f"<code>{right}</code>", f"```python\r\n{right}\n```",
        )
    ]  # fmt: skip
    assert sides.differing(cases) == []
    assert sum(steps[-1][0] for steps in sides.ours(cases[:20])) > 5


def test_searchcode_rewards_and_observations_agree(sides, sandbox):
    cases = [
        (task_of("searchcode", truth, **extra), actions)
        for truth, extra in (("42", {}), ("42", {"max_turns": 4}), ("41", {"max_turns": 1}))
        for actions in transcripts(SEARCHCODE_PARTS, 60, 4)
    ]
    assert sides.ours(cases) == sides.theirs(cases)
    assert {steps[-1][0] for steps in sides.ours(cases)} == {0.0, 1.0}


SQUARES = json.dumps([{"input": "5", "output": "25"}, {"input": "3", "output": "9"}])
ADD = json.dumps(called(("5", "5"), ("5", "5")))
SOLVED = "<think>t</think><solution>SELECT 1</solution>"
PETS = {"db_id": "pets", "data": "spider"}
DIFFERENCES = {
    "gsm8k, a number": (task_of("gsm8k", 5), ["#### 5"], 1.0, 0.0),
    "gsm8k, a float": (task_of("gsm8k", 5.0), ["#### 5"], 1.0, 0.0),
    "gsm8k, a list": (task_of("gsm8k", ["5"]), ["#### 5"], "EnvironmentFault", 0.0),
    "gsm8k, null": (task_of("gsm8k", None), ["#### 5"], "EnvironmentFault", 0.0),
    "gsm8k_multi_turn, a number": (task_of("gsm8k_multi_turn", 5, max_turns=1), ["#### 5"], 1.0, 0.2),
    "aime, a number": (task_of("aime", 5), ["Answer: 5"], 1.0, "AttributeError"),
    "search, a text": (task_of("search", "Paris"), ["<answer>Paris</answer>"], 1.0, "TypeError"),
    "search, a list": (task_of("search", ["Paris"]), ["<answer>Paris</answer>"], 1.0, "TypeError"),
    "text2sql, a solution that writes, where no rows are expected": (
        task_of("text2sql", "SELECT * FROM pet WHERE 0", **PETS),
        ["<think>t</think><solution>DELETE FROM pet</solution>"],
        0.0,
        1.0,
    ),
    "text2sql, a ground truth that cannot be run": (
        task_of("text2sql", "SELECT * FROM nowhere", **PETS),
        [SOLVED],
        "EnvironmentFault",
        0.0,
    ),
    "text2sql, a row that holds a tag": (
        task_of("text2sql", "SELECT 1", **PETS),
        ["<think>t</think><sql>SELECT char(60) || 'solution>'</sql>", SOLVED],
        1.0,
        -1.0,
    ),
    "text2sql, no `data` but a data source": (
        msgspec.structs.replace(task_of("text2sql", "SELECT 1", db_id="pets"), data_source="spider"),
        [SOLVED],
        1.0,
        "AssertionError",
    ),
    "searchcode, a number": (task_of("searchcode", 42), ["<solution>#### 42</solution>"], 1.0, 0.0),
    "searchcode, a number that a program printed": (
        task_of("searchcode", "42"), ["<tool><python>print('####', 42)</python></tool>", "so"], 0.0, 1.0,
    ),
    "lcb, bytes from standard input": (
        task_of("lcb", SQUARES), [fenced("import sys\nprint(int(sys.stdin.buffer.read()) ** 2)")], 1.0, 0.0,
    ),
    "lcb, bytes to standard output": (
        task_of("lcb", SQUARES), [fenced("import os\nos.write(1, b'%d' % int(input()) ** 2)")], 1.0, 0.0,
    ),
    "lcb, a global": (
        task_of("lcb", SQUARES),
        [fenced("n = 1\ndef f():\n    global n\n    n += int(input())\nf()\nprint((n - 1) ** 2)")],
        1.0,
        0.0,
    ),
    "lcb, an import from the future": (
        task_of("lcb", SQUARES), [fenced("from __future__ import annotations\nprint(int(input()) ** 2)")], 1.0, 0.0,
    ),
    "lcb, a case that sees another": (
        task_of("lcb", ADD), [fenced("seen = []\ndef f(n):\n    seen.append(n)\n    return sum(seen)")], 1.0, 0.0,
    ),
    "lcb, an object that equals everything": (
        task_of("lcb", ADD),
        [fenced("class Same:\n    def __eq__(self, other): return True\ndef f(n): return Same()")],
        0.0,
        1.0,
    ),
    "lcb, numbers": (
        task_of("lcb", json.dumps([{"input": 5, "output": 25}])), [fenced("print(int(input()) ** 2)")], 1.0, 0.0,
    ),
    "lcb, a function's text that is not a JSON": (
        task_of("lcb", json.dumps(called(("ab", "ba")))), [fenced("def f(s): return s[::-1]")], 1.0, 0.0,
    ),
}  # fmt: skip


STRICT = {
    "gsm8k": [
        ("5", ["#### 5/7", "#### 5e9", "#### 5 or 6", "#### 5 #### 6", "#### 5\n#### 6", "#### 5 million"], 0, 1),
        ("5", ["#### 5^2", "<think>#### 5</think>#### 6"], 0, 1),
        ("5", ["####5", "#### $5", "#### 5.", "#### 5.0", "#### **5**", "####\n5", "#### +5", "#### 2 + 3 = 5"], 1, 0),
        ("5", ["<think>#### 6</think>#### 5", "#### 1. Add\n#### 5"], 1, 0),
        ("5", ["#### 5 apples", "#### 5%"], 1, 1),
        ("56", ["#### 5,6"], 0, 1),
    ],
    "gsm8k_multi_turn": [("5", ["#### 5 or 6"], 0, 1), ("5", ["#### $5"], 1, 0)],
    "aime": [
        ("204", ["Answer: not $204$ but 3", "Answer: $204$ or $3$", "Answer: 3\nAnswer: 204", "Answer: 2 04"], -1, 1),
        ("204", ["Answer: 3 = 204"], -1, 1),
        ("204", ["**Answer:** 204", "Answer: 204.0", "Answer: 0204", "Answer: 204" + " " * 300], 1, -1),
        ("204", ["Answer: \\(204\\)"], 1, -1),
    ],
    "search": [
        ({"target": ["The"]}, ["<answer></answer>"], 0, 1),
        ({"target": ["5"]}, ["<answer>-5</answer>"], 0, 1),
        ({"target": ["15"]}, ["<answer>1.5</answer>"], 0, 1),
        ({"target": ["Paris"]}, ["<answer>Rome</answer><answer>Paris</answer>"], 0, 1),
        ({"target": ["Paris"]}, ["<answer>\\boxed{Paris}</answer>"], 1, 0),
    ],
    "searchcode": [
        ("42", ["#### 42 <solution>#### 41</solution>", "<solution>?</solution> #### 42"], 0, 1),
        ("42", ["#### 42<solution></solution>"], 0, 1),
        ("42", ["<solution>42</solution>"], 1, 0),
    ],
    "text2sql": [
        ("SELECT * FROM pet WHERE 0", ["<think>t</think><solution></solution>"], 0, 1),
        ("SELECT 1", ["<think>t</think><solution>```sql\nSELECT 1\n```</solution>"], 1, 0),
    ],
    "lcb": [(json.dumps(called(("5", "1"))), [fenced("def f(n): return True")], 0, 1)],
}  # fmt: skip
"""What strict answers, the default, change: by environment the ground truth, the answers, our reward and theirs."""
ANSWERS = {
    f"{name}, {answer!r} for {truth}": (
        task_of(name, truth, strict=True, max_turns=1, **(PETS if name == "text2sql" else {})),
        [answer],
        float(ours),
        float(theirs),
    )
    for name, rows in STRICT.items()
    for truth, answers, ours, theirs in rows
    for answer in answers
}


@pytest.mark.parametrize("table", [DIFFERENCES, ANSWERS], ids=["faults", "answers"])
def test_the_differences_are_those_that_the_docs_name(table, sides, sandbox):
    cases = [(task, actions) for task, actions, _, _ in table.values()]

    def last(steps: Steps | str) -> Any:
        return steps if isinstance(steps, str) else steps[-1][0]

    found = zip(table, map(last, sides.ours(cases)), map(last, sides.theirs(cases)), strict=True)
    assert {name: (ours, theirs) for name, ours, theirs in found} == {
        name: (ours, theirs) for name, (_, _, ours, theirs) in table.items()
    }


def written(signature: str, cases: Any) -> Task:
    """A problem that shows the function to write."""
    prompt = f"Write it.\n```python\ndef {signature}:\n    # YOUR CODE HERE\n```"
    return Task(prompt=prompt, env_class="lcb", reward_spec={"ground_truth": cases})


def test_what_our_writer_stores_is_rewarded_by_the_real_environment(sides):
    """The ground truths that people write, encoded by the all_requirements."""
    natural = [
        (task_of("gsm8k", 5), "#### 5"),
        (task_of("gsm8k_multi_turn", 5), "#### 5"),
        (task_of("aime", 204), "Answer: 204"),
        (task_of("search", ["Paris", "Lutetia"]), "<answer>Lutetia</answer>"),
        (task_of("search", "Paris"), "<answer>Paris</answer>"),
        (task_of("searchcode", 42), "<solution>#### 42</solution>"),
        (task_of("lcb", [{"input": "5", "output": "25"}]), fenced("print(int(input()) ** 2)")),
        (task_of("lcb", [{"input": 5, "output": 25}]), fenced("print(int(input()) ** 2)")),
        (task_of("lcb", [{"input": ["5", 6], "output": [30]}]), fenced("print(int(input()) * int(input()))")),
        (task_of("lcb", called(("ab\n", "True"))), fenced("def f(s): return s == 'ab'")),
        (written("square(n)", [{"input": "5", "output": "25"}]), fenced("def square(n): return n * n")),
        (written("f(s)", [{"input": "ab", "output": "ba"}]), fenced("def f(s): return s[::-1]")),
        (written("f(a, b)", [{"input": [[1], 2], "output": [1, 2]}]), fenced("def f(a, b): return [*a, b]")),
    ]
    # And what knows the cases by heart.
    natural += [(task, LcbEnvironment.gold(task)) for task, _ in natural if task.env_class == "lcb"]
    cases = []
    for task, gold in natural:
        requirements = requirements_of(task.env_class)
        assert requirements is not None
        cases.append((task_of(str(task.env_class), requirements.encode(task.ground_truth, task)), [gold]))
    assert [ends(steps) for steps in sides.theirs(cases)] == [[(1.0, True)]] * len(cases)
