"""Weights that change under rollouts: the version of each token, staleness, pauses. Servers and model are processes."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from serve_process import serve
from serving import run
from trained_model import END, trained_model

from treetune.policy import Sampling
from treetune.serve import BlockingEnvClient, EnvClient
from treetune.trace import Outcome

TASKS = """
import os
from treetune import Environment, Step, Task, Taskset

class Talk(Environment):
    turn = 0
    def step(self, action):
        self.turn += 1
        text = action.text
        if text == "raise":
            raise ValueError("no such answer")
        reward = float(text) if text.replace(".", "").isdigit() else 1.0
        return Step(f"turn {self.turn}", reward=reward, done=self.turn == self.task.extra_info["turns"])
    def close(self):
        with open(os.environ["TREETUNE_TEST_MARKS"], "a") as file:
            file.write("closed\\n")

class Talks(Taskset):
    INFINITE = True
    turns = 3
    def task_at(self, index):
        return Task(prompt=f"task {index}", extra_info={"turns": self.turns})
    def environment(self, task):
        with open(os.environ["TREETUNE_TEST_MARKS"], "a") as file:
            file.write("opened\\n")
        return Talk(task)

class Single(Talks):
    turns = 1
"""
EXACT = Sampling(logprobs=True, extra={"return_token_ids": True})
names = (f"model-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def model():
    with trained_model() as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=[0, 2], ids=["lone", "pool"])
def served(request, tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("weights")
    (folder / "tasks.py").write_text(TASKS)
    marks = folder / "marks"
    arguments = ("tasks.py:Talks", "--zmq", "tcp://127.0.0.1:0", "-w", request.param)
    models = ("--allow-endpoint", model.url, "--endpoint.max_retries", 1)
    with serve(folder, *arguments, *models, TREETUNE_TEST_MARKS=str(marks)) as server:
        yield SimpleNamespace(address=server.address, pid=server.process.pid, marks=marks, workers=request.param)


@pytest.fixture
def play(served, model):
    """Runs a test's coroutine with a client, and options that name a model of its own."""

    def start(test):
        async def work():
            async with EnvClient(served.address, deadline=60, run_deadline=90) as client:
                name = next(names)
                of = {"model": name, "endpoint": model.url}
                watch = SimpleNamespace(
                    name=name,
                    of=of,
                    ask={**of, "sampling": EXACT},
                    control=lambda **change: asyncio.to_thread(model.control, name, **change),
                    wait=lambda **wanted: asyncio.to_thread(model.wait, name, **wanted),
                    seen=lambda: asyncio.to_thread(model.seen, name),
                )
                return await test(client, watch)

        return run(work())

    return start


def versions_of(trace):
    """The version of each sampled token, by turns."""
    (sequence,) = trace.tokens.sequences
    assert len(sequence.versions) == len(sequence.ids) == len(sequence.mask)
    assert all((version == -1) == (mine == 0) for version, mine in zip(sequence.versions, sequence.mask, strict=True))
    found = [version for version in sequence.versions if version >= 0]
    size = len(found) // len(trace.turns)
    return [found[at : at + size] for at in range(0, len(found), size)]


def sampled(trace):
    (sequence,) = trace.tokens.sequences
    return "".join(chr(id) for id, mine in zip(sequence.ids, sequence.mask, strict=True) if mine)


async def begin(client, watch, **options):
    """A rollout whose first call has reached the model, which answers nothing yet."""
    await watch.control(permits=0)
    task = await client.sample()
    running = asyncio.create_task(client.run_rollout(task, **watch.ask, **options))
    await watch.wait(asked=1, open=1)
    return task, running


# Versions


@pytest.mark.parametrize("tells", ["metadata", "meta_info"])
def test_the_version_that_the_endpoint_tells_is_on_every_token(play, tells):
    async def test(client, watch):
        await watch.control(version=5, tells=tells)
        _, running = await begin(client, watch)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        await watch.control(version=6, permits=1)
        await watch.wait(asked=3)  # the second call began with version 5
        await watch.control(permits=1)
        return await running

    trace = play(test)
    size = len("answer" + END)
    assert versions_of(trace) == [[5] * size, [5] * size, [6] * size]
    assert (trace.version, trace.last_version, trace.reward) == (5, 6, 3.0)


def test_the_version_that_the_trainer_tells_is_on_what_begins_afterwards(play):
    async def test(client, watch):
        await client.set_version(3, **watch.of)
        _, running = await begin(client, watch)
        await client.set_version(4, **watch.of)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        other = asyncio.create_task(client.run_rollout(await client.sample(), version=9, **watch.ask))
        await watch.wait(asked=3)  # so the server has heard of version 9
        await watch.control(permits=None)
        return await running, await other

    trace, other = play(test)
    size = len("answer" + END)
    assert versions_of(trace) == [[3] * size, [4] * size, [9] * size]
    assert (trace.version, trace.last_version) == (3, 9)
    assert (other.version, other.last_version) == (9, 9)


def test_where_nobody_tells_there_are_no_versions(play):
    async def test(client, watch):
        return await client.run_rollout(await client.sample(), **watch.ask)

    trace = play(test)
    assert (trace.version, trace.last_version, trace.tokens.sequences[0].versions) == (None, None, [])


def test_a_version_that_is_told_late_breaks_no_sequence(play):
    async def test(client, watch):
        _, running = await begin(client, watch)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        await client.set_version(1, **watch.of)
        await watch.control(permits=None)
        return await running

    trace = play(test)
    (sequence,) = trace.tokens.sequences
    found = [version for version, mine in zip(sequence.versions, sequence.mask, strict=True) if mine]
    size = len("answer" + END)
    assert found == [-1] * 2 * size + [1] * size
    assert (trace.version, trace.last_version) == (1, 1)


def test_weights_without_a_number_have_no_version(play):
    async def test(client, watch):
        await watch.control(version="default")
        return await client.run_rollout(await client.sample(), **watch.ask)

    assert play(test).version is None


def test_a_trace_of_a_policy_without_tokens_has_its_version_too(play):
    async def test(client, watch):
        await watch.control(gives_ids=False)
        return await client.run_group(await client.sample(), 2, version=2, **watch.of)

    assert [(trace.version, trace.tokens) for trace in play(test)] == [(2, None)] * 2


def test_a_version_in_a_header_is_read_where_the_endpoint_is_said_to_have_one(model, tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    name = next(names)
    model.control(name, version=12, tells="header")
    models = ("-m", name, "--endpoint.base_url", model.url, "--endpoint.version_header", "X-Weights")
    marks = {"TREETUNE_TEST_MARKS": str(tmp_path / "marks")}
    with (
        serve(tmp_path, "tasks.py:Single", "--zmq", "tcp://127.0.0.1:0", *models, **marks) as server,
        BlockingEnvClient(server.address) as client,
    ):
        trace = client.run_rollout(client.sample())
        assert (trace.version, client.stats()["version"]) == (12, 12)


# Oversampling


def test_the_first_that_are_scored_are_the_group_and_the_others_leave_nothing(play, served):
    opened = lambda: served.marks.read_text().split() if served.marks.exists() else []  # noqa: E731

    async def test(client, watch):
        before = (await client.stats())["counts"].get("stragglers", 0)
        await watch.control(permits=0)
        running = asyncio.create_task(client.run_group(await client.sample(), 3, of=5, **watch.ask))
        await watch.wait(asked=5, open=5)
        while not running.done():
            await watch.control(permits=1)
            await asyncio.sleep(0.02)
        seen = await watch.wait(open=0)
        stats = await client.stats()
        return running.result(), seen, stats["counts"]["stragglers"] - before, stats["in_flight"]

    traces, seen, stragglers, in_flight = play(test)
    assert len(traces) == 3
    assert all(trace.outcome is Outcome.COMPLETED and len(trace.turns) == 3 for trace in traces)
    assert sorted({trace.rollout for trace in traces}) == [trace.rollout for trace in traces]
    assert (stragglers, in_flight, seen["open"]) == (2, 0, 0)
    assert opened().count("opened") == opened().count("closed")


def test_failures_do_not_count_towards_the_group(play):
    async def test(client, watch):
        await watch.control(answers=["raise", "raise"])
        task = await client.sample()
        good = await client.run_group(task, 2, of=4, **watch.ask)
        await watch.control(answer="raise")
        return good, await client.run_group(task, 2, of=3, **watch.ask)

    good, bad = play(test)
    assert [trace.outcome for trace in good] == [Outcome.COMPLETED] * 2
    assert [(trace.outcome, trace.reward) for trace in bad] == [(Outcome.ENVIRONMENT_ERROR, None)] * 2


def test_a_group_of_fewer_than_it_has_is_refused(play):
    async def test(client, watch):
        task = await client.sample()
        with pytest.raises(Exception, match="of is the number"):
            await client.run_group(task, 4, of=3, **watch.of)
        with pytest.raises(Exception, match="a group has"):
            await client.run_group(task, 4, of=5000, **watch.of)

    play(test)


def test_a_client_that_gives_up_takes_the_whole_group_with_it(play):
    async def test(client, watch):
        await watch.control(permits=0)
        running = asyncio.create_task(client.run_group(await client.sample(), 2, of=4, **watch.of))
        await watch.wait(asked=4, open=4)
        running.cancel()
        await watch.wait(open=0, dropped=4)

    play(test)
