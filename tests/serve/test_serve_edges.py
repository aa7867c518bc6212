"""A server at its edges: while it stops, after a deadline, with episodes that are over and memory that is bounded."""

from __future__ import annotations

import asyncio
import time

import pytest
from raising import raises_code
from serving import Flaw, Numbers, Raw, Stream, Talking, run, served, serving, until, until_in_flight

from treetune import Environment, Step, Task, build_taskset
from treetune.core.contract import Limits
from treetune.errors import UsageError
from treetune.play.streams import MOST_STREAMS, State, Streams, StreamState
from treetune.serve import BlockingEnvClient
from treetune.serve.errors import Misused, ServeError, Unreachable
from treetune.serve.remote_taskset import Served, ServedConfig
from treetune.serve.store import KEPT_DRAWS, Store
from treetune.serve.zmq.calls import ReplyCache
from treetune.serve.zmq.client import EnvClient


class Laborious(Numbers):
    """A tenth of a second for each task."""

    def task_at(self, index):
        time.sleep(0.1)
        return Task(prompt=str(index))


# Stopping


@pytest.mark.parametrize("workers", [0, 1])
def test_tasks_that_are_being_made_when_the_server_stops_are_given_by_the_next_one(tmp_path, sockets, workers):
    async def restart():
        folder = {"state": tmp_path / "state", "address": f"ipc://{sockets}/server", "workers": workers}
        async with EnvClient(folder["address"]) as client:
            async with serving(Laborious(), **folder, drain_seconds=0.0) as server:
                asked = [asyncio.create_task(client.sample()) for _ in range(4)]
                await until(lambda: server.streams.cursor() == 4)
                await server.stop()
            assert not all(one.done() for one in asked)
            async with serving(Laborious(), **folder):
                return sorted([(await one).idx for one in asked]), (await client.sample()).idx

    assert run(restart()) == ([0, 1, 2, 3], 4)


def test_a_server_that_stops_lets_tasks_be_made_to_the_end():
    async def stop():
        async with serving(Laborious(), drain_seconds=20) as server, EnvClient(server.address, deadline=20) as client:
            asked = [asyncio.create_task(client.sample()) for _ in range(3)]
            await until(lambda: server.streams.cursor() == 3)
            await server.stop()
            return [(await one).idx for one in asked]

    assert run(stop()) == [0, 1, 2]


# A client that does not wait


def test_a_draw_that_nobody_waited_for_is_the_next_that_the_client_gets():
    async def give_up():
        async with served(Laborious()) as client:
            asked = [asyncio.create_task(client.sample()) for _ in range(3)]
            await asyncio.sleep(0.05)
            asked[1].cancel()
            kept = [(await asked[0]).idx, (await asked[2]).idx]
            other = (await client.sample(stream="other")).idx
            return kept, other, [(await client.sample()).idx for _ in range(2)]

    assert run(give_up()) == ([0, 2], 0, [1, 3])


def test_after_a_restore_the_next_task_is_the_restored_one_whatever_was_given_up():
    async def give_up():
        async with served(Laborious()) as client:
            for _ in range(2):
                await client.sample()
            state = await client.state()
            asked = asyncio.create_task(client.sample())
            await asyncio.sleep(0.05)
            asked.cancel()
            await asyncio.sleep(0)
            await client.restore(state)
            return [(await client.sample()).idx for _ in range(2)]

    assert run(give_up()) == [2, 3]


def test_a_client_that_is_closed_tells_those_who_wait_and_stops_their_work(tmp_path, monkeypatch):
    from serving import Hangs

    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def close():
        async with serving(Hangs()) as server:
            client = EnvClient(server.address)
            running = asyncio.create_task(client.run_rollout(await client.sample()))
            await until((tmp_path / "begun-0").exists)
            await client.close()
            with raises_code("unreachable"):
                await running
            await until((tmp_path / "ended-0").exists)
            with pytest.raises(UsageError, match="closed"):
                await client.sample()
            return client._socket

    assert run(close()) is None


def test_the_name_of_a_request_cannot_be_taken_twice():
    async def twice():
        async with served(Numbers()) as client:
            task = await client.sample()
            await client.run_rollout(task, request="mine")
            await client.info()  # acknowledges it
            with pytest.raises(Misused, match="new id"):
                await client.run_rollout(task, request="mine")

    run(twice())


def test_a_task_that_could_not_be_made_is_not_drawn_and_its_request_is_not_tried_again_under_its_id():
    async def draw():
        async with serving(Flaw()) as server:
            with Raw(server.address) as raw:
                for number in range(9):
                    await raw.ask(b"%d" % number, "sample")
                same = [await raw.ask(b"nine", "sample") for _ in range(5)]
                others = [await raw.ask(b"nine%d" % number, "sample") for number in range(6)]
                return same, others

    same, others = run(draw())
    assert "Flaw.task_at(9) failed: ValueError: nine is missing" in same[0]["error"]
    assert "tried 1 of 3" in same[0]["remedy"]
    assert same == [same[0]] * 5
    assert [other.get("index") for other in others] == [10, None, 11, None, 12, 13]
    assert ["tried 2 of 3" in others[1]["remedy"], "tried 3 of 3" in others[3]["remedy"]] == [True, True]


# Episodes


@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_turn_can_be_asked_for_again_and_further_ones_are_refused(workers):
    async def play():
        async with served(Talking(), workers=workers) as client:
            episode = (await client.start(await client.sample())).episode
            steps = [await client.step(episode, "stop", 0) for _ in range(2)]
            for wrong in (episode, "e-unknown"):
                with pytest.raises(Misused):
                    await client.step(wrong, "more", 1)
            return steps, (await client.health()).in_flight

    (first, again), in_flight = run(play())
    assert first.done
    assert (again, in_flight) == (first, 0)


class Stuck(Environment):
    async def step(self, action):
        if action.text == "fail":
            raise ValueError("no such word")
        await asyncio.sleep(0 if action.text == "go" else 600)
        return Step("on")


class Sticking(Numbers):
    def environment(self, task):
        return Stuck(task)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("action", ["wait", "fail"])
def test_an_episode_that_fails_no_longer_counts_as_work(workers, action):
    async def play():
        async with served(Sticking(), workers=workers, limits=Limits(timeout=0.3)) as client:
            episode = (await client.start(await client.sample())).episode
            await client.step(episode, "go", 0)
            before = (await client.health()).in_flight
            with pytest.raises(ServeError, match=r"not finished after 0.3 seconds|no such word"):
                await client.step(episode, action, 1)
            return before, (await client.health()).in_flight

    assert run(play()) == (1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_its_caller_gave_up_ends_its_episode(workers):
    async def play():
        async with served(Sticking(), workers=workers) as client:
            episode = (await client.start(await client.sample())).episode
            step = asyncio.create_task(client.step(episode, "wait", 0))
            await asyncio.sleep(0.2)
            step.cancel()
            await until_in_flight(client, 0)

    run(play())


def test_episodes_that_nobody_steps_are_forgotten_by_the_pool_too():
    async def idle():
        async with serving(Talking(), workers=1) as server, EnvClient(server.address) as client:
            await client.start(await client.sample())
            before = server.host.stats()["loads"]
            server.doors[0].terms.idle_seconds = 0.1
            await until(lambda: not server.host.episodes.live)
            await until(lambda: server.host.stats()["loads"] == [0])
            return before, (await client.health()).in_flight

    assert run(idle()) == ([1], 0)


# What is kept


def test_only_ids_of_an_ids_length_are_acknowledged():
    async def acknowledge():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                await raw.ask(b"1", "info", ack=[b"x" * 1_000_000, b"y" * 64])
                return list(server.doors[0].calls.replies._settled), raw.head[1:17]

    settled, client = run(acknowledge())
    assert settled == [client + b"y" * 64]


def test_old_answers_are_forgotten_also_where_no_new_ones_come():
    answers = ReplyCache(seconds=0.0)
    answers.keep(b"1", b"digest", b"data")
    time.sleep(0.001)
    answers.shrink()
    assert (len(answers), answers.find(b"1", b"digest")) == (0, None)


def test_draws_are_pruned_also_by_servers_that_live_briefly(tmp_path):
    store = Store(tmp_path)
    for start in range(0, KEPT_DRAWS + 6_000, 2_000):
        numbers = range(start, start + 2000)
        store.commit({"": StreamState(0)}, [(b"%d" % number, b"", "", number, None, 0) for number in numbers])
        store.since_pruned = 0  # as if it began anew
    kept = store.draws()
    store.close()
    assert len(kept) == KEPT_DRAWS
    assert b"0" not in kept


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_state_of_the_very_beginning_goes_back_there(kind):
    async def go_back():
        async with served(kind()) as client:
            state = await client.state()
            before = [(await client.sample()).prompt for _ in range(3)]
            await client.restore(state)
            return before == [(await client.sample()).prompt for _ in range(3)]

    assert run(go_back())


def test_a_stream_at_its_beginning_is_one_that_never_was(tmp_path):
    async def come_and_go():
        async with serving(Stream(), state=tmp_path) as server, EnvClient(server.address) as client:
            await client.sample()
            for number in range(MOST_STREAMS + 2):
                state = await client.state(stream=f"short {number}")
                await client.sample(stream=f"short {number}")
                await client.restore(state)
            return server.streams.cursors, (await client.sample()).idx

    assert run(come_and_go()) == ({"": 1}, 1)
    store = Store(tmp_path)
    assert store.streams() == {"": StreamState(2)}
    store.close()


def test_an_evaluation_on_a_generator_leaves_no_stream_behind():
    async def evaluate():
        async with serving(Stream()) as server, EnvClient(server.address) as client:
            taskset = Served(ServedConfig(address=server.address))
            taskset.describe_as(await client.info())
            drawn = [task.idx async for task, _ in client.draw(5)]
            return drawn, dict(server.streams.cursors)

    assert run(evaluate()) == ([0, 1, 2, 3, 4], {})


LEARNS = {
    "id": "arithmetic",
    "profile": {"parameter": "level", "values": [1, 2, 3], "online": 0.5, "schedule": {"kind": "pools"}},
}


def test_asking_for_the_state_of_a_stream_makes_none():
    streams = Streams(build_taskset(LEARNS))
    assert len({str(streams.stream_state(f"{number}")) for number in range(3)}) == 1
    assert streams.cursors == {}


def test_an_observed_reward_that_is_no_number_moves_nothing():
    async def learn():
        async with served(build_taskset(LEARNS)) as client:
            task = await client.sample()
            before = await client.state()
            with pytest.raises(ServeError, match="finite"):
                await client.observe(task, float("nan"))
            assert await client.state() == before
            await client.observe(task, 1.0)
            return (await client.state()) == before

    assert run(learn()) is False


@pytest.mark.parametrize(
    "wrong", [7, {"credits": [0.0]}, {"credits": [], "drawn": [], "rates": [], "inner": []}], ids=str
)
def test_a_state_of_pass_rates_that_does_not_fit_is_refused(wrong):
    async def restore():
        async with served(build_taskset(LEARNS)) as client:
            state = await client.state()
            with pytest.raises(ServeError, match="the state of a curriculum"):
                await client.restore(State({"": StreamState(5, wrong)}, state.taskset))
            return (await client.info()).cursor

    assert run(restore()) == 0


def test_a_task_can_be_passed_on_by_the_blocking_client():
    async def pass_on():
        async with serving(Numbers()) as server:
            return await asyncio.to_thread(blocking, server.address)

    def blocking(address):
        with BlockingEnvClient(address) as one, BlockingEnvClient(address) as other:
            return other.run_rollout(one.portable(one.sample())).reward

    assert run(pass_on()) == 1.0


def test_a_client_says_that_nobody_answers_while_it_waits(caplog):
    async def ask():
        async with EnvClient("ipc:///tmp/tt-nobody-listens-here", deadline=5) as client:
            with pytest.raises(Unreachable):
                await client.sample()

    run(ask())
    (told,) = [record.getMessage() for record in caplog.records]
    assert "tt-nobody-listens-here has not answered yet: is the server running there?" in told


@pytest.mark.parametrize("workers", [0, 1])
def test_a_client_cannot_raise_what_a_timeout_earns(workers):
    """Else it could end every rollout at once, and take the reward of a right answer for it."""

    async def ask():
        refused = []
        async with served(Numbers(), workers=workers, limits=Limits(timeout_reward=-0.5)) as client:
            task = await client.sample()
            for reward in (0.0, 1.0):
                asked = Limits(timeout=0.001, timeout_reward=reward)
                for run_it in (client.run_rollout(task, limits=asked), client.run_group(task, 2, limits=asked)):
                    with raises_code("usage", "at most -0.5") as error:
                        await run_it
                    refused.append(error.value.kind)
            trace = await client.run_rollout(task, limits=Limits(timeout_reward=-1.0))
        return refused, trace.reward

    assert run(ask()) == (["usage"] * 4, 1.0)
