"""Answers of one task compared with each other."""

from __future__ import annotations

import asyncio
import json

import pytest
from raising import raises_code
from scripted_judges import TRICK, named

from treetune import Limits, Task, Taskset, run_rollout, tool
from treetune.core.policy import Completion, Policy
from treetune.core.trace import Trace, Turn
from treetune.scorers.judges import Judge, JudgeModel
from treetune.scorers.judges.methods import compare
from treetune.scorers.reading.answer_format import AnswerFormat

pytestmark = pytest.mark.usefixtures("verdict_cache")

TASK = Task(prompt="What is the capital of France?")


def traces_of(*answers: str) -> list[Trace]:
    turns = [[Turn(message={"role": "assistant", "content": answer})] for answer in answers]
    return [Trace(task=TASK, uid=TASK.uid, rollout=number, turns=turn) for number, turn in enumerate(turns)]


def rewards(judge: str, *answers: str, **keys) -> list[float]:
    scorer = Judge(model=named(judge), method="pairwise", **keys)
    return asyncio.run(scorer.score_group(TASK, traces_of(*answers)))


@pytest.mark.parametrize(
    ("judge", "answers", "earned"),
    [
        ("Fair", ["It is Paris.", "It is Rome."], [1, 0]),
        ("Fair", ["It is Rome.", "Paris", "It is Bonn."], [0.25, 1, 0.25]),
        ("Fair", ["Paris!", "Paris."], [0.5, 0.5]),
        # A judge that prefers what stands first prefers nothing: both ways round it is a tie.
        ("PrefersFirst", ["It is Paris.", "It is Rome."], [0.5, 0.5]),
        ("Ties", ["It is Paris.", "It is Rome."], [0.5, 0.5]),
        # Equal answers earn the same, and nobody is asked.
        ("Refuses", ["Paris", "Paris"], [0.5, 0.5]),
        ("Fair", ["Paris", "Rome", "Paris"], [1, 0, 1]),
        # Nothing said earns nothing, whatever the others said.
        ("Refuses", ["Paris", ""], [0.5, 0]),
        ("Refuses", ["", "<think>Paris"], [0, 0]),
    ],
)
def test_an_answer_earns_what_it_wins_both_ways_round(judge, answers, earned):
    assert rewards(judge, *answers) == earned


def test_only_what_was_given_as_the_answer_is_compared():
    placed = ["Not Rome. <answer>Paris</answer>", "Not Paris. <answer>Rome</answer>", "Paris"]
    assert rewards("Fair", *placed, answer=AnswerFormat(tag="answer")) == [1, 0, 0]


class Says(Policy):
    name = "says"

    def __init__(self, message):
        self.message = message

    async def complete(self, request):
        return Completion(message=self.message)


class Capitals(Taskset):
    scorer = Judge(model=named("Fair"), method="pairwise")

    def load_tasks(self):
        return [TASK]

    @tool(final=True)
    def submit(self, town: str) -> str:
        """Hand in the answer."""
        return town

    @tool
    def think(self, of: str) -> str:
        """Think of a town."""
        return of


def test_an_answer_that_a_final_tool_hands_in_is_compared_and_text_beside_calls_is_not():
    taskset, limits = Capitals(), Limits(max_turns=1)

    async def play(name: str, **arguments: str) -> Trace:
        calls = [{"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]
        answer = {"role": "assistant", "content": "It is Paris.", "tool_calls": calls}
        return await run_rollout(taskset, taskset[0], Says(answer), limits=limits)

    async def play_all() -> list[float]:
        calls = [play("submit", town="It is Paris."), play("submit", town="It is Rome."), play("think", of="Paris")]
        return await taskset.score_group(TASK, [await call for call in calls])

    assert asyncio.run(play_all()) == [1, 0, 0]


def test_a_preference_for_a_place_is_counted():
    traces = traces_of("It is Paris.", "It is Rome.")
    asyncio.run(Judge(model=named("PrefersFirst"), method="pairwise").score_group(TASK, traces))
    assert [trace.metrics for trace in traces] == [{"judge_split": 1.0}] * 2
    assert [call.asked for call in traces[0].judgements] == ["rollouts 0 and 1", "rollouts 1 and 0"]
    assert traces[1].judgements == []  # each call is told once


def test_a_comparison_without_a_verdict_fails_and_is_recorded():
    traces = traces_of("It is Paris.", "It is Rome.")
    with raises_code("judge"):
        asyncio.run(Judge(model=named("Refuses"), method="pairwise").score_group(TASK, traces))
    asked = [judgement.asked for judgement in traces[0].judgements]
    assert len([name for name in asked if "neutral" not in name]) == 6  # both ways round, three times each


@pytest.mark.parametrize(
    ("judge", "answers", "earned"),
    [
        ("Gullible", [f"It is Paris. {TRICK}", "It is Rome."], [0, 1]),
        ("Gullible", ["It is Rome.", f"It is Paris. {TRICK}", "Paris"], [0.5, 0, 1]),
        ("Gullible", [f"It is Paris. {TRICK}", f"It is Rome. {TRICK}", "Bonn"], [0, 0, 1]),
        ("Overcautious", ["It is Rome.", f"It is Paris. {TRICK}"], [1, 0]),
        ("Careless", ["It is Rome.", f"It is Paris.\n{TRICK}"], [0, 1]),
    ],
)
def test_an_answer_that_keeps_the_judge_from_a_verdict_loses_all_its_comparisons(judge, answers, earned):
    assert rewards(judge, *answers) == earned


@pytest.mark.parametrize("length", [300, 150])
def test_an_answer_too_long_for_the_judge_loses_and_its_group_is_scored(length):
    """Alone, or together with another of half the length."""
    long, other = "word " * length, "It is Paris. " + "or " * 150
    assert rewards("Short", long, other, "Paris") == [0, 0.75, 0.75]


def test_such_an_answer_is_named_in_its_own_trace():
    traces = traces_of("It is Rome.", f"It is Paris. {TRICK}")
    asyncio.run(Judge(model=named("Gullible"), method="pairwise").score_group(TASK, traces))
    assert [bool(trace.warnings) for trace in traces] == [False, True]
    assert "keeps the judge" in traces[1].explanation


def test_one_rollout_alone_has_nothing_to_be_compared_with():
    with raises_code("taskset", "-r", "2"):
        asyncio.run(Judge(model=named("Fair"), method="pairwise").score_group(TASK, traces_of("Paris")))


@pytest.mark.parametrize(
    ("count", "opponents", "pairs"), [(2, None, 1), (5, None, 10), (6, None, 15), (8, 2, 8), (8, 4, 16)]
)
def test_each_is_compared_with_all_others_or_with_as_many_as_were_asked_for(count, opponents, pairs):
    answers = {number: f"answer {number}" for number in range(count)}
    found = [comparison.pair for comparison in compare(answers, None, TASK, None, opponents)]
    assert len(found) == len(set(found)) == pairs
    each = [sum(number in pair for pair in found) for number in answers]
    assert set(each) == {2 * pairs // count}


def test_several_judges_compare_by_majority():
    panel = [JudgeModel(model=named(name)) for name in ("Fair", "Fair", "PrefersFirst")]
    scorer = Judge(judges=panel, method="pairwise", combine="majority")
    assert asyncio.run(scorer.score_group(TASK, traces_of("It is Paris.", "It is Rome."))) == [1, 0]
