"""Replies that were once scored wrongly, to the letter, and what they earn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_catalogue import SANDBOXED, earn, write_pets

from treetune.sandbox import probe

SUM = [{"input": "2 3", "output": "5"}, {"input": "10 -4", "output": "6"}]
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
ADD = "def add(a, b):\n    return a + b\n"
ADDS = ["assert add(2, 3) == 5", "assert add(10, -4) == 6"]
USE = "```bash\npython add.py\n```"
EXAMPLE = "Example:\n\n```\n2 3\n```"
LAWS = ["the first law", "the second law", "the third law", "the law of friction"]

RIGHT: list[tuple[str, Any, str]] = [
    ("math", "42", "Therefore, she has 42 apples."),
    ("math", "42", "The answer is 42!"),
    ("math", "42", "### Final Answer\n\n**42**"),
    ("math", "42", "<answer>42</answer>"),
    ("math", "4", "You ask for \\boxed{\\phantom{2}}.\n\n\\boxed{4}"),
    ("math", "13", '{"reasoning": "5^2 + 12^2 = 169 and its root is 13", "answer": "\\\\boxed{13}"}'),
    ("rule", "12", "The answer is 12. This uses 3 steps."),
    ("rule", "18", "**Answer:** 18 dollars per day … about step 2!"),
    ("rule", "42", "<answer>42</answer> (2 attempts)"),
    ("number", "42", "Answer: **42** (6 × 7)"),
    ("number", "42", "There are 42 apples, not 41."),
    ("number", "70000", "Der Gewinn beträgt 70.000 €."),
    ("choice", "C", "I'd go with C. D is tempting but ignores friction."),
    ("choice", "B", "A is wrong. C is wrong. D is wrong. That leaves B."),
    ("choice", "B", "答案是B。"),
    ("choice", "C", '```json\n{"reasoning": "the law of friction is D", "choice": "C"}\n```'),
    ("code", SUM, f"```python\n{PROGRAM}```\n{USE}"),
    ("code", SUM, f"```python\n{PROGRAM}```\n{EXAMPLE}"),
    ("code", SUM, f"``` python\n{PROGRAM}```"),
    ("code", SUM, f"~~~\n{PROGRAM}~~~"),
    ("code", SUM, PROGRAM),
    ("tests", ADDS, f"```python\n{ADD}```\n{USE}"),
    ("tests", ADDS, f"```python\n{ADD}```\n{EXAMPLE}"),
    ("tests", ADDS, f"``` python\n{ADD}```"),
    ("tests", ADDS, f"~~~python\n{ADD}~~~"),
    ("tests", ADDS, ADD),
    ("lcb", SUM, f"```python\n{PROGRAM}```\n{USE}"),
    ("lcb", [{"input": "7", "output": "007"}], "```python\nprint('007')\n```"),
    ("includes", "Paris", "It is Paris, I believe."),
    ("includes", "Paris", "Without a doubt, Paris."),
    ("includes", "Paris", "Not Lyon but Paris."),
    ("choice", "B", "The energy is not lost but (B)"),
    ("reverse-text", "puos enots", "Answer: puos enots"),
    ("exact", "https://example.org/a?b=1", "The page is https://example.org/a?b=1"),
    ("exact", "Paris", "The capital is [Paris](https://en.wikipedia.org/wiki/Paris)."),
]
WRONG: list[tuple[str, Any, str]] = [
    ("includes", "Paris", "Some say Paris. Others say London."),
    ("includes", "Paris", "Entweder Paris oder London."),
    ("includes", "Town150", " ".join(f"I say Town{number}." for number in range(300))),
    ("gsm8k", "5", "#### 5\nAlternatively the answer is 6."),
    ("aime", "204", "Answer: 204<203"),
    ("search", ["C++"], "<answer>C</answer>"),
    ("search", ["C++"], "<answer>C#</answer>"),
    ("search", ["$100"], "<answer>100%</answer>"),
    ("search", ["5"], "<answer>5!!</answer>"),
    ("choice", "A", "N/A"),
    ("choice", "A", "Vitamin A"),
    ("choice", "A", "Grade A"),
    ("choice", "B", "Plan B"),
    ("lcb", [{"input": "7", "output": "007"}], "```python\nprint('7')\n```"),
    ("lcb", [{"input": "5", "output": "0101"}], "```python\nprint('101')\n```"),
    ("math", "42", "42²"),
    ("number", "70", "Der Gewinn beträgt 70.000 €."),
    ("exact", "https://example.org/a", "The page is https://example.org/b"),
    ("exact", "B", '{"answer": ["A", "B"]}'),
    ("number", "42", '{"answer": 42, "alternative": 43}'),
]


def paid(kind: str, truth: Any, reply: str, folder: Path) -> bool:
    if kind in SANDBOXED and not probe().available:
        pytest.skip(f"no sandbox can start here: {probe().cause}")
    if kind == "math":
        pytest.importorskip("math_verify")
    options = {"choices": LAWS} if kind == "choice" else {}
    return earn({"kind": kind, "truth": truth, "reply": reply, **options}, write_pets(folder)) == 1


@pytest.mark.parametrize(("kind", "truth", "reply"), RIGHT)
def test_a_right_reply_is_paid(kind, truth, reply, tmp_path):
    assert paid(kind, truth, reply, tmp_path)


@pytest.mark.parametrize(("kind", "truth", "reply"), WRONG)
def test_a_wrong_reply_is_not(kind, truth, reply, tmp_path):
    assert not paid(kind, truth, reply, tmp_path)
