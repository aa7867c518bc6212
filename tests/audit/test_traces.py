"""Rules over traces, which need nothing but traces: those of an audit, of a run, of a training."""

from __future__ import annotations

import pytest

from treetune.audit import judge_traces, suspicions
from treetune.audit.report import AuditReport
from treetune.audit.traces import OF_ALL, OF_ONE, OF_SCORED, group_traces, spread_of
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import AgentRecord, Failure, Judgement, Outcome, Trace, Turn


def trace(*said, reward=1.0, idx=0, rollout=0, truth="the right answer", outcome=Outcome.COMPLETED, **more):
    task = Task(idx=idx, prompt=f"task {idx}", reward_spec={"ground_truth": truth})
    turns = [Turn(message={"role": "assistant", "content": text}) for text in said]
    return Trace(task=task, uid=task.uid, rollout=rollout, reward=reward, outcome=outcome, turns=turns, **more)


def judge(*traces):
    report = AuditReport("traces")
    judge_traces(traces, report)
    return {finding.rule: finding for finding in report.findings}


SUSPECT = {
    "empty-answer-paid": trace("  \n"),
    "tiny-answer-paid": trace("the"),
    "repeated-answer-paid": trace(*["the right answer"] * 5),
    "truncated-paid": trace("it is the right answer", outcome=Outcome.TRUNCATED),
    "floor-answer-paid": trace(r"\boxed{1} \boxed{2} or \boxed{the right answer}"),
}


@pytest.mark.parametrize("rule", OF_ONE)
def test_a_trace_that_was_paid_for_nothing_is_suspicious(rule):
    assert [one.rule for one in suspicions(SUSPECT[rule])] == [rule]
    assert judge(SUSPECT[rule])[rule].rows == [0]
    SUSPECT[rule].reward, kept = 0.0, SUSPECT[rule].reward
    assert suspicions(SUSPECT[rule]) == []  # it was not paid
    SUSPECT[rule].reward = kept


def test_what_an_agent_did_on_a_machine_is_its_answer():
    """What it hands in may be empty, or the same in every task."""
    paid = [trace("DONE", idx=idx, truth=f"truth {idx}") for idx in range(4)]
    assert "same-answer-paid" in judge(*paid)
    for idx, one in enumerate(paid):
        did = [Turn(message={"role": "assistant", "content": f"I write the file {idx}"})]
        one.agent = AgentRecord(name="coder", calls=did, on_machine=True)
    assert "same-answer-paid" not in judge(*paid)
    paid[0].turns[0].message["content"] = ""
    assert suspicions(paid[0]) == []
    paid[0].agent.on_machine = False
    assert [one.rule for one in suspicions(paid[0])] == ["empty-answer-paid"]


def test_a_shrug_and_an_echo_are_what_solves_nothing():
    echo = trace("  What is it?\n", truth="it")
    echo.turns[0].observed = [{"role": "user", "content": "What is it?"}]
    assert [one.rule for one in suspicions(trace("I do not know.", truth="x"))] == ["floor-answer-paid"]
    assert [one.found for one in suspicions(echo)] == ["1 for the last message, repeated"]


def judged(*verdicts, reward=0.5):
    calls = [
        Judgement(model=f"judge {number}", asked="grade", prompt="?", verdict=None if said is None else {"grade": said})
        for number, said in enumerate(verdicts)
    ]
    return trace("the right answer", reward=reward, judgements=calls)


def test_judges_that_disagree_are_told_also_where_nothing_was_paid():
    assert [one.rule for one in suspicions(judged("C", "I"))] == ["judges-disagree"]
    assert judge(judged("C", "I", reward=0.0))["judges-disagree"].evidence
    assert suspicions(judged("C", "C")) == suspicions(judged("C", None)) == []
    assert suspicions(trace("x", truth="x", metrics={"judge_split": 1.0}))[0].rule == "judges-disagree"


def test_a_text_that_loops_is_suspicious():
    assert [one.rule for one in suspicions(trace("so it is the right answer\n" * 30))] == ["repeated-answer-paid"]


@pytest.mark.parametrize("said", [["the right answer"], ["a", "b", "a", "c"], ["the right answer", "the right answer"]])
def test_an_ordinary_trace_is_not(said):
    assert suspicions(trace(*said, truth="x")) == []


def test_calls_of_tools_are_no_empty_answer():
    call = trace("", truth="x")
    call.turns[0].message["tool_calls"] = [{"function": {"name": "finish", "arguments": "{}"}}]
    assert suspicions(call) == []


def spread(*rewards, **more):
    """Four rollouts of each task, with these rewards."""
    return [
        trace(f"answer {number} of {idx}, the right answer", reward=reward, idx=idx, rollout=number, **more)
        for idx, group in enumerate(rewards)
        for number, reward in enumerate(group)
    ]


def test_where_nothing_is_learned_it_says_so():
    assert set(judge(*spread(*[[0.0] * 4] * 10))) == {"never-solved", "no-signal"}
    assert set(judge(*spread(*[[1.0] * 4] * 10))) == {"always-solved", "no-signal"}
    assert set(judge(*spread(*[[0.5] * 4] * 10))) == {"never-solved", "no-signal"}  # tied, though not at an end
    assert judge(*spread(*[[1.0, 0.0, 0.0, 1.0]] * 10)) == {}


def test_the_shares_are_those_of_tasks():
    figures = spread_of(group_traces(spread([1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1])))
    assert (figures["all_pass"], figures["all_fail"], figures["mixed"], figures["tied"]) == (0.25, 0.25, 0.5, 0.5)
    assert figures["mean_reward"] == 0.5
    assert figures["deviation_within"] == pytest.approx((0.25 / 2) ** 0.5)


def test_rewards_that_follow_length_are_found_within_tasks_only():
    groups = [[1.0, 0.0, 1.0, 0.0]] * 20
    follows = spread(*groups)
    for one in follows:
        one.usage = Usage(completion_tokens=100 + 50 * int(one.reward) + one.task.idx)
    assert "longer answers earn more: rank correlation +1.00" in judge(*follows)["reward-follows-length"].found
    for one in follows:  # tasks differ in length, their rollouts do not
        one.usage = Usage(completion_tokens=100 * (one.task.idx + 1) + one.rollout // 2)
    assert "reward-follows-length" not in judge(*follows)


def test_one_answer_to_different_tasks_is_found():
    same = [trace("magic words", idx=idx, truth=f"truth {idx}") for idx in range(4)]
    assert judge(*same)["same-answer-paid"].count == 4
    assert "same-answer-paid" not in judge(*[trace("yes, it is so", idx=idx, truth="yes") for idx in range(4)])


def test_failures_are_told_with_their_cause():
    failed = [trace("x", reward=0.0, idx=idx) for idx in range(3)]
    for one in failed[:2]:
        one.fail(Outcome.ENVIRONMENT_ERROR, Failure("OSError", "no disk", "environment"))
    found = judge(*failed)["rollouts-fail"]
    assert found.severity == "error"
    assert "environment_error: no disk" in found.evidence[0]


def test_without_rollouts_the_rules_are_said_to_be_untried():
    report = AuditReport("nothing")
    judge_traces([], report)
    assert set(report.not_tried) == {*OF_ONE, *OF_SCORED, *OF_ALL}
