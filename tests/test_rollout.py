"""Rollouts: every ending has a name, its cause is kept, and close always runs."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings

import pytest

from treetune import (
    Completion,
    Contract,
    Environment,
    InvalidAction,
    Limits,
    Outcome,
    Score,
    Step,
    Task,
    Taskset,
    run_rollout,
)
from treetune.core.policy import Usage
from treetune.core.trace import Trace, decode_trace, encode_trace
from treetune.errors import ContextFullError
from treetune.models import load_policy
from treetune.play.rollout import Rollout, score_together


class Script:
    name = "script"

    def __init__(self, *answers, **fields):
        self.answers, self.fields = answers, fields

    async def complete(self, request):
        answer = self.answers[request.turn % len(self.answers)]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = ""
        return answer if isinstance(answer, Completion) else Completion(text=answer, **self.fields)

    async def close(self):
        pass


def chained(number):
    """An error with as many causes, as a parser gives that goes down into an answer."""
    error = ValueError("the first")
    for _ in range(number):
        error, cause = ValueError("the last"), error
        try:
            raise error from cause
        except ValueError:
            pass
    return error


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("says nothing")


class Talk(Environment):
    """Each word does something."""

    closed = 0
    threads: set[str] = set()

    def start(self):
        return "begin"

    def step(self, action):
        self.threads.add(threading.current_thread().name)
        match action.text.split():
            case ["end", reward]:
                return Step("bye", reward=float(reward), done=True, info={"answer": reward, "success": True})
            case ["fail"]:
                raise RuntimeError("the environment broke")
            case ["stop"]:
                raise StopIteration("early")
            case ["chain"]:
                raise chained(3000)
            case ["mute"]:
                raise Mute
            case ["sleep"]:
                time.sleep(0.5)
            case ["limit"]:
                return Step(done=True, truncated=True)
            case ["nonsense"]:
                return "not a step"
        return Step("go on", reward=0.25, info={"metrics": {"turns": 1}})

    def close(self):
        type(self).closed += 1


class Talks(Taskset):
    def load_tasks(self):
        return [Task(prompt="p")]

    def environment(self, task):
        return Talk(task)


class Single(Taskset):
    def load_tasks(self):
        return [Task(prompt="p", reward_spec={"ground_truth": "yes"})]

    async def reward(self, task, answer):
        return Score(float(answer == "yes"), answer=answer, explanation="compared", metrics={"length": len(answer)})


def run(policy, taskset=None, **limits):
    taskset = taskset or Talks()
    return asyncio.run(run_rollout(taskset, taskset[0], policy, limits=Limits(**limits)))


@pytest.fixture(autouse=True)
def _reset():
    Talk.closed, Talk.threads = 0, set()


@pytest.mark.parametrize(
    ("answers", "limits", "outcome", "cause"),
    [
        (["end 1"], {}, Outcome.COMPLETED, None),
        (["limit"], {}, Outcome.TRUNCATED, None),
        (["talk"], {"max_turns": 3}, Outcome.TRUNCATED, None),
        (["fail"], {}, Outcome.ENVIRONMENT_ERROR, "the environment broke"),
        (["stop"], {}, Outcome.ENVIRONMENT_ERROR, "early"),
        (["chain"], {}, Outcome.ENVIRONMENT_ERROR, "the last"),
        (["mute"], {}, Outcome.ENVIRONMENT_ERROR, "Mute"),
        (["nonsense"], {}, Outcome.ENVIRONMENT_ERROR, "return a Step"),
        (["end nan"], {}, Outcome.ENVIRONMENT_ERROR, "finite"),
        ([RuntimeError("no model")], {}, Outcome.POLICY_ERROR, "no model"),
        ([TimeoutError("its own")], {"timeout": 30}, Outcome.POLICY_ERROR, "its own"),
        ([30.0], {"timeout": 0.1}, Outcome.TIMEOUT, "0.1 seconds"),
        (["sleep"], {"timeout": 0.1}, Outcome.TIMEOUT, "0.1 seconds"),
    ],
)
def test_each_ending_is_named_and_its_cause_kept(answers, limits, outcome, cause):
    trace = run(Script(*answers), **limits)
    assert trace.outcome is outcome
    assert (trace.failure is None) if cause is None else (cause in trace.failure.message)
    assert Talk.closed == 1
    assert trace.failure is None or len(trace.failure.traceback) < 30_000


def test_a_cancelled_rollout_closes_and_keeps_what_it_had():
    async def cancel():
        taskset = Talks()
        trace = Trace(task=taskset[0], uid=taskset[0].uid)
        rollout = Rollout(taskset, Script("talk", 30.0), trace, None, None)
        task = asyncio.create_task(rollout.run())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return rollout.trace

    trace = asyncio.run(cancel())
    assert trace.outcome is Outcome.CANCELLED
    assert trace.turns[0].message["content"] == "talk"
    assert Talk.closed == 1


def test_a_trace_records_turns_rewards_metrics_and_the_conversation():
    trace = run(Script("talk", "talk", "end 0.5"))
    assert [turn.reward for turn in trace.turns] == [0.25, 0.25, 0.5]
    assert trace.reward == 1.0
    assert (trace.answer, trace.success, trace.metrics) == ("0.5", True, {"turns": 1.0})
    assert [message["content"] for message in trace.messages] == [
        "begin", "talk", "go on", "talk", "go on", "end 0.5", "bye",
    ]  # fmt: skip
    assert trace.timing.total >= trace.timing.policy


@pytest.mark.parametrize("answers", [["talk", 0.05, "sleep", "end 1"], ["talk", 0.05, "sleep", "fail"]])
def test_a_trace_says_when_it_began_and_what_each_turn_took(answers):
    before = time.time()
    trace = run(Script(*answers))
    assert before <= trace.timing.began <= time.time() - trace.timing.total
    policy = [turn.policy_seconds for turn in trace.turns]
    environment = [turn.environment_seconds for turn in trace.turns]
    assert sum(policy) == pytest.approx(trace.timing.policy)
    assert sum(environment) == pytest.approx(trace.timing.environment)
    assert max(environment) == environment[[turn.message["content"] for turn in trace.turns].index("sleep")] > 0.4
    assert (trace.timing.score, all(policy)) == (0.0, True)


def test_what_scoring_took_is_told_where_it_is_all_there_is_to_a_step():
    trace = run(Script("yes"), Single())
    assert trace.timing.score == trace.timing.environment > 0


def test_a_synchronous_environment_never_blocks_the_loop():
    async def beat_while_sleeping():
        taskset, beats = Talks(), 0
        rollout = asyncio.create_task(run_rollout(taskset, taskset[0], Script("sleep", "end 1")))
        while not rollout.done():
            await asyncio.sleep(0.01)
            beats += 1
        return beats

    assert asyncio.run(beat_while_sleeping()) > 15
    assert "MainThread" not in Talk.threads


def test_one_answer_needs_no_environment():
    trace = run(Script("yes"), Single())
    assert (trace.reward, trace.answer, trace.explanation, trace.metrics) == (1.0, "yes", "compared", {"length": 3.0})
    assert run(Script("no"), Single()).reward == 0.0


def test_an_answer_cut_off_is_scored_but_marked():
    trace = run(Script("yes", finish_reason="length"), Single())
    assert (trace.outcome, trace.reward) == (Outcome.TRUNCATED, 1.0)


def test_a_taskset_that_cannot_score_says_so():
    class Mute(Taskset):
        def load_tasks(self):
            return [Task(prompt="p")]

    trace = run(Script("x"), Mute())
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert "write reward" in trace.failure.message


def test_token_ids_are_kept_as_sampled_over_several_turns():
    turns = [
        Completion(text="talk", prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5], usage=Usage(2, 1)),
        Completion(text="talk", prompt_ids=[1, 2, 3, 9], completion_ids=[4, 5], logprobs=[-1, -2], usage=Usage(4, 2)),
        Completion(text="end 1", prompt_ids=[1, 8, 9], completion_ids=[6], logprobs=[-3], usage=Usage(3, 1)),
    ]
    trace = run(Script(*turns))
    first, second = trace.tokens.sequences
    assert (first.ids, first.mask) == ([1, 2, 3, 9, 4, 5], [0, 0, 1, 0, 1, 1])
    assert first.logprobs == [0.0, 0.0, -0.5, 0.0, -1, -2]
    assert (second.ids, second.mask, second.breaks_history) == ([1, 8, 9, 6], [0, 0, 0, 1], True)
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (9, 4)


def test_a_trace_survives_the_disk():
    trace = run(Script("talk", "end 1"))
    assert decode_trace(encode_trace(trace)) == trace


def test_what_json_cannot_hold_does_not_lose_a_trace():
    trace = run(Script("talk \ud800", "end 1"))
    trace.turns[0].info = {"object": {1, 2}, "thing": Talk}
    assert decode_trace(encode_trace(trace)).reward == trace.reward


def test_a_group_is_scored_together():
    class Ranked(Single):
        def score_group(self, task, traces):
            best = max(len(trace.answer) for trace in traces)
            return [float(len(trace.answer) == best) for trace in traces]

    taskset = Ranked()
    traces = [run(Script(answer), taskset) for answer in ("a", "abc", "ab")]
    asyncio.run(score_together(taskset, taskset[0], traces))
    assert [trace.reward for trace in traces] == [0.0, 1.0, 0.0]


def test_alphabet_sort_rewards_each_turn():
    from treetune import load_taskset

    taskset = load_taskset("alphabet-sort")
    gold = asyncio.run(run_rollout(taskset, taskset[0], load_policy("scripted:gold", taskset)))
    assert gold.reward == pytest.approx(1.0)
    assert len(gold.turns) == 3
    right, *_ = taskset.gold(taskset[0])
    half = asyncio.run(run_rollout(taskset, taskset[0], Script(right, "nothing", "nothing")))
    assert half.reward == pytest.approx(1 / 3)


# Whose doing it is


class Numbers(Taskset):
    calls = 0

    def load_tasks(self):
        return [Task(prompt="2 + 3?", reward_spec={"ground_truth": "5"})]

    def reward(self, task, answer):
        return float(int(answer) == int(task.ground_truth))


def score(taskset, answer, **limits):
    return asyncio.run(run_rollout(taskset, taskset[0], Script(answer), limits=Limits(**limits)))


@pytest.mark.parametrize("answer", ["abc", "9" * 5000, "", "5.5"])
def test_an_answer_that_a_scorer_fails_by_earns_nothing_and_the_line_is_named(answer):
    trace = score(Numbers(), answer)
    assert (trace.outcome, trace.reward, trace.passed()) == (Outcome.COMPLETED, 0.0, False)
    assert "ValueError at test_rollout.py:" in trace.explanation
    (warning,) = trace.warnings
    assert "Numbers.reward() raised ValueError at test_rollout.py:" in warning


def test_a_scorer_that_fails_by_every_answer_has_failed_itself():
    class Broken(Numbers):
        def reward(self, task, answer):
            return self.nothing

    trace = score(Broken(), "5")
    assert (trace.outcome, trace.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert trace.failure.place.startswith("test_rollout.py:")


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("judge is down"), KeyError("choices")])
def test_what_fails_for_a_moment_is_not_the_answers_doing(error):
    class Flaky(Numbers):
        def reward(self, task, answer):
            self.calls += 1
            if self.calls == 1:
                raise error
            return 1.0

    trace = score(Flaky(), "5")
    passing = isinstance(error, KeyError)  # what data can cause is tried once more
    assert (trace.outcome, trace.reward) == ((Outcome.COMPLETED, 1.0) if passing else (Outcome.ENVIRONMENT_ERROR, None))


@pytest.mark.parametrize("answer", ["nan", "-inf", "1e400"])
def test_an_answer_that_makes_its_reward_no_number_earns_nothing(answer):
    class Near(Numbers):
        def reward(self, task, answer):
            return -abs(float(answer) - 5)

    assert (score(Near(), answer).reward, score(Near(), "4").reward) == (0.0, -1.0)


def test_an_environment_says_itself_that_an_action_is_invalid():
    class Strict(Environment):
        def step(self, action):
            if action.text != "go":
                raise InvalidAction(f"{action.text!r} is not a move", reward=-1.0)
            return Step("on", 0.25)

    class Walk(Numbers):
        def environment(self, task):
            return Strict(task)

    taskset = Walk()
    trace = asyncio.run(run_rollout(taskset, taskset[0], Script("go", "fly")))
    assert (trace.outcome, trace.reward, trace.success) == (Outcome.COMPLETED, -0.75, False)
    assert trace.explanation == "'fly' is not a move"
    assert not trace.warnings


@pytest.mark.parametrize("slow", ["policy", "environment"])
def test_a_rollout_over_its_time_has_the_reward_that_the_limits_give(slow):
    class Sleepy(Environment):
        def step(self, action):
            if action.text == "sleep":
                time.sleep(1)
            return Step("on", 0.25)

    class Nap(Numbers):
        def environment(self, task):
            return Sleepy(task)

    taskset = Nap()
    script = Script("go", 1.0) if slow == "policy" else Script("go", "sleep")
    for reward in (None, 0.0, -1.0):
        limits = Limits(timeout=0.2, timeout_reward=reward)
        trace = asyncio.run(run_rollout(taskset, taskset[0], script, limits=limits))
        assert (trace.outcome, trace.reward, trace.scored) == (Outcome.TIMEOUT, reward, reward is not None)
        assert (trace.failure.type, trace.failure.phase) == ("TimeoutError", slow)
        assert not trace.passed()
        assert decode_trace(encode_trace(trace)).reward == reward


def test_a_start_that_takes_too_long_is_no_doing_of_the_policy():
    class Late(Environment):
        def start(self):
            time.sleep(1)

    class Lates(Numbers):
        def environment(self, task):
            return Late(task)

    trace = score(Lates(), "5", timeout=0.1, timeout_reward=0.0)
    assert (trace.outcome, trace.reward) == (Outcome.TIMEOUT, None)


def test_a_policy_that_fills_its_context_is_scored_with_what_it_had():
    class Chat(Environment):
        def step(self, action):
            return Step("on", 0.25)

    class Chats(Numbers):
        def environment(self, task):
            return Chat(task)

    taskset, full = Chats(), ContextFullError("no room")
    later = asyncio.run(run_rollout(taskset, taskset[0], Script("much", full)))
    assert (later.outcome, later.reward, later.turns[-1].finish_reason) == (Outcome.TRUNCATED, 0.25, "length")
    first = asyncio.run(run_rollout(taskset, taskset[0], Script(full)))
    assert (first.outcome, first.reward) == (Outcome.POLICY_ERROR, None)


class Endless(Environment):
    def step(self, action):
        return Step("go on", done=len(action.text) > 3)


def test_an_episode_without_a_declared_limit_is_truncated_after_256_turns_and_says_so():
    class Goes(Taskset):
        def load_tasks(self):
            return [Task(prompt="?")]

        def environment(self, task):
            return Endless(task)

    class Short(Goes):
        CONTRACT = Contract(max_turns=4)

    taskset = Goes()
    with pytest.warns(UserWarning, match=r"an episode of Endless was truncated after 256 turns"):
        trace = asyncio.run(run_rollout(taskset, taskset[0], Script(*["a"] * 257)))
    assert (trace.outcome, len(trace.turns)) == (Outcome.TRUNCATED, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for declared, limits in ((taskset, Limits(max_turns=4)), (Short(), None), (Short(), Limits(max_turns=9))):
            trace = asyncio.run(run_rollout(declared, declared[0], Script(*["a"] * 9), limits=limits))
            assert (trace.outcome, len(trace.turns)) == (Outcome.TRUNCATED, 4)
