"""ORS on the port of OpenEnv: sessions by a header, calls as events that can be asked for again."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_playing import BOTH
from openenv_playing import Echo, Echoes, Shopping, playing
from serving import run, until

from treetune import Environment, Step, Task, Taskset
from treetune.serve.openenv.ors import events_of
from treetune.serve.openenv.ors_taskset import read_events

MINE = {"X-Session-ID": "mine"}


async def call(client, name, input, headers=MINE, env="echoes", task_id=None):
    """The events of a call."""
    body = {"name": name, "input": input} | ({"task_id": task_id} if task_id is not None else {})
    async with client.session.post(f"{client.door.address}/{env}/call", json=body, headers=headers) as reply:
        assert reply.headers["content-type"] == "text/event-stream", await reply.text()
        return list(read_events(await reply.text()))


async def result(client, name, input, **options):
    events = await call(client, name, input, **options)
    assert [event for event, _ in events] == ["task_id", "end"], events
    return json.loads(events[-1][1])


async def create(client, index=0, headers=MINE):
    return await client.ask("POST", "/create", {"split": "train", "index": index}, headers=headers)


@BOTH
def test_a_session_is_an_episode_of_one_task(workers):
    async def play():
        async with playing(Shopping(), workers=workers) as client:
            assert await create(client, 1) == (200, {"sid": "mine"})
            prompt = await client.ask("GET", "/shopping/prompt", headers=MINE)
            assert prompt == (200, [{"text": "Buy red 1.", "detail": None, "type": "text"}])
            _, tools = await client.ask("GET", "/shopping/task_tools", headers=MINE)
            assert [tool["name"] for tool in tools["tools"]] == ["search", "buy", "answer"]
            found = await result(client, "search", {"query": "red"}, env="shopping")
            assert found["output"]["blocks"][0]["text"] == '["red 0","red 1"]'
            wrong = await result(client, "serach", {}, env="shopping")
            assert (wrong["ok"], "no tool 'serach'" in wrong["error"]) == (False, True)
            bought = await result(client, "buy", {"item": "red 1"}, env="shopping")
            assert (bought["output"]["reward"], bought["output"]["finished"]) == (1.0, True)
            over = await result(client, "buy", {"item": "red 1"}, env="shopping")
            assert over == {"ok": False, "error": "this episode is over"}
            assert (await client.ask("POST", "/ping", headers=MINE))[1] == {"status": "ok"}
            assert (await client.ask("POST", "/delete", headers=MINE))[1] == {"sid": "mine"}
            assert (await client.ask("POST", "/ping", headers=MINE))[0] == 404
            assert not client.door.sessions.by_id
            assert client.server.streams.cursor() == 0

    run(play())


def test_what_a_model_says_is_the_tool_answer_and_a_failure_is_no_result():
    async def play():
        async with playing(Echoes()) as client:
            await create(client)
            said = await result(client, "answer", {"text": "hello"})
            assert (said["output"]["reward"], said["output"]["metadata"]) == (0.5, {"said": "hello"})
            closed = Echo.closed
            events = await call(client, "answer", {"text": "fail"})
            assert events[-1][0] == "error"
            assert "the machine is gone" in events[-1][1]
            await until(lambda: Echo.closed == closed + 1)
            assert (await call(client, "answer", {"text": "more"}))[-1][0] == "error"
            assert client.server.metrics.outcomes == {"environment_error": 1}

    run(play())


def test_the_result_of_a_call_can_be_asked_for_again_and_nothing_is_played_twice():
    async def play():
        async with playing(Echoes()) as client:
            await create(client)
            first = await call(client, "answer", {"text": "hello"})
            again = await call(client, "answer", {"text": "hello"}, task_id=first[0][1])
            assert again == first
            (episode,) = client.live.values()
            assert episode.turn == 1
            assert await call(client, "answer", {"text": "x"}, task_id="unknown") == [("error", "unknown task_id")]

    run(play())


def test_a_call_goes_on_where_its_client_loses_the_connection():
    class Naps(Environment):
        async def step(self, action):
            await asyncio.sleep(0.3)
            return Step("slept", reward=1.0, done=True)

    class Napping(Taskset):
        def load_tasks(self):
            return [Task(prompt="sleep")]

        def environment(self, task):
            return Naps(task)

    async def play():
        async with playing(Napping()) as client:
            await create(client)
            url, body = f"{client.door.address}/napping/call", {"name": "answer", "input": {"text": "go"}}
            async with client.session.post(url, json=body, headers=MINE) as reply:
                id = (await reply.content.readuntil(b"\n\n")).decode().partition("data: ")[2].strip()
            found = await call(client, "answer", {"text": "go"}, env="napping", task_id=id)
            assert json.loads(found[-1][1])["output"]["reward"] == 1.0

    run(play())


def test_two_clients_cannot_create_one_session():
    async def play():
        async with playing(Echoes()) as client:
            made = await asyncio.gather(create(client), create(client))
            assert sorted(status for status, _ in made) == [200, 400]
            assert {"detail": "Session already exists"} in [told for _, told in made]
            assert len(client.live) == 1
            results = await asyncio.gather(*(result(client, "answer", {"text": "a" * n}) for n in range(5)))
            assert sorted(len(one["output"]["blocks"][0]["text"]) for one in results if one["output"]["blocks"]) == [
                1,
                2,
                3,
                4,
            ]

    run(play())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "either task_spec or both"),
        ({"split": "train"}, 422, "either task_spec or both"),
        ({"split": "test", "index": 0}, 400, "only 'train'"),
        ({"split": "train", "index": 5}, 400, "Invalid task index"),
        ({"task_spec": {"a": 1}}, 400, "does not name a task"),
        ({"task_spec": {"split": "train", "index": 1}, "env_name": "other"}, 404, "unknown environment"),
        ({"task_spec": {"split": "train", "index": 1}, "more": 1}, 422, "more"),
    ],
)
def test_a_session_that_cannot_be_is_refused_and_none_is_left(body, status, words):
    async def play():
        async with playing(Echoes()) as client:
            found, told = await client.ask("POST", "/create", body, headers=MINE)
            assert (found, words in str(told["detail"])) == (status, True), told
            assert not client.door.sessions.by_id

    run(play())


def test_a_session_has_a_name_and_is_known():
    async def play():
        async with playing(Echoes()) as client:
            for path in ("/create", "/delete", "/ping", "/echoes/call"):
                status, told = await client.ask("POST", path, {})
                assert (status, told["detail"]) == (400, "X-Session-ID header is required"), path
            for path in ("/echoes/prompt", "/echoes/task_tools"):
                status, told = await client.ask("GET", path, headers=MINE)
                assert (status, told["detail"]) == (404, "Active environment not found")
            _, tools = await client.ask("GET", "/echoes/tools")
            assert [tool["name"] for tool in tools["tools"]] == ["answer"]
            assert not client.live

    run(play())


def test_a_ping_counts_as_a_step_of_its_episode():
    async def play():
        async with playing(Echoes()) as client:
            await create(client)
            (episode,) = client.live.values()
            episode.heard -= 200
            before = episode.heard
            assert (await client.ask("POST", "/ping", headers=MINE))[0] == 200
            assert episode.heard > before + 100

    run(play())


def test_a_long_result_comes_in_chunks_none_of_which_begins_with_a_space():
    text = json.dumps({"ok": True, "text": ("word \u00a0 " * 5000)}, ensure_ascii=False)
    events = list(read_events(b"".join(events_of(text)).decode()))
    assert [event for event, _ in events][-2:] == ["chunk", "end"]
    assert "".join(data for _, data in events) == text
    assert not any(data[0].isspace() for _, data in events)
