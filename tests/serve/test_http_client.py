"""The client of task servers: lost answers, full and dead servers are survived, and no turn is played twice."""

from __future__ import annotations

import asyncio
import json

import pytest
import task_servers
from aiohttp import web
from raising import raises_code
from task_servers import scripted

from treetune.core.environment import Action
from treetune.serve.errors import Misused, ServeError, Unreachable
from treetune.serve.http.client import TaskServerClient, read_observation


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits are as short as they can be."""
    monkeypatch.setattr("treetune.serve.http.client.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("treetune.serve.http.client.LAST_PAUSE", 0.05)


def run(play):
    return asyncio.run(play())


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def play_out(client, index=None):
    """An episode to its end; its rewards."""
    async with await client.start(index) as episode:
        rewards = []
        while not episode.over:
            rewards.append((await episode.step("go")).reward)
        return rewards


def test_an_episode_is_started_stepped_and_ended():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            async with await client.start(4) as episode:
                assert (episode.observation.content, episode.info) == ("task 4", {"task": 4})
                first = await episode.step("a")
                assert (first.observation.content, first.reward, first.done) == ("a at 0", 0.0, False)
                await episode.step("b")
                last = await episode.step("c")
            assert (last.reward, last.done, last.info) == (1.0, True, {"success": True})
            assert server.cancelled == []
            with pytest.raises(Misused, match="over"):
                await episode.step("d")

    run(play)


def test_an_episode_that_is_left_early_is_cancelled_whatever_happened():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            with pytest.raises(ZeroDivisionError):
                async with await client.start() as episode:
                    raise ZeroDivisionError
            task = asyncio.create_task(hold(client))
            await until(lambda: server.seen["step"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.cancelled == [episode.id, "e-1"]

    async def hold(client):
        async with await client.start() as episode:
            await episode.step("a")
            await asyncio.sleep(60)

    run(play)


@pytest.mark.parametrize("fault", ["lose", "drop", {"status": 503}, {"status": 429}])
def test_a_step_that_failed_on_the_way_is_asked_for_again_and_played_once(fault):
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            server.faults["step"] = [None, fault, fault]
            assert await play_out(client) == [0.0, 0.0, 1.0]
            assert server.played == [("e-0", 0), ("e-0", 1), ("e-0", 2)]
            assert server.seen["step"] == 5

    run(play)


@pytest.mark.parametrize("fault", ["lose", "drop", {"status": 503}, {"status": 429, "text": "busy"}])
def test_a_step_is_never_asked_for_twice_where_the_server_does_not_number_its_turns(fault):
    async def play():
        async with scripted(features=[]) as server, TaskServerClient(server.url) as client:
            server.faults["step"] = [fault]
            async with await client.start() as episode:
                with pytest.raises(ServeError):
                    await episode.step("a")
            assert server.seen["step"] == 1
            assert server.cancelled == ["e-0"]

    run(play)


def test_a_start_whose_answer_was_lost_gives_the_same_episode():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            server.faults["start"] = ["lose", "lose"]
            assert await play_out(client) == [0.0, 0.0, 1.0]
            assert server.seen["start"] == 3
            assert len(server.turns) == 1

    run(play)


def test_a_full_server_is_asked_again_until_patience_ends():
    async def play():
        async with scripted() as server, TaskServerClient(server.url, patience=5) as client:
            server.most = 0
            assert await play_out(client) == [0.0, 0.0, 1.0]
            server.faults["start"] = [{"status": 429, "text": "full"}] * 1000
            async with TaskServerClient(server.url, patience=0.2) as hasty:
                with raises_code("busy"):
                    await hasty.start()

    run(play)


def test_a_server_that_is_not_there_is_told_with_a_remedy():
    async def play():
        url = f"http://127.0.0.1:{task_servers.free_port()}"
        async with TaskServerClient(url, patience=0.1) as client:
            with raises_code("unreachable", "treetune serve"):
                await client.start()

    run(play)


def test_episodes_are_spread_over_servers_and_stay_where_they_are():
    async def play():
        async with scripted() as one, scripted() as two, TaskServerClient([one.url, two.url]) as client:
            episodes = [await client.start() for _ in range(6)]
            assert sorted(episode.url for episode in episodes) == sorted([one.url] * 3 + [two.url] * 3)
            for _ in range(3):
                assert all(
                    isinstance(step.reward, float) for step in await client.step_many([(e, "x") for e in episodes])
                )
            assert len(one.played) == len(two.played) == 9

    run(play)


def test_a_dead_server_is_left_out_and_used_again_when_it_is_back():
    async def play():
        async with scripted() as one, scripted() as two, TaskServerClient([one.url, two.url]) as client:
            port = int(two.url.rpartition(":")[2])
            await two.stop()
            for _ in range(4):
                assert await play_out(client) == [0.0, 0.0, 1.0]
            assert (len(one.played), len(two.played)) == (12, 0)
            await two.start(port)
            while not two.played:
                episodes = [await client.start() for _ in range(2)]
                await asyncio.gather(*(episode.step("x") for episode in episodes))
                for episode in episodes:
                    await episode.cancel()

    run(play)


def test_a_server_that_comes_back_as_another_is_asked_anew_what_it_offers():
    async def play():
        async with scripted(features=["turn"]) as server, TaskServerClient(server.url) as client:
            assert (await client.start()).numbered
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            server.features = []
            starting = asyncio.create_task(client.start())
            await asyncio.sleep(0.1)
            await server.start(port)
            assert not (await starting).numbered

    run(play)


@pytest.mark.parametrize("features", [["turn", "request_id"], ["turn"], []])
def test_many_are_started_and_stepped_at_once(features):
    async def play():
        async with scripted(features=features) as server, TaskServerClient(server.url) as client:
            server.most = 5  # one of them finds no room at first
            episodes = await client.start_many(range(6))
            assert [episode.observation.content for episode in episodes] == [f"task {n}" for n in range(6)]
            await episodes[2].cancel()
            server.turns[episodes[3].id] = 3  # it is over there, and nobody knows here
            results = await client.step_many([(e, f"a{n}") for n, e in enumerate(episodes) if n != 2])
            assert [type(result).__name__ for result in results] == ["Step", "Step", "Refusal", "Step", "Step"]
            assert results[1].observation.content == "a1 at 0"
            assert results[2].status == 410
            assert episodes[3].over
            assert server.seen["step"] == 5

    run(play)


def test_of_many_those_whose_answer_is_lost_are_played_once():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            server.faults = {"start": ["lose", None, "lose"], "step": ["lose", None, "lose"]}
            episodes = await client.start_many([None] * 3)
            await client.step_many([(episode, "x") for episode in episodes])
            assert len(server.turns) == len(server.played) == 3

    run(play)


def test_actions_and_observations_of_every_type_travel():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client, await client.start() as episode:
            step = await episode.step(Action("json", {"a": [1, None]}))
            assert step.observation.content == "{'type': 'json', 'content': {'a': [1, None]}} at 0"
            # Half of a surrogate pair, which no UTF-8 holds.
            assert (await episode.step("\ud800")).observation.content == "\ud800 at 1"

    run(play)
    assert read_observation("hi").messages() == [{"role": "user", "content": "hi"}]
    assert read_observation({"a": 1}).type == "json"
    assert read_observation({"type": "text", "content": "x"}).content == "x"
    assert read_observation([{"role": "user", "content": "x"}]).type == "messages"
    assert read_observation(None).messages() == []


BAD = {
    "garbage": {"body": b"\xff\xfe{"},
    "no object": {"body": b"[1, 2]"},
    "no id": {"body": b'{"observation": "x"}'},
    "a page": {"text": "<html>hello</html>", "content_type": "text/html"},
    "a redirect": {"status": 307, "headers": {"Location": "http://127.0.0.1:1/"}},
    "a bug": {"status": 500, "text": "Traceback"},
    "deep": {"body": b'{"a":' * 100_000},
    "not found": {"status": 404},
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_an_answer_that_is_none_is_an_error_of_the_server(answer):
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            server.faults["start"] = [answer]
            with raises_code("failed", f"{server.url}/api/episode/start"):
                await client.start()
            assert server.seen["start"] == 1

    run(play)


@pytest.mark.parametrize("reward", ["NaN", "1e999", '"1"', "[1]"])
def test_a_reward_that_is_no_number_is_an_error_of_the_server(reward):
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client, await client.start() as episode:
            body = f'{{"observation": "x", "reward": {reward}, "done": true}}'.encode()
            server.faults["step"] = [{"body": body}]
            with pytest.raises(ServeError):
                await episode.step("a")

    run(play)


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("treetune.system.http_body.MOST_BYTES", 1 << 20)

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async def play():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", endless)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with TaskServerClient(url, patience=0.1) as client:
            with raises_code("failed", "1 MB"):
                await client.start()
        await runner.cleanup()

    run(play)


def test_a_token_is_shown_to_the_server_and_a_wrong_one_is_told():
    async def play():
        async with scripted(token="secret") as server:
            async with TaskServerClient(server.url, token="secret") as client:
                assert await play_out(client) == [0.0, 0.0, 1.0]
            async with TaskServerClient(server.url, token="wrong") as client:
                with raises_code("denied", "token"):
                    await client.start()

    run(play)


@pytest.mark.parametrize("url", ["127.0.0.1:5000", "ftp://x", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_told_before_anything_is_sent(url):
    with raises_code("usage", "http://"):
        TaskServerClient(url)


def test_a_minimal_server_in_another_process_is_played_with_nothing_but_start_and_step(tmp_path):
    async def play(url):
        async with TaskServerClient(url) as client:
            async with await client.start(7) as episode:
                assert episode.observation.messages() == [{"role": "user", "content": "Guess a number from 0 to 9."}]
                assert (await episode.step("3")).observation.content == "It is higher."
                assert (await episode.step("7")).reward == 1.0
            assert await client.info() == {}

    with task_servers.minimal() as (url, _):
        asyncio.run(play(url))


def test_a_server_that_dies_in_a_step_is_told_at_once_and_asked_no_second_time(tmp_path):
    record = tmp_path / "steps"

    async def play(url):
        async with TaskServerClient(url, patience=0.1) as client, await client.start(1) as episode:
            with pytest.raises(Unreachable):
                await episode.step("die")

    with task_servers.minimal(record) as (url, _):
        asyncio.run(play(url))
    assert record.read_text() == "die\n"


def test_an_error_of_the_server_says_what_and_how_to_mend_it():
    async def play():
        async with scripted() as server, TaskServerClient(server.url) as client:
            told = {"error": "no such task", "kind": "usage", "remedy": "take a smaller index", "status": 422}
            server.faults["start"] = [{"body": json.dumps(told), "status": 422}]
            with raises_code("failed", "index") as raised:
                await client.start(99)
            assert (raised.value.status, raised.value.reason) == (422, "usage")

    run(play)


@pytest.mark.parametrize("patience", [0.02, 0.05, 0.1])
def test_a_server_that_drops_every_start_is_unreachable_whenever_patience_ends(patience):
    async def play():
        async with scripted() as server, TaskServerClient(server.url, patience=patience) as client:
            server.faults["start"] = ["drop"] * 1000
            with pytest.raises(Unreachable):
                await client.start()

    run(play)
