"""What counts as the answer: hedged, wrong and empty replies that earn nothing, and many ways to say the right one."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from episodes import rewards, task_of
from hypothesis import given
from hypothesis import strategies as st

from treetune import Task
from treetune.core.score import judge
from treetune.sandbox import probe
from treetune.scorers import rule
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import read_amount, read_number
from treetune.scorers.reading.wording import list_items, read_text, same
from treetune.tasksets.alphabet_sort import AlphabetSortTask
from treetune.tasksets.arithmetic import Arithmetic
from treetune.tasksets.reverse_text import ReverseText
from treetune.tasksets.wikispeedia import LinkGraph, WikispeediaTask

Row = tuple[str, Any, str | list[str], str]
"""The environment or taskset, the ground truth, the reply or one a turn, and why it earns nothing or 1."""

NONE = "SELECT name FROM pet WHERE age > 90"
YOUNG = "SELECT name FROM pet WHERE age < 4"
T = "<think>t</think>"


def solve(sql: str) -> str:
    return f"{T}<solution>{sql}</solution>"


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


ONE = [{"input": "5", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}]
YES = [{"input": "5", "output": "true", "testtype": "functional", "metadata": {"func_name": "f"}}]
ONES = [{"input": "5", "output": "[1, [0]]", "testtype": "functional", "metadata": {"func_name": "f"}}]
SQUARE = [{"input": "5", "output": "25"}, {"input": "-3", "output": "9"}]
PETS = [["Rex", "Mia"]]

WRONG: list[Row] = [
    ("gsm8k", "5", "#### 5/7", "a fraction"),
    ("gsm8k", "5", "#### 5e9", "five thousand million"),
    ("gsm8k", "5", "#### 5 or 6", "two guesses on a line"),
    ("gsm8k", "5", "#### 5 #### 6", "two marks on a line"),
    ("gsm8k", "5", "#### 5\n#### 6", "the right one first, another last"),
    ("gsm8k", "5", "#### 6\n#### 5", "another first, the right one last"),
    ("gsm8k", "5", "#### 5\n#### 6\n#### 7\n#### 8", "lists all candidates"),
    ("gsm8k", "5", "#### 5, 6, 7", "a list"),
    ("gsm8k", "5", "#### 5 and a half", "5.5"),
    ("gsm8k", "5", "#### 5 million", "another number"),
    ("gsm8k", "5", "#### 5 thousand dollars", "another number"),
    ("gsm8k", "5", "#### 5-7", "a range"),
    ("gsm8k", "5", "#### 5 to 7", "a range"),
    ("gsm8k", "5", "#### 5 * 3", "not worked out"),
    ("gsm8k", "5", "#### 5^2", "not worked out"),
    ("gsm8k", "5", "#### 5?", "asked"),
    ("gsm8k", "5", "#### 5 is wrong", "denied"),
    ("gsm8k", "5", "#### not 5", "denied"),
    ("gsm8k", "5", "#### 5 = 6", "both at once"),
    ("gsm8k", "5", "#### 5x", "a coefficient"),
    ("gsm8k", "5", "#### 5 hours and 30 minutes", "two numbers"),
    ("gsm8k", "5", "<think>#### 5</think>#### 6", "a draft, then another answer"),
    ("gsm8k", "5", "<think>is it #### 5", "only thought"),
    ("gsm8k", "5", "```\n#### 5\n```\n#### 6", "a draft in code"),
    ("gsm8k", "5", 'You wrote "#### 5", I say\n#### 6', "a quote"),
    ("gsm8k", "5", "#### -5", "the wrong sign"),
    ("gsm8k", "5", "####", "empty"),
    ("gsm8k", "56", "#### 5,6", "two numbers are not one"),
    ("gsm8k_multi_turn", "5", ["#### 5 or 6", "#### 6 or 5", "?", "?", "?"], "hedged each turn"),
    ("gsm8k_multi_turn", "5", ["#### 4\n#### 5"] * 5, "two guesses each turn"),
    ("aime", "204", "Answer: not $204$ but 3", "denied"),
    ("aime", "204", "Answer: $204$ or $3$", "two guesses"),
    ("aime", "204", "Answer: $204$, $3$", "two guesses"),
    ("aime", "204", "Answer: $204$, or maybe 3", "two guesses"),
    ("aime", "204", "Answer: 204\nAnswer: 3", "the right one first"),
    ("aime", "204", "Answer: 3\nAnswer: 204", "the right one last"),
    ("aime", "204", "Answer: \\boxed{3} \\boxed{204}", "two boxes"),
    ("aime", "204", "Answer: \\boxed{204} \\boxed{3}", "two boxes"),
    ("aime", "204", "Answer: 2 04", "digits put together"),
    ("aime", "204", "Answer: 20 sue 4", "digits put together"),
    ("aime", "204", "Answer: 3 = 204", "both at once"),
    ("aime", "204", "Answer: 204!", "a factorial"),
    ("aime", "204", "Answer: $204x$", "a coefficient"),
    ("aime", "204", "Answer:", "empty"),
    ("aime", "\\sqrt{3}", "Answer: $\\sqrt3$ or $\\sqrt5$", "two guesses"),
    ("aime", "\\sqrt{3}", "Answer: $\\sqrt5$ and $\\sqrt3$", "two guesses"),
    ("math_verify", "204", "Answer: $3$ or $204$", "two guesses"),
    ("math_verify", "204", "Answer: $204$ or $3$", "two guesses"),
    ("math_verify", "204", "Answer: 3, 204", "a list"),
    ("math_verify", "204", "Answer: \\boxed{204}, \\boxed{3}", "two boxes"),
    ("math_verify", "204", "Answer: 204 \\text{ or } 3", "two guesses"),
    ("math_verify", "204", "Answer: \\{3, 204\\}", "a set"),
    ("math_verify", "204", "Answer: \\pm 204", "two values"),
    ("search", ["Paris"], "<answer>Paris</answer><answer>Rome</answer>", "two guesses"),
    ("search", ["Paris"], "<answer>Rome</answer><answer>Paris</answer>", "two guesses"),
    ("search", ["Paris"], "<answer>Paris or Rome</answer>", "two guesses"),
    ("search", ["Paris"], "<answer>not Paris</answer>", "denied"),
    ("search", ["5"], "<answer>-5</answer>", "the wrong sign"),
    ("search", ["15"], "<answer>1.5</answer>", "another number"),
    ("search", ["247"], "<answer>24/7</answer>", "another number"),
    ("search", ["1995"], "<answer>19-95</answer>", "another number"),
    ("search", ["The"], "<answer></answer>", "empty, for a truth that normalises to nothing"),
    ("search", ["A"], "<answer>the</answer>", "an article is not the other"),
    ("search", ["?"], "<answer>!</answer>", "one mark is not the other"),
    ("search", ["Paris"], "<think><answer>Paris</answer></think><answer>Rome</answer>", "a draft"),
    ("search", ["Paris"], "Paris", "no tag"),
    ("searchcode", "42", "#### 42 <solution>#### 41</solution>", "a draft beside the solution"),
    ("searchcode", "42", ["<tool><python>#### 42</python></tool>", "<solution>41</solution>"], "a draft in code"),
    ("searchcode", "42", ["#### 42", "<solution>I do not know</solution>"], "a draft in another turn"),
    ("searchcode", "42", "<solution>#### 42</solution><solution>#### 41</solution>", "two solutions"),
    ("searchcode", "42", "<solution>#### 41</solution><solution>#### 42</solution>", "two solutions"),
    ("searchcode", "42", "<solution>#### 42 or 41</solution>", "two guesses"),
    ("searchcode", "42", "<solution></solution> #### 42", "outside of the solution"),
    ("text2sql", NONE, solve(""), "empty, where no rows are expected"),
    ("text2sql", NONE, solve(";"), "no statement"),
    ("text2sql", NONE, solve("-- no such pet"), "a comment"),
    ("text2sql", NONE, solve("/* no such pet */"), "a comment"),
    ("text2sql", YOUNG, solve(YOUNG) + solve("SELECT 1"), "two solutions"),
    ("text2sql", YOUNG, solve(f"{YOUNG} UNION SELECT 'x'"), "more rows"),
    ("text2sql", YOUNG, solve(f"{YOUNG}; SELECT 1"), "two statements"),
    ("lcb", ONE, code("def f(n): return True"), "true is not 1"),
    ("lcb", YES, code("def f(n): return 1"), "1 is not true"),
    ("lcb", ONES, code("def f(n): return [True, [False]]"), "nor inside"),
    ("lcb", SQUARE, code("print(int(input()) ** 2)") + code("pass"), "another program last"),
    ("lcb", SQUARE, code("n = int(input())\nprint(n * n)\nprint(n * 2)"), "prints both"),
    ("rule", "5", "5 or 6 apples, or 5", "two guesses"),
    ("rule", "6", "5 or 6", "two guesses, the right one last"),
    ("rule", "6", "between 5 and 6", "a range"),
    ("rule", "6", "5-6", "a range"),
    ("rule", "6", "4, 5, 6", "lists all candidates"),
    ("rule", "6", "4\n5\n6", "lists all candidates"),
    ("rule", "6", "It is not 6.", "denied"),
    ("rule", "6", "Is it 6?", "asked"),
    ("rule", "6", "\\boxed{5} or \\boxed{6}", "two boxes"),
    ("rule", "5", "#### 5 or 6", "two guesses"),
    ("rule", "6", "#### 5\n#### 6", "two marks"),
    ("rule", "7", "2 + 7", "not worked out"),
    ("rule", "Paris", "\\boxed{Rome} \\boxed{Paris}", "two boxes"),
    ("rule", "Paris", "#### Rome\n#### Paris", "two marks"),
    ("rule", "Paris", "<think>x</think>", "empty"),
    ("rule", "10 am", "10 pm", "another unit"),
    ("arithmetic", "19", "18 or 19", "two guesses"),
    ("arithmetic", "19", "17, 18, 19", "lists all candidates"),
    ("arithmetic", "19", "18.19", "a part of another number"),
    ("arithmetic", "19", "x-19, no: 20-19", "not worked out"),
    ("arithmetic", "19", "It isn't 19", "denied"),
    ("arithmetic", "19", "19?", "asked"),
    ("arithmetic", "19", "minus 19", "the wrong sign"),
    ("arithmetic", "19", "3/19", "a fraction"),
    ("arithmetic", "19", "9" * 5000, "too long to be an int"),
    ("arithmetic", "-5", "12-5", "not worked out"),
    ("reverse-text", "pous enots", "pous enots or pous", "two guesses"),
    ("reverse-text", "pous enots", "pous\nenots", "in pieces"),
    ("reverse-text", "pous enots", "", "empty"),
    ("alphabet-sort", PETS, "Mia\nRex\nRex\nMia", "both orders"),
    ("alphabet-sort", PETS, "Rex\nMia", "the other order"),
    ("alphabet-sort", PETS, "", "empty"),
    ("wikispeedia", "Oak", "click Elm, Oak", "two links"),
    ("wikispeedia", "Oak", "click Elm or Oak", "two links"),
    ("wikispeedia", "Oak", "click Oak\nclick Elm", "another link last"),
    ("reasoning-gym", None, "<answer>TRUTH</answer><answer>0</answer>", "two guesses"),
    ("reasoning-gym", None, "<answer>0</answer><answer>TRUTH</answer>", "two guesses, the right one last"),
    ("reasoning-gym", None, "<answer>TRUTH or 0</answer>", "two guesses in one"),
    ("reasoning-gym", None, "TRUTH", "no tag"),
]  # fmt: skip

RIGHT: list[Row] = [
    ("gsm8k", "5", "#### 5", "as it is asked for"),
    ("gsm8k", "5", "so\n#### 5\n", "after the work"),
    ("gsm8k", "5", "####5", "no space"),
    ("gsm8k", "5", "####   5  ", "spaces"),
    ("gsm8k", "5", "####\n5", "on the next line"),
    ("gsm8k", "5", "#### $5", "a currency before"),
    ("gsm8k", "5", "#### 5%", "percent"),
    ("gsm8k", "5", "#### 5 apples", "a unit"),
    ("gsm8k", "5", "#### 5 miles per hour", "a longer unit"),
    ("gsm8k", "5", "#### 5 km/h", "a unit with a slash"),
    ("gsm8k", "5", "#### 5kg", "a unit without a space"),
    ("gsm8k", "5", "#### 5.", "a full stop"),
    ("gsm8k", "5", "#### 5.0", "a decimal"),
    ("gsm8k", "5", "#### 5.00 dollars", "a decimal with a unit"),
    ("gsm8k", "5", "#### +5", "a plus"),
    ("gsm8k", "5", "#### **5**", "bold"),
    ("gsm8k", "5", "**#### 5**", "bold all over"),
    ("gsm8k", "5", "#### $5$", "a formula"),
    ("gsm8k", "5", "#### \\boxed{5}", "a box"),
    ("gsm8k", "5", "#### 2 + 3 = 5", "with its sum"),
    ("gsm8k", "5", "#### x = 5", "with its name"),
    ("gsm8k", "5", "`#### 5`", "in backticks"),
    ("gsm8k", "5", "```\n#### 5\n```", "in a block"),
    ("gsm8k", "5", "#### 5\n#### 5.0", "said twice"),
    ("gsm8k", "5", "#### Step 1: add 2 and 3\n#### 5", "headings"),
    ("gsm8k", "5", "#### 1. Add\n2 + 3\n#### 2. Check\n#### 5", "numbered headings"),
    ("gsm8k", "5", "<think>#### 6</think>#### 5", "another draft"),
    ("gsm8k", "5", "#### 5\n\nI hope this helps! Ask 24/7.", "words after it"),
    ("gsm8k", "5", "#### The answer is 5", "a sentence"),
    ("gsm8k", "-5", "#### −5", "a minus of Unicode"),
    ("gsm8k", "-5", "#### -$5", "a debt"),
    ("gsm8k", "1000", "#### 1,000", "a thousands separator"),
    ("gsm8k", "1234567", "#### $1,234,567.00", "several of them"),
    ("gsm8k", "0.5", "#### 1/2", "a fraction of the same value"),
    ("gsm8k", "0.5", "#### .5", "no zero"),
    ("gsm8k", 5, "#### 5", "a number as truth"),
    ("gsm8k_multi_turn", "5", ["#### 5 apples"], "a unit"),
    ("searchcode", "42", "<solution>#### 42</solution>", "as it is asked for"),
    ("searchcode", "42", "<solution>42</solution>", "without the mark"),
    ("searchcode", "42", ["#### 41", "<solution>so\n#### 42.</solution>"], "a draft in another turn"),
    ("aime", "204", "Answer: 204", "as it is asked for"),
    ("aime", "204", "Answer: $204$", "a formula"),
    ("aime", "204", "Answer: \\boxed{204}", "a box"),
    ("aime", "204", "Answer: $\\boxed{204}$.", "both, and a full stop"),
    ("aime", "204", "Answer: \\(204\\)", "a formula of LaTeX"),
    ("aime", "204", "Answer: $\\boxed{\\text{204}}$", "a text in a box"),
    ("aime", "204", "**Answer:** 204", "a bold mark"),
    ("aime", "204", "**Answer: 204**", "bold"),
    ("aime", "204", "Final Answer: 204", "a longer mark"),
    ("aime", "204", "**Final Answer:**\n\nAnswer: 204", "a heading"),
    ("aime", "204", "Answer:\n\n204", "on the next line"),
    ("aime", "204", "answer : x = 204", "with its name"),
    ("aime", "204", "Answer: The value is $204$", "in a sentence"),
    ("aime", "204", "Answer: 204 degrees", "a unit"),
    ("aime", "204", "Answer: $204^\\circ$", "a degree sign"),
    ("aime", "204", "Answer: 204.0", "a decimal"),
    ("aime", "25", "Answer: 025", "three digits, as AIME writes it"),
    ("aime", "1204", "Answer: 1{,}204", "a separator of LaTeX"),
    ("aime", "204", "Answer: 204\nAnswer: $204$", "said twice"),
    ("aime", "204", "<think>Answer: 3</think>Answer: 204", "another draft"),
    ("aime", "204", "Answer: 204<|im_end|>", "a special token"),
    ("aime", "\\frac{1}{2}", "Answer: \\frac12", "a short fraction"),
    ("aime", "\\frac{1}{2}", "Answer: $\\dfrac{1}{2}$", "a large fraction"),
    ("aime", "\\sqrt{3}", "Answer: $\\sqrt3$", "a short root"),
    ("aime", "\\text{no solution}", "Answer: no solution", "a truth that denies"),
    ("math_verify", "\\frac{1}{2}", "Answer: 0.5", "by meaning"),
    ("math_verify", "\\sqrt{8}", "Answer: $2\\sqrt{2}$", "by meaning"),
    ("math_verify", "\\{1, 2\\}", "Answer: \\{2, 1\\}", "a set that is asked for"),
    ("math_verify", "1204", "Answer: $1,204$", "a thousands separator"),
    ("search", ["Paris"], "<answer>Paris</answer>", "as it is asked for"),
    ("search", ["Paris"], "<answer> the PARIS! </answer>", "case, article, punctuation"),
    ("search", ["Paris"], "<answer>**Paris**</answer>", "bold"),
    ("search", ["Paris"], "<answer>\\boxed{Paris}</answer>", "a box"),
    ("search", ["Paris"], "<answer>Paris</answer> I repeat: <answer>Paris.</answer>", "said twice"),
    ("search", ["Paris", "Lutetia"], "<answer>Paris</answer><answer>Lutetia</answer>", "two names of it"),
    ("search", ["1,500"], "<answer>1500</answer>", "a thousands separator"),
    ("search", ["COVID-19"], "<answer>Covid-19.</answer>", "a hyphen is not a minus"),
    ("search", ["The"], "<answer>the</answer>", "a truth that normalises to nothing"),
    ("search", ["Paris"], ["<answer>Paris", "<answer>Paris</answer>"], "a tag that was not closed in another turn"),
    ("text2sql", YOUNG, solve(YOUNG), "as it is asked for"),
    ("text2sql", YOUNG, solve(f"{YOUNG};"), "a semicolon"),
    ("text2sql", YOUNG, solve(f"\n```sql\n{YOUNG}\n```\n"), "in a block"),
    ("text2sql", YOUNG, solve("SELECT 'Rex' AS n UNION ALL SELECT 'Rex'"), "rows are a set"),
    ("text2sql", NONE, solve("SELECT name FROM pet WHERE age > 99"), "no rows"),
    ("lcb", ONE, code("def f(n): return 1"), "as it is asked for"),
    ("lcb", ONE, code("def f(n): return 1.0"), "a decimal"),
    ("lcb", YES, code("def f(n): return n == 5"), "a truth value"),
    ("lcb", SQUARE, code("pass") + code("print(float(input()) ** 2)"), "the last block, decimals"),
    ("rule", "5", "5", "alone"),
    ("rule", "5", "The answer is 5.", "in a sentence"),
    ("rule", "5", "2 and 3 make 5", "with its sum"),
    ("rule", "5", "2 + 3 = **5**", "bold"),
    ("rule", "1000", "so $1,000", "a currency"),
    ("rule", "-5", "It is minus 5", "in words"),
    ("rule", "5", "First 6, no.\nThen 5.\n\\boxed{5}", "a box"),
    ("rule", "72", "70, 71\n#### 72 apples", "a mark"),
    ("rule", "Paris", "**Paris**.", "bold"),
    ("rule", "Paris", "\\boxed{\\text{Paris}}", "a text in a box"),
    ("rule", ["a", "b"], "#### b", "any of several truths"),
    ("arithmetic", "19", "19", "alone"),
    ("arithmetic", "19", "12 + 7 = 19", "with its sum"),
    ("arithmetic", "19", "19.0", "a decimal"),
    ("arithmetic", "19", "The answer is **19**!", "a sentence"),
    ("arithmetic", "-19", "-19", "a minus"),
    ("arithmetic", "-19", "= −19", "a minus of Unicode"),
    ("arithmetic", "1919", "1,919", "a thousands separator"),
    ("reverse-text", "pous enots", " pous enots\n", "spaces"),
    ("reverse-text", "pous enots", "`pous enots`", "in backticks"),
    ("reverse-text", "pous enots", '"pous enots".', "in quotes"),
    ("alphabet-sort", PETS, "Mia\n\nRex\n", "as it is asked for"),
    ("alphabet-sort", PETS, "- Mia\n- Rex", "bullets"),
    ("alphabet-sort", PETS, "1. **Mia**\n2. **Rex**", "numbers, bold"),
    ("alphabet-sort", PETS, "```\nMia\nRex\n```", "in a block"),
    ("wikispeedia", "Oak", "click Oak", "as it is asked for"),
    ("wikispeedia", "Oak", "I choose the oak.\n`click oak`", "after a thought, in backticks"),
    ("reasoning-gym", None, "so <answer>TRUTH</answer>", "as it is asked for"),
    ("reasoning-gym", None, "<answer> **TRUTH** </answer>", "bold"),
    ("reasoning-gym", None, "<think><answer>0</answer></think><answer>TRUTH</answer>", "another draft"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pets") / "pets.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE pet (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pet VALUES (?, ?)", [("Rex", 3), ("Mia", 5)])
    connection.close()
    return file


def earn(name: str, truth: Any, reply: str | list[str], pets: Path) -> float:
    replies = reply if isinstance(reply, list) else [reply]
    task = Task(prompt="?", reward_spec={"ground_truth": truth})
    if name == "rule":
        return rule().score(replies[0], truth).reward
    if name in ("arithmetic", "reverse-text"):
        taskset: Any = Arithmetic() if name == "arithmetic" else ReverseText()
        return asyncio.run(judge(taskset, task, replies[0])).reward
    if name == "reasoning-gym":
        reasoning_gym = pytest.importorskip("treetune.tasksets.reasoning_gym")
        pytest.importorskip("reasoning_gym")
        taskset = reasoning_gym.ReasoningGym()
        task = taskset[0]
        return asyncio.run(judge(taskset, task, replies[0].replace("TRUTH", str(task.ground_truth)))).reward
    if name == "wikispeedia":
        graph = pets.with_name("trees.tsv")
        graph.write_text("Tree\tElm\nTree\tOak\nElm\tTree\n")
        digest, extra = LinkGraph.load(graph).digest, {"graph": str(graph)}
        task = WikispeediaTask(env_class=name, source="Tree", target=truth, distance=1, graph=digest, extra_info=extra)
    elif name == "alphabet-sort":
        task = AlphabetSortTask(env_class="alphabet-sort", rounds=truth)
    elif name == "math_verify":
        pytest.importorskip("math_verify")
        task = Task(prompt="?", env_class="aime", reward_spec={"ground_truth": truth, "method": "math_verify"})
    else:
        if name in ("lcb", "searchcode") and not probe().available:
            pytest.skip(f"no sandbox can start here: {probe().cause}")
        task = task_of(name, truth, **({"db_path": str(pets)} if name == "text2sql" else {}))
    return sum(rewards(task, *replies))


@pytest.mark.parametrize(("name", "truth", "reply", "why"), WRONG)
def test_a_reply_that_hedges_or_says_something_else_earns_nothing(name, truth, reply, why, pets):
    assert earn(name, truth, reply, pets) <= 0.0, why


@pytest.mark.parametrize(("name", "truth", "reply", "why"), RIGHT)
def test_the_right_answer_may_be_said_in_many_ways(name, truth, reply, why, pets):
    assert earn(name, truth, reply, pets) == 1.0, why


def test_the_catalogues_are_long_enough():
    assert min(len(WRONG), len(RIGHT)) >= 80


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5), ("-2.50", -2.5), ("1,000", 1000), ("1,00,000", 100000), ("5/8", 0.625), ("1 1/2", 1.5), ("5e9", 5e9),
        ("5,5", 5.5), ("5 or 6", None), ("5½", None), ("5 squared", None), ("1/0", None), ("1e99999999999", None),
        ("\\frac{3}{4}", 0.75), ("x = 5", 5), ("4 = 5", None), ("5 m^2", 5), ("5 2", None), ("", None), ("five", None),
    ],
)  # fmt: skip
def test_a_number_is_read_as_a_whole_or_not_at_all(text, value):
    assert read_number(text) == value


def test_long_numbers_are_compared_exactly():
    digits = "9" * 5000
    assert same(f"{digits[:2]},{digits[2:5]}", "99999")
    assert same(f"#{digits}"[1:], digits)
    assert not same(digits[:-1] + "8", digits)
    assert not same("1e999999999", "5")


PIECES = [
    "5",
    "-",
    "1,000",
    "####",
    " ",
    "\n",
    "\\boxed{",
    "}",
    "$",
    "=",
    "/",
    "e9",
    "or",
    "not",
    "?",
    "</think>",
    "½",
    "٣",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_no_text_makes_it_raise(text):
    for read in (read_amount, read_text):
        found = extract(text, None, read)
        assert (found.text is None) == bool(found.why)
    same(text, "5")
    list_items(text)


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_what_is_found_for_one_number_is_not_found_for_another(text):
    found = extract(text, None, read_amount)
    assert found.text is None or not (same(found.text, "5") and same(found.text, "1000"))
