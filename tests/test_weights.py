"""Weights that change at any moment: a seeded trainer tells, pauses, aborts and resumes while groups are played.

What must hold: nothing hangs or is lost, no call begins in a pause, a sequence is what the model would have said in one
piece, and each of its tokens has a version that was current when it was sampled.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Environment, Step, Task, Taskset
from treetune.core.policy import Completion
from treetune.core.trace import Outcome
from treetune.errors import PolicyError
from treetune.play.group import sample_groups
from treetune.play.host import LocalHost, always
from treetune.play.rollout import run_rollout
from treetune.play.weights import Weights, WeightsBook

WORDS = ["one", "three", "eleven"]
ANSWERS = [[*map(ord, word), 2] for word in WORDS]


class Three(Environment):
    turn = 0

    def step(self, action):
        assert action.text == WORDS[self.turn]
        self.turn += 1
        return Step("next", reward=1.0, done=self.turn == 3)


class Turns(Taskset):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt=str(index))

    def environment(self, task):
        return Three(task)


class Model:
    """Samples a token at each tick of its trainer, and works on tokens where it is told to."""

    name = "model"

    def __init__(self, rng, goes_on=True):
        self.random, self.goes_on = rng, goes_on
        self.version, self.paused, self.begun_in_pause = 0, False, 0
        self.aborting: set[asyncio.Event] = set()

    async def complete(self, request):
        self.begun_in_pause += self.paused
        tokens, partial = request.tokens, request.partial
        prompt = [*tokens.sequences[-1].ids, 7] if tokens is not None else [ord(one) for one in "prompt"]
        ids = list(partial.completion_ids) if partial is not None and self.goes_on else []
        resumed, versions = len(ids), [-1] * len(ids)
        answer = ANSWERS[request.turn]
        aborted = asyncio.Event()
        self.aborting.add(aborted)
        try:
            while len(ids) < len(answer) and not aborted.is_set():
                await asyncio.sleep(0)
                if self.random.random() < 0.3:
                    ids.append(answer[len(ids)])
                    versions.append(self.version)
        finally:
            self.aborting.discard(aborted)
        finish = "stop" if len(ids) == len(answer) else "abort"
        text = "".join(map(chr, ids)).removesuffix("\x02")
        return Completion(text, None, finish, None, prompt, ids, versions=versions, resumed=resumed)

    async def close(self):
        return None


async def train(host, model, rng, steps):
    """What a trainer may do in any order; the model itself has the new weights only within a pause."""
    for _ in range(steps):
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        calls = rng.choice(["finish", "abort", "leave"])
        pausing = asyncio.create_task(host.pause(calls=calls))
        await asyncio.sleep(0)
        model.paused = True
        if calls == "leave":
            for aborted in list(model.aborting):
                aborted.set()
            await pausing
            assert await host.pause()
        else:
            assert await pausing
        assert not model.aborting
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        model.version += rng.randrange(3)
        model.paused = False
        await host.resume(model.version)


@pytest.mark.parametrize("goes_on", [True, False], ids=["on tokens", "asked again"])
@given(seed=st.integers(0, 2**32))
def test_whatever_a_trainer_does_sequences_stay_whole(goes_on, seed):
    rng = random.Random(seed)
    model = Model(rng, goes_on)
    most = rng.choice([None, 0, 2])

    async def play():
        host = await LocalHost.open(Turns(), always(model))
        await host.set_version(0)
        training = asyncio.create_task(train(host, model, rng, 8))
        options = {"no_variance": "keep", "max_staleness": most, "of": rng.choice([2, 3])}
        groups = [group async for group in sample_groups(host, 2, count=5, ahead=3, most_dropped=1000, **options)]
        await training
        return groups, host

    groups, host = asyncio.run(asyncio.wait_for(play(), 60))
    assert model.begun_in_pause == 0
    drawn = [group.task.idx for group in groups]
    assert len(set(drawn)) == 5
    assert max(drawn) < 5 + 3  # those that were given back are drawn again before others
    assert (host.streams.pending.leased, host.episodes.live) == (0, {})
    for trace in (trace for group in groups for trace in group.traces):
        if trace.outcome is Outcome.STALE:
            assert (most is not None, trace.reward) == (True, None)
            continue
        assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 3.0)
        (sequence,) = trace.tokens.sequences
        mine = [at for at, sampled in enumerate(sequence.mask) if sampled]
        assert [sequence.ids[at] for at in mine] == [id for answer in ANSWERS for id in answer]
        versions = [sequence.versions[at] for at in mine]
        assert versions == sorted(versions)
        assert (trace.version, trace.last_version) == (versions[0], versions[-1])
        assert most is None or versions[-1] <= versions[0] + most


def test_a_server_that_aborts_every_call_is_told_of_and_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr("treetune.play.weights.LONGEST_WAIT", 0.001)

    class Aborts(Model):
        async def complete(self, request):
            return Completion("o", finish_reason="abort")

    async def play():
        taskset = Turns()
        return await run_rollout(taskset, taskset[0], Aborts(None))

    trace = asyncio.run(play())
    assert (trace.outcome, trace.reward, trace.failure.type) == (Outcome.POLICY_ERROR, None, PolicyError.__name__)
    assert "aborted 30 calls in a row" in trace.failure.message


def test_a_cancellation_in_an_abort_is_a_cancellation():
    """Both at once: whoever gave the rollout up is obeyed."""

    async def play():
        weights, taskset = Weights(), Turns()
        model = Model(random.Random(0))
        running = asyncio.create_task(run_rollout(taskset, taskset[0], model, weights=weights))
        while not model.aborting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        pausing = asyncio.create_task(weights.pause("abort"))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running, pausing])
        weights.resume()
        return running.cancelled(), pausing.result(), weights.in_use

    assert asyncio.run(play()) == (True, True, False)


def test_a_trainer_may_name_its_model_anew_at_every_step(monkeypatch):
    monkeypatch.setattr("treetune.play.weights.MOST_MODELS", 3)

    async def name():
        book = WeightsBook(Counter())
        await book.of("paused").pause()
        for step in range(10):
            book.of(f"step-{step}").set_version(step)
        for other in ("b", "c"):
            await book.of(other).pause()
        with raises_code("usage", "3 models"):
            book.of("d")
        return [model for model, _, _ in book.known()]

    assert asyncio.run(name()) == ["paused", "b", "c"]
