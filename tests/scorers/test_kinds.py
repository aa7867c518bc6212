"""Every kind of scorer, on answers that are right, wrong, hedged, empty and hostile."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from treetune import Score, Task
from treetune.sandbox import probe
from treetune.scorers import read_scorer

HUGE = "x " * 50_000
DIGITS = "7" * 5000
HALF = "\ud800"
"""Half of a surrogate pair, which a model can sample."""
HOSTILE = [
    "", " \n\t", HUGE, DIGITS, "nan", "inf", "-inf", HALF, "\x00", "(" * 20_000, "[" * 20_000, "$" * 20_000,
    "*" * 20_000, "\n" * 20_000, "####" * 5000, "\\boxed{" * 5000, "\\boxed{" * 5000 + "9" + "}" * 5000,
    "<answer>" * 5000, "answer: " * 5000, "```" * 5000,
    "{" * 20_000, "A " * 20_000, "answer" + " " * 20_000, "not " * 10_000, "1,000," * 5000, "1e999999999", "`" * 9999,
]  # fmt: skip
"""None of these is an answer, and none may raise or take long."""


def score(config: Any, answer: str, truth: Any, task: Task | None = None) -> Score:
    found = read_scorer(config).score(answer, truth, task)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def rewards(config: Any, truth: Any, table: dict[str, float], task: Task | None = None) -> dict[str, float]:
    """What differs from the table, with what it earned instead; every score says why."""
    found = {answer: score(config, answer, truth, task) for answer in table}
    assert all(one.explanation for one in found.values())
    return {answer: one.reward for answer, one in found.items() if one.reward != pytest.approx(table[answer])}


EXACT = {
    "Paris": 1, " Paris\n": 1, "Paris.": 1, "**Paris**": 1, '"Paris"': 1, "\\boxed{Paris}": 1, "so\n#### Paris": 1,
    "<think>London?</think>Paris": 1, "$\\text{Paris}$": 1, "#### Paris\n#### Paris": 1,
    "paris": 1, "The answer is Paris.": 1, "London": 0, "Paris or London": 0, "not Paris": 0, "Paris, London": 0,
    "#### Paris\n#### London": 0, "Paris Paris": 0, "<think>Paris</think>": 0, "Pari": 0,
}  # fmt: skip
INCLUDES = {
    "The capital of France is Paris.": 1, "Paris": 1, "paris": 1, "**Paris**": 1, "\\boxed{Paris}": 1,
    "The answer is Paris, which lies on the Seine.": 1, "In France, Paris is the capital.": 1, "Yes, Paris.": 1,
    "Is it Paris or London? Paris is the capital, so the answer is Paris.": 1, "The capital is Paris, not London.": 1,
    "It isn't London, it's Paris.": 1, "#### Paris": 1, "I considered London first.\nIt is Paris.": 1,
    "Paris or London": 0, "not Paris": 0, "It is not Paris.": 0, "It isn't Paris.": 0, "Paris, London": 1,
    "London, Paris, Berlin": 0, "Paris and London": 0, "London and Paris": 0, "Paris/London": 0, "Is it Paris?": 0,
    "- London\n- Rome\n- Paris": 0, "Guess 1: Paris\nGuess 2: London": 0, "A) Paris\nB) London": 0,
    '"Paris"\n"London"': 0,
    "> Paris\n> London": 0, "| Paris |\n| London |": 0, "Paris (France)\nLondon (UK)": 0, "London\nParis": 0,
    "Paris; London": 0, "Paris → London": 1, '["Paris", "London"]': 1,
    "Paris as well as London": 0, "Paris, then London": 0,
    "Oslo Rome Berlin Madrid Paris Vienna Prague Lisbon Athens": 1,
    "Paris - Capital of France.": 1, "France → Paris": 1, "```text\nParis\n```": 1, "Thinking...\n\nParis": 1,
    "**Paris**\n\n**Reasoning:**\n- It is on the Seine.": 1, "1. Find France\n2. Find its capital\n3. Paris": 0,
    "Candidates:\n- London\n- Berlin\n\n> **Paris**": 1, "By elimination it is Paris.": 1,
    "Beyond a doubt it is Paris.": 1,
    "Правильный ответ: Paris, потому что именно этот город является столицей Франции.": 1,
    "## Final Answer\n\n**Paris**": 1, "## Answer\nParis\n": 1, "The capital is:\n\nParis": 1, "Here it is.\nParis": 1,
    "Of course, Paris.": 1, "Without doubt it is Paris.": 1, "It is Paris – the city of light.": 1, "Paris\n\n2024": 0,
    "- Paris\n- London\n- Rome": 0, "Parisian": 0, "Paris. No, London.": 0, "maybe Paris": 0, "either Paris or Rome": 0,
    "The answer is London. Paris is nice.": 0, "<think>Paris</think>London": 0, "Paris is not the capital.": 0,
    "Paris is wrong.": 0, "London": 0, "Pa ris": 0,
}  # fmt: skip
NUMBER = {
    "5": 1, "5.0": 1, "$5": 1, "5%": 1, "5 apples": 1, "The answer is 5.": 1, "x = 5": 1, "**5**": 1, "\\boxed{5}": 1,
    "5,00e0": 1, "so\n#### 5": 1, "5.004": 1, "4.996": 1, "\\frac{10}{2}": 1, "He has 2 + 3 = 5 of them.": 1,
    "5.02": 0, "6": 0, "-5": 0, "5 or 6": 0, "not 5": 0, "5?": 0, "4, 5, 6": 0, "5 million": 0, "#### 5\n#### 6": 0,
    "<answer>5</answer>": 1, "<b>5</b>": 1, "> 5": 0, "$5^\\circ$": 1, "5mA": 1, "It is 5x as fast.": 0, "5 Ω": 1,
    "\\boxed{5\\ \\Omega}": 1, "$5 \\quad \\blacksquare$": 1, "There are 5 B students.": 1, "#### Half of 10 = 5": 1,
    "2^3 + 5": 0, "2^3 * 5": 0, "3 × 10^15": 0, "4^{-5}": 0, "4, 5^2": 0,
    "It is 5 cm^2.": 1, "$5\\text{ cm}^2$": 1, "=> 5": 1, "5\\,km": 1, "5kg": 1, "5 μm": 1, "5\\%": 1,
    "\\boxed{5\\pi}": 0, "5π": 0, "5\\sqrt{3}": 0, "5\\ln 2": 0, "5xy": 0, "\\sqrt{5}": 0, "\\frac{-3}{5}": 0,
    "10^5": 0, "5s": 1, "25C": 0,
    "±5": 0, "#### 5M": 0, "5 lakh": 0, "5万": 0, "x = 4 or x = 5": 0, "5³": 0, "5½": 0,
    "fifty": 0, "4\n5\n6": 0, "between 5 and 6": 0, "15": 0, "five": 0,
}  # fmt: skip
CHOICE = {
    "B": 1, "b": 1, "(B)": 1, "B.": 1, "B)": 1, "**B**": 1, "\\boxed{B}": 1, "$\\boxed{\\text{B}}$": 1, "Option B": 1,
    "The answer is B.": 1, "The correct answer is option B: Paris.": 1, "Answer: (B)": 1, "Paris": 1,
    "The capital is Paris.": 1, "B) Paris": 1, "B because A is in England": 1, "#### B": 1,
    "A. London\nB. Paris\n\nThe answer is (B).": 1, "B\n\nBecause A is wrong.": 1, "<think>A?</think>B": 1,
    "Answer: B. C is wrong.": 1, "Answer: B. C is the capital of Italy.": 1, "B is wrong. C is wrong.": 0, "B? C?": 0,
    "C is incorrect because Rome is in Italy.": 0, "B. Or C?": 0, "B; or is it C?": 0, "B. C? Yes.": 0, "B? C? D": 0,
    "A is incorrect because London is in England. C is incorrect: Rome is in Italy.\n\nSo the correct option is B.": 1,
    "The answer is B, not C. C is incorrect because Rome is in Italy.": 1, "C, as B is wrong: Paris is in Italy.": 0,
    "**B**\n\nA is the correct answer for England.": 0, "B\n\nThe correct option for Italy is C.": 0,
    "Some say B is not the capital, but that is a myth.\n\nSo, I choose B.": 1, "C? No. Rome is in Italy. B": 1,
    "A\nSome say B is right.": 0, "It could be B. C cannot be ruled out.": 0, "C is not wrong. B is fine too.": 0,
    "If C is wrong, B; if B is wrong, C.": 0, "B is right unless C is wrong": 0, "B and A are wrong.": 0,
    "The correct option is **B) Paris**.\n\nA) London is the capital of England.": 1, "B. A might be right too.": 0,
    "Option B is correct.\n\nA: London is in England.": 1, "Paris, not London. London is not in France.": 1,
    "I pick B as C is wrong.": 1, "The answer is B: A is wrong, C is wrong and D is wrong.": 1, "B. And C is wrong.": 1,
    "The answer is B (A, C, and D are incorrect).": 1, "The answer is B – A and C are wrong.": 1,
    "B is clearly wrong": 0, "B is **not** right.": 0, "B cannot be right": 0, "B can be ruled out.": 0,
    "`B` is wrong": 0,
    "B, Paris, is wrong": 0, "The wrong answer is B.": 0, "Anything but B.": 0, "I rule out B.": 0, "B ❌": 0,
    "A) London and B) Paris are wrong": 0, "(A) is wrong. (C) is wrong. (D) is wrong.\nHence, B.": 1,
    "A. London\nB. Paris\nC. Rome\nD. Berlin\nSo the correct choice is B.": 1,
    "I choose B\nI select C": 0,
    "B. A and C are wrong.": 1, "A and C are wrong. B.": 1, "A? No, B": 1, "Paris is right, London is wrong": 1,
    "B and C are wrong.": 0, "(B) and (C) are not right.": 0, "B along with C are wrong": 0,
    "Rome and Paris are wrong": 0,
    "B. Paris is wrong": 0, "C is not the answer, nor is B": 0, "B is not correct. C?": 0, "B. Hmm, B is wrong.": 0,
    "B is right. B? I am not sure.": 0, "Answer: B. B is not right.": 0, "B. C is wrong. B is wrong.": 0,
    "A": 0, "C": 0, "London": 0, "A or B": 0, "A, B, C, D": 0, "not B": 0, "The answer is not B.": 0, "B?": 0,
    "B) London": 0, "A. London\nB. Paris\nC. Rome\nD. Berlin": 0, "Answer: B\nAnswer: C": 0, "Paris or London": 0,
    "either B or C": 0, "E": 0, "BB": 0, "I think so": 0, "\\boxed{A}\\boxed{B}": 0,
}  # fmt: skip
PATTERN = {
    "#### 42": 1, "so\n####42": 1, "####   42.": 1, "#### 42\n#### 42": 1, "x #### 42 apples": 1, "#### 042": 1,
    "<think>#### 7</think>#### 42": 1, "**#### 42**": 1,
    "42": 0, "#### 41": 0, "#### -42": 0, "#### 42\n#### 41": 0, "#### 4 2": 0, "####": 0, "#### forty-two": 0,
    "### 42": 0, "<think>#### 42</think>": 0, "#### 421": 0,
}  # fmt: skip
F1 = {
    "the cat sat": 1, "The cat sat.": 1, "cat sat": 1, "A CAT SAT!": 1, "#### cat sat": 1, "**cat sat**": 1,
    "The answer is cat sat": 1, "sat cat": 1,
    "cat": 2 / 3, "the cat sat down": 0.8, "a cat": 2 / 3, "cat cat": 0.5, "it is the cat": 0.4,
    "dog": 0, "": 0, "not the cat sat": 0, "cat sat or dog sat": 0, "the": 0, "cat sat?": 0, "ca tsa": 0,
}  # fmt: skip
MATH = {
    "\\frac{1}{2}": 1, "0.5": 1, "1/2": 1, "\\boxed{\\frac12}": 1, "The answer is $\\frac{1}{2}$.": 1, "#### 0.5": 1,
    "x = 0.5": 1, "$0.50$": 1, "\\dfrac{1}{2}": 1, "\\boxed{\\frac{2}{4}}": 1, "**1/2**": 1,
    "2": 0, "-\\frac{1}{2}": 0, "0.25": 0, "1/2 or 2": 0, "\\boxed{1}\\boxed{\\frac12}": 0, "0.5, 2": 0,
    "\\pm\\frac{1}{2}": 0, "not \\frac{1}{2}": 0, "\\frac{1}{2}; 3": 0, "\\frac{1}{2}?": 0, "half": 0,
}  # fmt: skip
JSON = {
    '{"name": "Ann", "age": 7}': 1, '```json\n{"name": "Ann", "age": 7}\n```': 1, '{"age": 7.0, "name": "Ann"}': 1,
    'Here it is: {"name": "Ann", "age": 7}.': 1, '```\n{"name": "Ann", "age": 7, "more": null}\n```': 1,
    '<think>{"age": 8}</think>{"name": "Ann", "age": 7}': 1,
    '```json\n{"name":"Ann","age":7}\n```\n```json\n{"age":7,"name":"Ann"}\n```': 1,
    '{"name": "Ann"}': 0, '{"name": "Ann", "age": "7"}': 0, '{"name": "ann", "age": 7}': 0, "[]": 0, "Ann, 7": 0,
    '{"name": "Ann", "age": 8}': 0, '{"name": "Ann", "age": true}': 0, '{"name": "Ann", "age": 7': 0, "null": 0,
    '```json\n{"name":"Ann","age":7}\n```\n```json\n{"name":"Bob","age":7}\n```': 0, '{"name": "Ann", "age": NaN}': 0,
    '{"name": ["Ann"], "age": [7]}': 0, '[{"name": "Ann", "age": 7}]': 0,
}  # fmt: skip
RULE = {
    "72": 1, "#### 72": 1, "\\boxed{72}": 1, "so 72.0": 1, "$72": 1, "The answer is 72 apples.": 1, "72%": 1,
    "x = 72": 1, "**72**": 1,
    "71": 0, "": 0, "72 or 73": 0, "not 72": 0, "72?": 0, "#### 1,072": 0, "####": 0, "-72": 0, "70, 71, 72": 0,
}  # fmt: skip

OPTIONS = Task(extra_info={"choices": ["London", "Paris", "Rome", "Berlin"]})
MARKED = {"kind": "pattern", "pattern": r"####\s*(-?\d+)"}
FIELDS = {"kind": "json", "fields": ["name", "age"]}
ANN = '{"name": "Ann", "age": 7, "town": "Bonn"}'
TABLES: dict[str, tuple[Any, Any, dict[str, float], Task | None]] = {
    "exact": ("exact", "Paris", EXACT, None),
    "includes": ("includes", "Paris", INCLUDES, None),
    "number": ({"kind": "number", "tolerance": 0.01}, "5", NUMBER, None),
    "choice": ("choice", "B", CHOICE, OPTIONS),
    "pattern": (MARKED, "42", PATTERN, None),
    "f1": ("f1", "the cat sat", F1, None),
    "math": ("math", "\\frac{1}{2}", MATH, None),
    "json": (FIELDS, ANN, JSON, None),
    "rule": ("rule", "72", RULE, None),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_kind_scores_its_answers(kind):
    config, truth, table, task = TABLES[kind]
    assert len(table) >= 15
    assert rewards(config, truth, {**table, "": 0}, task) == {}


@pytest.mark.parametrize("kind", TABLES)
def test_nothing_hostile_is_paid_or_raises(kind):
    config, truth, _, task = TABLES[kind]
    assert rewards(config, truth, dict.fromkeys(HOSTILE, 0.0), task) == {}


@pytest.mark.parametrize("kind", TABLES)
def test_the_gold_answer_of_a_kind_is_right(kind):
    config, truth, _, task = TABLES[kind]
    scorer = read_scorer(config)
    assert scorer.problem(truth, task) is None
    assert score(config, scorer.gold(truth, task), truth, task).reward == 1


def test_numbers_in_a_row_or_one_a_line_are_several_answers_as_names_are():
    listed = [
        "12\n48\n7\n9",
        "48\n12",
        "#### 12\n#### 48\n#### 7",
        "$12\n$48\n$3",
        "**12**\n**48**\n**3**",
        "1. 12\n2. 48\n3. 7",
    ]
    listed += [" ".join(map(str, range(100)))]
    assert rewards("includes", "48", dict.fromkeys(listed, 0.0)) == {}
    said = [
        "First we double 12.\nThen 48",
        "Total:\n48\n",
        "In 2024 48 came.",
        "48 12-packs",
    ]
    assert rewards("includes", "48", dict.fromkeys(said, 1.0)) == {}


CASES = json.dumps([{"input": "5", "output": "25"}, {"input": "-3", "output": "9"}])
CODE = {
    "```python\nprint(int(input()) ** 2)\n```": 1, "```\nn = int(input())\nprint(n * n)\n```": 1,
    "So:\n```python\nprint(int(input()) ** 2, flush=True)\n```\nDone.": 1,
    "```python\nprint(1)\n```\n```python\nprint(int(input()) ** 2)\n```": 1,
    "```python\nprint(25)\n```": 0, "```python\nprint(int(input()) * 5)\n```": 0, "```python\n1/0\n```": 0,
    "```python\nprint(\n```": 0, "25": 0, "": 0, "```python\n```": 0, "```python\nimport os; os._exit(0)\n```": 0,
    "```python\nprint('25\\n9')\n```": 0, "print(int(input()) ** 2)": 1, "```python\nprint('nan')\n```": 0,
}  # fmt: skip


def test_code_is_run_on_its_cases():
    if not probe().available:
        pytest.skip(str(probe()))
    assert len(CODE) >= 15
    assert rewards("code", CASES, CODE) == {}
    half = score({"kind": "code", "partial": True}, "```python\nprint(25)\n```", CASES)
    assert (half.reward, half.metrics) == (0.5, {"cases": 2, "passed": 1})


WEIGHTED = {
    "kind": "weighted",
    "parts": [
        {"weight": 0.8, "scorer": "number"},
        {"weight": 0.2, "scorer": {"kind": "pattern", "pattern": "####", "match_only": True}, "name": "format"},
    ],
}
COMBINED = {
    "#### 5": (1.0, 1), "5": (0.8, 0), "#### 6": (0.2, 0), "6": (0, 0), "": (0, 0), "5 or 6": (0, 0),
    "so #### 5": (1.0, 1), "####": (0.2, 0), "#### 5 or 6": (0.2, 0), "#### 5\n#### 6": (0.2, 0), "$5": (0.8, 0),
    "#### $5.00": (1.0, 1), "not 5": (0, 0), "#### -5": (0.2, 0), DIGITS: (0, 0), HUGE: (0, 0),
}  # fmt: skip


def test_parts_earn_by_their_weights_or_all_together():
    together = {"kind": "all_of", "scorers": [part["scorer"] for part in WEIGHTED["parts"]]}
    assert rewards(WEIGHTED, "5", {answer: one for answer, (one, _) in COMBINED.items()}) == {}
    assert rewards(together, "5", {answer: one for answer, (_, one) in COMBINED.items()}) == {}
    found = score(WEIGHTED, "#### 6", "5")
    assert found.metrics == {"number": 0.0, "format": 1.0}
    assert found.explanation == "number 0: expected 5; read from ####; format 1: it matches"


@pytest.mark.parametrize(
    ("place", "reply"),
    [
        ({"after": "####"}, "London?\n#### Paris"), ({"tag": "answer"}, "London <answer>Paris</answer>"),
        ({"boxed": True}, "London \\boxed{Paris}"), ({"last_line": True}, "London?\n\nParis\n"),
        ({"first_line": True}, "Paris\nbecause London is not"), ({"after": "Answer:"}, "Answer:\nParis"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["exact", "includes", "f1", "rule"])
def test_the_answer_stands_where_the_scorer_says(kind, place, reply):
    config = {"kind": kind, "answer": place}
    assert score(config, reply, "Paris").reward == 1
    assert score(config, reply.replace("Paris", "London"), "Paris").reward == 0
    assert score(config, "Paris" if "last_line" not in place and "first_line" not in place else "", "Paris").reward == 0
    assert score(config, read_scorer(config).gold("Paris"), "Paris").reward == 1


WHOLE = {"required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("config", "truth", "answer", "reward"),
    [
        ({"kind": "exact", "ignore_case": True}, "Paris", "PARIS.", 1),
        ({"kind": "exact", "strip": False}, "Paris.", "Paris.", 1),
        ({"kind": "exact", "strip": False}, "Paris", "Paris.", 0),
        ({"kind": "includes", "ignore_case": False}, "Paris", "paris", 0),
        ({"kind": "includes", "hedges": True}, "Paris", "Paris or London", 1),
        ("includes", ["Kansas City Chiefs", "Chiefs"], "It was the Chiefs.", 1),
        ("includes", "5", "It is 15, or 5.5, or -5", 0),
        ("includes", "500", "The answer is " + "; ".join(map(str, range(1000))), 0),
        ("includes", "500", ". ".join(map(str, range(1000))), 0),
        ("math", r"2\pi", r"\boxed{2}", 0),
        ("math", r"2\sqrt{3}", r"\boxed{2\sqrt{2}}", 0),
        ("math", r"2\sqrt{3}", r"\boxed{2\sqrt{3}}", 1),
        ("math", r"\frac{1}{3}\pi", r"\boxed{\frac13}", 0),
        ("number", "-3/4", r"\boxed{\frac{-3}{4}}", 1),
        ({"kind": "number", "relative": 0.1}, "200", "It is 215.", 1),
        ({"kind": "number", "relative": 0.1}, "200", "It is 225.", 0),
        ("number", "10 km", "It is 10 kilometers.", 1),
        ("number", "10 km", "It is 10 m.", 0),
        ("number", "10 km", "10", 1),
        ("number", "$5", "5 euros", 0),
        ("number", ["4", "5"], "5", 1),
        ({"kind": "f1", "threshold": 0.5}, "the cat sat", "cat", 1),
        ({"kind": "f1", "threshold": 0.9}, "the cat sat", "cat", 0),
        ({"kind": "pattern", "pattern": r"(\d+)", "which": "last"}, "7", "5 and 7", 1),
        ({"kind": "pattern", "pattern": r"(\d+)", "which": "first"}, "7", "5 and 7", 0),
        ({"kind": "pattern", "pattern": r"(?P<x>\w+)=(?P<y>\w+)", "group": "y"}, "b", "a=b", 1),
        ({"kind": "pattern", "pattern": "YES", "ignore_case": True}, "yes", "Yes", 1),
        ({"kind": "json", "fields": ["name", "age"], "partial": True}, ANN, '{"name": "Ann", "age": 8}', 0.5),
        ({"kind": "json", "fields": ["name"], "ignore_case": True}, ANN, '{"name": "ANN"}', 1),
        ({"kind": "json", "fields": ["age"], "strip": True}, ANN, '{"age": "7 "}', 1),
        ("json", ANN, ANN, 1),
        ("json", ANN, '{"name": "Ann", "age": 7}', 0),
        ({"kind": "json", "fields": ["a.b"]}, '{"a": {"b": 1}}', '{"a": {"b": 1, "c": 2}}', 1),
        ({"kind": "json", "schema": WHOLE}, None, '{"a": 1}', 1),
        ({"kind": "json", "schema": WHOLE}, None, '{"a": "1"}', 0),
        ({"kind": "json", "schema": {"type": "array", "items": {"enum": [1, 2]}}}, None, "[1, 3]", 0),
        ({"kind": "choice", "choices": ["no", "yes"]}, "yes", "The answer is B", 1),
        ({"kind": "choice", "choices": {"1": "no", "2": "yes"}}, "2", "yes", 1),
        ({"kind": "choice", "choices": ["0", "1", "2"]}, 2, "C", 1),
        ({"kind": "choice", "choices": ["1", "i"]}, "B", "I do not know.", 0),
        ({"kind": "choice", "choices": ["1", "i"]}, "B", "I think the answer is i.", 1),
        ({"kind": "choice", "choices": ["the", "a"]}, "B", "It is a guess.", 0),
        ({"kind": "choice", "choices": ["0", "1", "2"], "truth": "text"}, "0", "A", 1),
    ],
)  # fmt: skip
def test_keys_change_what_is_paid(config, truth, answer, reward):
    assert score(config, answer, truth).reward == reward


def test_other_options_beside_the_right_one_earn_nothing():
    assert score("includes", "Paris is one, and there is Rome.", "Paris", OPTIONS).reward == 0
    assert score("includes", "It is Paris.", "Paris", OPTIONS).reward == 1


def test_options_come_with_the_task_as_mmlu_and_arc_have_them():
    mmlu = Task(extra_info={"options": ["3", "4", "5", "6"]})
    arc = Task(extra_info={"choices": {"label": ["1", "2"], "text": ["ice", "fire"]}})
    assert score({"kind": "choice", "choices": "options"}, "B", 1, mmlu).reward == 1
    assert score({"kind": "choice", "choices": "options"}, "The answer is 4.", 1, mmlu).reward == 1
    assert score("choice", "fire", "2", arc).reward == 1
    assert "not one of the options" in str(read_scorer("choice").problem("Z", OPTIONS))


ALL = {
    # of A and C
    "A, C": 1,
    "AC": 1,
    "(C) and (A)": 1,
    "The correct options are A and C.": 1,
    "I'd say A and C. B is wrong.": 1,
    "red and blue": 1,
    "\\boxed{A, C}": 1,
    "Answer: **A** and **C**": 1,
    "A": 0,
    "A, B, C": 0,
    "A or C": 0,
    "A and C, or A and B": 0,
    "Answer: A\nAnswer: C": 0,
    "None of them.": 0,
}


@pytest.mark.parametrize("answer", ALL)
@pytest.mark.parametrize("truth", [["A", "C"], "A, C", "AC", ["red", "blue"], [0, 2]])
def test_several_options_must_all_be_chosen(answer: str, truth: Any) -> None:
    config = {"kind": "choice", "choices": ["red", "green", "blue", "pink"], "all": True}
    assert score(config, answer, truth).reward == ALL[answer]


def test_a_list_of_options_of_which_any_is_right_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="all: true if all must be chosen"):
        assert score({"kind": "choice"}, "A", ["A", "C"]).reward == 1
    config = {"kind": "choice", "choices": ["red", "green", "blue"], "all": True}
    assert read_scorer(config).gold(["A", "C"]) == "A, C"
    assert read_scorer(config).problem("A, D") is not None
