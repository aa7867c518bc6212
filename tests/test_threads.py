"""User code that hangs, exits or fails costs its own rollout, never the run."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from treetune import Environment, Limits, Outcome, Step, Task, Taskset, run_rollout
from treetune.core.policy import Completion, Request, Sampling
from treetune.models import load_policy
from treetune.models.local import LocalPolicy
from treetune.play.rollout import score_together
from treetune.system import threads
from treetune.system.threads import call


class Stuck(Taskset):
    def load_tasks(self):
        return [Task(prompt="a")]

    def reward(self, task, answer):
        released.wait(30)

    def gold(self, task):
        released.wait(30)

    def score_group(self, task, traces):
        released.wait(30)


class Fine(Stuck):
    def reward(self, task, answer):
        return 1.0


released = threading.Event()


@pytest.fixture(autouse=True)
def _stuck_threads_end():
    released.clear()
    yield
    released.set()


def rollout(taskset, model="scripted:echo", timeout: float | None = None):
    return run_rollout(taskset, taskset[0], load_policy(model, taskset), limits=Limits(timeout=timeout))


def test_any_number_of_stuck_calls_leaves_room_for_others():
    async def many():
        stuck = await asyncio.gather(*(rollout(Stuck(), timeout=0.2) for _ in range(300)))
        return {trace.outcome for trace in stuck}, (await rollout(Fine(), timeout=10)).outcome

    assert asyncio.run(many()) == ({Outcome.TIMEOUT}, Outcome.COMPLETED)


def test_calls_beyond_the_limit_wait_and_are_all_done(monkeypatch):
    monkeypatch.setattr(threads, "MOST_CALLS", 2)
    begun: list[int] = []

    def work(number):
        begun.append(number)
        if number < 2:
            released.wait(30)
        return number

    async def run():
        jobs = [asyncio.create_task(call(work, number)) for number in range(6)]
        await asyncio.sleep(0.1)
        jobs[5].cancel()
        await asyncio.sleep(0)
        waiting = list(begun)
        jobs[0].cancel()
        return waiting, await asyncio.gather(*jobs[2:5]), await call(work, 7), jobs[5].cancelled()

    assert asyncio.run(run()) == ([0, 1], [2, 3, 4], 7, True)
    assert 5 not in begun


def test_a_gold_answer_that_never_comes_is_a_timeout_and_blocks_nobody():
    async def both():
        return await asyncio.gather(rollout(Stuck(), "scripted:gold", 0.2), rollout(Fine(), timeout=10))

    assert [trace.outcome for trace in asyncio.run(both())] == [Outcome.TIMEOUT, Outcome.COMPLETED]


def test_a_group_that_is_never_scored_is_a_timeout():
    async def group():
        taskset = Fine()
        traces = [await rollout(taskset)]
        await score_together(taskset, taskset[0], traces, Limits(timeout=0.2))
        return traces[0]

    trace = asyncio.run(group())
    assert trace.outcome is Outcome.TIMEOUT
    assert "0.2 seconds" in trace.failure.message


def test_a_group_that_fails_without_a_word_names_the_error_and_keeps_the_traceback():
    class Silent(Fine):
        def score_group(self, task, traces):
            raise ValueError

    async def group():
        taskset = Silent()
        traces = [await rollout(taskset)]
        await score_together(taskset, taskset[0], traces)
        return traces[0]

    trace = asyncio.run(group())
    assert (trace.outcome, trace.failure.message) == (Outcome.ENVIRONMENT_ERROR, "ValueError")
    assert "raise ValueError" in trace.failure.traceback


@pytest.mark.parametrize("closing", ["sync", "async"])
def test_an_environment_that_is_made_too_late_is_closed_all_the_same(closing):
    closed = threading.Event()

    class Late(Environment):
        def __init__(self, task):
            released.wait(30)
            super().__init__(task)

        def step(self, action):
            return Step(done=True)

        if closing == "sync":

            def close(self):
                closed.set()
        else:

            async def close(self):
                closed.set()

    class Lates(Fine):
        def environment(self, task):
            return Late(task)

    async def run():
        trace = await rollout(Lates(), timeout=0.1)
        assert not closed.is_set()
        released.set()
        assert await asyncio.to_thread(closed.wait, 10)
        return trace

    assert asyncio.run(run()).outcome is Outcome.TIMEOUT


def test_a_scorer_that_exits_fails_its_rollout_only():
    class Exits(Fine):
        def reward(self, task, answer):
            sys.exit(0)

    class ExitsOnTheLoop(Fine):
        async def reward(self, task, answer):
            sys.exit(0)

    for taskset in (Exits(), ExitsOnTheLoop()):
        trace = asyncio.run(rollout(taskset))
        assert trace.outcome is Outcome.ENVIRONMENT_ERROR
        assert "sys.exit(0)" in trace.failure.message


def test_a_cancellation_raised_by_user_code_is_an_error_of_that_code():
    def cancels():
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="CancelledError"):
        asyncio.run(call(cancels))


def test_a_local_model_generates_one_completion_at_a_time_also_after_a_timeout():
    policy = LocalPolicy.__new__(LocalPolicy)
    policy._busy = asyncio.Lock()
    under_way: list[str] = []
    most = 0

    def generate(request):
        nonlocal most
        under_way.append(request.key)
        most = max(most, len(under_way))
        time.sleep(0.2)
        under_way.remove(request.key)
        return Completion(text=request.key)

    policy.generate = generate

    def request(key):
        return Request(messages=[], sampling=Sampling(), task=SimpleNamespace(), turn=0, key=key)

    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.complete(request("given up")), 0.05)
        return await asyncio.gather(policy.complete(request("a")), policy.complete(request("b")))

    assert [completion.text for completion in asyncio.run(run())] == ["a", "b"]
    assert most == 1
