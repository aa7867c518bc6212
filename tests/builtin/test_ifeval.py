"""IFEval's instructions: each is followed or not, as its reference says."""

from __future__ import annotations

import json

import pytest
from ifeval_cases import ANSWERS, INSTRUCTIONS, cases
from venvs import IFEVAL, run, venv

from treetune import Task
from treetune.errors import TasksetError
from treetune.scorers import ifeval
from treetune.tasksets.ifeval import INSTRUCTIONS as CHECKS
from treetune.tasksets.ifeval import count_capital_words, count_sentences, find_problem, follows

LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


def needs_langdetect(instruction):
    if instruction in LANGUAGE:
        pytest.importorskip("langdetect")


def test_every_instruction_has_cases_and_can_be_followed_or_not():
    pytest.importorskip("langdetect")
    assert INSTRUCTIONS.keys() == CHECKS.keys()
    assert len(INSTRUCTIONS) == 25
    for instruction, all_values in INSTRUCTIONS.items():
        verdicts = {follows(instruction, answer, values) for answer in ANSWERS for values in all_values}
        assert verdicts == {True, False}, instruction


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_answer_that_says_nothing_follows_no_instruction(instruction):
    assert not any(follows(instruction, answer, INSTRUCTIONS[instruction][0]) for answer in ("", "  \n"))


FOLLOWED = [
    ("punctuation:no_comma", "No comma here.", {}, True),
    ("punctuation:no_comma", "Here, one.", {}, False),
    ("keywords:frequency", {"keyword": "c++", "relation": "at least", "frequency": 2}, "C++ is c++.", True),
    ("keywords:existence", {"keywords": ["p.m."]}, "At 5 pxmx", False),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": "at least", "let_frequency": 2}, "#a #b", True),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": "less than", "let_frequency": 2}, "#a #b", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[" * 50_000, False),
    ("detectable_format:title", {}, "<<" * 50_000, False),
]


@pytest.mark.parametrize("case", range(len(FOLLOWED)))
def test_values_are_taken_as_they_are(case):
    instruction, first, second, expected = FOLLOWED[case]
    answer, values = (first, second) if isinstance(first, str) else (second, first)
    assert follows(instruction, answer, values) is expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One.", 1),
        ("One. Two! Three?", 3),
        ("No mark at the end", 1),
        ("One. And no mark", 2),
        ("Mr. Smith met Dr. Jones. They talked.", 2),
        ("It is 3.14 in all. Yes.", 2),
        ('He said "Go." Then he went.', 2),
        ("Wait... what?", 1),
        ("J. R. R. Tolkien wrote it.", 1),
        ("One.\nTwo.\n", 2),
        ("", 0),
        ("...", 1),
    ],
)
def test_sentences_are_counted_as_people_do(text, count):
    assert count_sentences(text) == count


def test_words_in_capitals_are_counted_as_people_see_them():
    assert count_capital_words("NASA's ROBOT, the TOP-SECRET one (OK): A1!") == 4


def task_of(*pairs):
    return Task(prompt="", extra_info={"kwargs": [values for _, values in pairs]}), [name for name, _ in pairs]


def test_the_reward_is_1_only_where_every_instruction_is_followed():
    task, truth = task_of(
        ("punctuation:no_comma", {"num_words": None}),
        ("length_constraints:number_words", {"relation": "less than", "num_words": 4}),
    )
    scorer = ifeval()
    assert scorer.score("Three words here.", truth, task).reward == 1.0
    half = scorer.score("Three, words here.", truth, task)
    assert (half.reward, half.metrics) == (0.0, {"instructions_followed": 0.5, "loose": 0.0})
    assert half.explanation == "not followed: punctuation:no_comma"
    loose = scorer.score("Sure, here it is:\nThree words here.", truth, task)
    assert (loose.reward, loose.metrics["loose"]) == (0.0, 1.0)
    assert scorer.score("<think>a, b</think>Three words here.", truth, task).reward == 1.0
    assert scorer.score("", truth, task).reward == 0.0


def test_a_row_that_cannot_be_scored_is_a_fault_and_no_zero():
    scorer = ifeval()
    for pair, problem in {
        "punctuation:no_coma": "did you mean 'punctuation:no_comma'",
        "length_constraints:number_words": "needs num_words, relation",
    }.items():
        task, truth = task_of((pair, {}))
        assert problem in str(scorer.problem(truth, task))
        with pytest.raises(TasksetError):
            scorer.score("An answer.", truth, task)
    assert find_problem("punctuation:no_comma", {}) is None
    assert scorer.problem([], None) == "is not a list of instructions"


DIFFERS = {
    "language:response_language": ["**\n*** * *", "```\n[1, 2]\n```", "<< >>", '"', "12345 67890"],
    "length_constraints:number_sentences": [
        "***\nOne.\n***\nTwo.\n***",
        "Text.\nP.S. I forgot something.",
        "Mr. Smith met Dr. Jones at 5 p.m. on Monday. They talked.",
    ],
}
"""Where ours says something else: what has no words has no language, where the reference takes it for the right one; a
line of stars is not a sentence; and abbreviations end none, which nltk knows only with data of its own."""


@pytest.mark.slow
def test_the_reference_says_the_same():
    python = venv(*IFEVAL)
    pytest.importorskip("langdetect")
    theirs = json.loads(run(python, "tests/support/ifeval_cases.py").splitlines()[-1])
    ours = [follows(*case) for case in cases()]
    differ = [case for case, one, other in zip(cases(), ours, theirs, strict=True) if one != other]
    assert [case for case in differ if case[1] not in DIFFERS.get(case[0], ())] == []
    assert len(theirs) > 2000
