"""What a scorer costs an answer of 300 characters, beside what a user would write instead.

    python -m benchmarks.scorers

Each is the mean over replies that are right, wrong and hedged. `math` asks another process; `code` starts a sandbox,
which `benchmarks.sandbox` measures.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.measure import cost, show
from treetune import Task
from treetune.scorers import read_scorer

LENGTH = 300
ROUNDS = 2000
WORK = (
    "Let me think about it step by step. First we look at what is asked, then at what is given, and then we work it "
    "out. The question speaks of a country in the west of Europe, its rivers and its towns, and we know a few of "
    "them. That leaves little doubt in the end, so that it can be said. "
)


def replies(*endings: str) -> list[str]:
    """Each ending after as much work as makes 300 characters."""
    return [WORK[: LENGTH - len(ending) - 1] + "\n" + ending for ending in endings]


def search_text(reply: str, truth: str) -> float:
    return float(truth in reply)


def search_text_without_case(reply: str, truth: str) -> float:
    return float(re.search(rf"\b{re.escape(truth)}\b", reply, re.IGNORECASE) is not None)


def compare_last_line(reply: str, truth: str) -> float:
    return float(reply.strip().split("\n")[-1].strip().rstrip(".").lower() == truth.lower())


def find_letter(reply: str, truth: str) -> float:
    """As lm-evaluation-harness and simple-evals do it."""
    found = re.search(r"(?i)answer(?: is|:)?\s*\**\(?([A-D])\)?", reply)
    return float(found is not None and found[1].upper() == truth)


def find_number(reply: str, truth: str) -> float:
    """As verl's flexible method does it: the last number of the text."""
    found = re.findall(r"(\-?[0-9\.\,]+)", reply)
    last = next((number for number in reversed(found) if number not in ("", ".")), None)
    return float(last is not None and last.replace(",", "").rstrip(".") == truth)


def find_marked(reply: str, truth: str) -> float:
    found = re.search(r"####\s*(-?\d+)", reply)
    return float(found is not None and found[1] == truth)


def squad_f1(reply: str, truth: str) -> float:
    """SQuAD's own."""

    def words(text: str) -> list[str]:
        letters = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", letters).split()

    said, right = words(reply), words(truth)
    shared = sum((Counter(said) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def load_block(reply: str, truth: str) -> float:
    found = re.search(r"```json\n(.*?)```", reply, re.DOTALL)
    try:
        return float(found is not None and json.loads(found[1]) == json.loads(truth))
    except ValueError:
        return 0.0


OPTIONS = Task(extra_info={"choices": ["London", "Paris", "Rome", "Berlin"]})
TOWNS = ("The capital is Paris.", "It is London.", "Paris or London.", "I would say that it is not Paris.")
NUMBERS = ("The answer is 1,000.", "#### 1000", "So 17 apples.", "It is 1000 or 17.")
LETTERS = ("The answer is B.", "Answer: (C)", "**B**", "It is either A or B.")
BLOCKS = ('```json\n{"name": "Ann", "age": 7}\n```', '```json\n{"name": "Bob", "age": 7}\n```', "no JSON")
FORMAT = {"kind": "pattern", "pattern": "####", "match_only": True}

Hand = tuple[str, Callable[[str, str], float]]
CASES: list[tuple[Any, list[str], str, str, Hand]] = [
    ("exact", replies("Paris", "#### Paris", "London", "Paris or London"), "Paris", "12 us",
     ("the last line compared", compare_last_line)),
    ("includes", replies(*TOWNS), "Paris", "16 us", ("str in str, which pays hedges", search_text)),
    ("includes", replies(*TOWNS), "Paris", "16 us", ("a pattern without case", search_text_without_case)),
    ("choice", replies(*LETTERS), "B", "25 us", ("a pattern for one letter", find_letter)),
    ("number", replies(*NUMBERS), "1000", "18 us", ("the last number, as verl's flexible", find_number)),
    ({"kind": "pattern", "pattern": r"####\s*(-?\d+)"}, replies("#### 1000", "#### 17", "1000"), "1000", "",
     ("the same pattern by hand", find_marked)),
    ("f1", replies(*TOWNS), "Paris", "", ("SQuAD's evaluation", squad_f1)),
    ({"kind": "json", "fields": ["name", "age"]}, replies(*BLOCKS), '{"name": "Ann", "age": 7}', "",
     ("a pattern and json.loads", load_block)),
    ("rule", replies(*NUMBERS), "1000", "18 us", ("the last number, as verl's flexible", find_number)),
    ({"kind": "weighted", "parts": [{"weight": 0.8, "scorer": "number"},
                                    {"weight": 0.2, "scorer": FORMAT}]},
     replies(*NUMBERS), "1000", "28 us", ("the last number, as verl's flexible", find_number)),
]  # fmt: skip


def main() -> None:
    for config, answers, truth, target, (other, by_hand) in CASES:
        scorer = read_scorer(config)
        kind = config if isinstance(config, str) else config["kind"]
        task = OPTIONS if kind == "choice" else Task()
        calls = ROUNDS * len(answers)

        def ours(scorer: Any = scorer, answers: list[str] = answers, truth: str = truth, task: Task = task) -> None:
            score = scorer.score
            for _ in range(ROUNDS):
                for answer in answers:
                    score(answer, truth, task)

        def theirs(by_hand: Any = by_hand, answers: list[str] = answers, truth: str = truth) -> None:
            for _ in range(ROUNDS):
                for answer in answers:
                    by_hand(answer, truth)

        spent, instead = cost(ours, repeat=5, per=calls), cost(theirs, repeat=5, per=calls)
        show(f"scorer: {kind}", spent, other, instead, target=target)


if __name__ == "__main__":
    main()
