"""The HTTP episode server: what a client sees of it, in one process and through a pool."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from http_playing import BOTH, playing
from raising import raises_code
from serving import Colours, Dear, Numbers, Stream, Talking, Talks, run, until

from treetune import Observation, Step
from treetune.core.environment import show
from treetune.errors import UsageError
from treetune.system.access import Access, parse_http_address
from treetune.tasksets.arithmetic import Arithmetic


class Records(Talks):
    """Says what kind of action it got; `boom` breaks it, `hang` never ends, `wait` takes a moment."""

    closed: list[int] = []
    played: list[str] = []

    async def start(self):
        return self.task.prompt

    async def step(self, action):
        Records.played.append(action.text)
        if action.text == "boom":
            raise ValueError("broken on purpose")
        if action.text == "wait":
            await asyncio.sleep(0.2)
        if action.text == "hang":
            await asyncio.sleep(600)
        if action.text == "image":
            return Step(Observation("image", "data:image/png;base64,AA=="))
        if action.text == "big":
            return Step({"n": 2**80, "half": "\ud800"}, info={"odd": {1, 2}.__class__})
        return Step(f"{action.type}: {action.text}", reward=0.5, done=action.text == "stop")

    async def close(self):
        Records.closed.append(self.task.idx)


class Recording(Numbers):
    def environment(self, task):
        return Records(task)


@pytest.fixture(autouse=True)
def _fresh():
    Records.closed.clear()
    Records.played.clear()


@BOTH
def test_an_episode_is_played_as_the_seed_says(workers):
    async def play():
        async with playing(Arithmetic(), workers=workers) as client:
            health, info = await client.get("/api/health"), await client.get("/api/task/info")
            first, second = await client.good("start"), await client.good("start", {})
            chosen = await client.good("start", {"task_index": 1})
            right = Arithmetic().gold(Arithmetic().task_at(0))
            done = await client.good("step", {"episode_id": first["episode_id"], "action": right})
            wrong = await client.good(
                "step", {"episode_id": second["episode_id"], "action": {"type": "text", "content": "no"}}
            )
            return health, info, first, second, chosen, done, wrong

    health, info, first, second, chosen, done, wrong = run(play())
    assert health == (200, {"status": "ok", "episodes": 0, "workers": workers})
    assert (info[1]["name"].lower(), info[1]["num_tasks"], info[1]["cursor"]) == ("arithmetic", None, 0)
    assert first["observation"]["type"] == "messages"
    assert [begun["info"]["task_index"] for begun in (first, second, chosen)] == [0, 1, 1]
    assert second["observation"] == chosen["observation"] != first["observation"]
    assert (done["reward"], done["done"], done["info"]["success"]) == (1.0, True, True)
    assert (wrong["reward"], wrong["done"], wrong["info"]["success"]) == (0.0, True, False)


@BOTH
def test_a_repeated_turn_gets_its_first_answer_and_is_not_played_again(workers):
    async def play():
        async with playing(Talking(), workers=workers) as client:
            id = await client.begun()
            zero, one = await client.step(id, "a", 0), await client.step(id, "b", 1)
            again = [await client.step(id, "other", 0), await client.step(id, "other", 1)]
            skipped = await client.step(id, "c", 5)
            end = await client.step(id, "stop", 2)
            after = await client.step(id, "stop", 2), await client.step(id, "x", 3), await client.step(id, "x")
            return [zero, one], again, skipped, end, after

    first, again, skipped, end, (repeated, later, turnless) = run(play())
    assert again == first
    assert first[0][1]["observation"] == {"type": "text", "content": "you said a"}
    assert (skipped[0], skipped[1]["path"]) == (409, "$.turn")
    assert end[1]["done"]
    assert repeated == end
    assert (later[0], turnless[0], later[1]["kind"]) == (410, 410, "finished")


def test_the_same_turn_asked_for_at_once_is_played_once():
    async def play():
        async with playing(Recording()) as client:
            id = await client.begun()
            same = await asyncio.gather(*(client.step(id, "wait", 0) for _ in range(5)))
            each = await asyncio.gather(*(client.step(id, str(number)) for number in range(3)))
            return same, each

    same, each = run(play())
    assert len({json.dumps(answer) for answer in same}) == 1
    assert sorted(Records.played) == ["0", "1", "2", "wait"]
    assert {status for status, _ in [*same, *each]} == {200}


def test_a_caller_that_goes_away_finds_the_answer_when_it_comes_back():
    async def play():
        async with playing(Recording()) as client:
            id = await client.begun()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.step(id, "wait", 0), 0.05)
            return await client.step(id, "wait", 0)

    assert run(play())[0] == 200
    assert Records.played == ["wait"]


def test_a_start_with_a_name_can_be_repeated():
    async def play():
        async with playing(Numbers()) as client:
            bodies = [{"request_id": "mine"}, {"request_id": "mine"}, {"request_id": "other"}]
            answers = [await client.good("start", body) for body in bodies]
            return answers, (await client.get("/api/task/info"))[1]["cursor"]

    (one, same, other), cursor = run(play())
    assert one == same != other
    assert cursor == 2


def test_the_name_of_another_start_is_refused():
    async def play():
        async with playing(Numbers()) as client:
            first = await client.good("start", {"request_id": "1", "task_index": 3})
            others = [{"request_id": "1"}, {"request_id": "1", "task_index": 4}, {"request_id": "1", "step": 7}]
            refused = [await client.post("start", body) for body in others]
            return first, await client.good("start", {"request_id": "1", "task_index": 3}), refused

    first, again, refused = run(play())
    assert first == again
    assert [(status, answer["path"]) for status, answer in refused] == [(409, "$.request_id")] * 3


@pytest.mark.parametrize(
    ("path", "body", "fault"),
    [
        ("start", {"task_index": "3"}, "$.task_index"),
        ("start", {"task_index": -1}, "$.task_index"),
        ("start", {"task_index": 2**70}, "$.task_index"),
        ("start", [], "$"),
        ("step", {"episode_id": "x"}, "$"),
        ("step", {"episode_id": "x", "action": 5}, "$.action"),
        ("step", {"episode_id": "x", "action": {"type": "text"}}, "$.action"),
        ("step", {"episode_id": "x", "action": "a", "turn": -1}, "$.turn"),
        ("step", {"episode_id": 7, "action": "a"}, "$.episode_id"),
        ("cancel", {}, "$"),
        ("start_batch", {"episodes": {}}, "$.episodes"),
        ("step_batch", {"steps": []}, "$.steps"),
    ],
)
def test_a_bad_body_is_told_with_the_path_of_the_fault(path, body, fault):
    async def ask():
        async with playing(Numbers()) as client:
            return await client.post(path, body)

    status, answer = run(ask())
    assert (status, answer["path"]) == (422, fault)


def test_garbage_and_wrong_paths_get_their_codes():
    async def ask():
        async with playing(Numbers(), http={"max_bytes": 2000}) as client:
            id = await client.begun()
            for data in (b"{", b"\xff\xfe", b"[" * 1500, b'{"episode_id": "\xed\xa0\x80"}', b"null"):
                status, answer = await client.post("step", data=data)
                assert (status, answer["path"]) == (422, "$"), answer
            large = await client.post("step", {"episode_id": id, "action": "x" * 3000})
            codes = [
                (await client.get("/api/nothing"))[0],
                (await client.get("/api/episode/step"))[0],
                (await client.post("step", {"episode_id": "nobody", "action": ""}))[0],
                (await client.post("cancel", {"episode_id": "nobody"}))[0],
            ]
            return large[0], codes, (await client.step(id, "still here"))[0]

    assert run(ask()) == (413, [404, 405, 404, 404], 200)


@BOTH
def test_too_many_episodes_are_told_to_wait(workers):
    async def ask():
        async with playing(Talking(), workers=workers, http={"max_episodes": 2}) as client:
            one, _ = await client.begun(), await client.begun()
            full = await client.post("start")
            after = client.headers.get("Retry-After")
            await client.good("cancel", {"episode_id": one})
            return full, after, (await client.post("start"))[0]

    full, after, again = run(ask())
    assert (full[0], full[1]["kind"], after, again) == (429, "busy", "1", 200)


@BOTH
def test_the_capacity_counts_the_episodes_of_both_doors_together(workers):
    from treetune.serve.zmq.client import EnvClient

    async def ask():
        options = {"address": "tcp://127.0.0.1:0", "capacity": 2, "workers": workers}
        async with (
            playing(Numbers(), **options) as client,
            EnvClient(client.server.address, run_deadline=2) as puller,
        ):
            task = await puller.sample()
            one, two = await client.begun(), await puller.start(task)
            in_flight = (await puller.health()).in_flight, (await client.get("/api/health"))[1]["episodes"]
            full = await client.post("start")
            for refused in (puller.start(task), puller.run_rollout(task)):
                with raises_code("busy", "2 rollouts", "of 2"):
                    await refused
            await client.good("cancel", {"episode_id": one})
            reward = (await puller.run_rollout(task)).reward
            again = await client.begun()
            crossed = await client.step(two.episode, "x"), await puller.cancel(again)
            await puller.cancel(two.episode)
            return in_flight, full, reward, crossed, (await puller.health()).in_flight

    in_flight, full, reward, crossed, left = run(ask())
    assert in_flight == (2, 1)
    assert (full[0], full[1]["kind"]) == (429, "busy")
    assert "--capacity" in full[1]["remedy"]
    assert reward == 1.0
    assert (crossed[0][0], crossed[1]) == (404, False), "each door knows its own episodes"
    assert left == 1


def test_without_a_capacity_there_is_room_for_as_many_episodes_as_the_door_allows():
    async def ask():
        async with playing(Numbers(), http={"max_episodes": 600}) as client:
            begun = await client.good("start_batch", {"episodes": [{}] * 601})
            return [answer.get("kind") for answer in begun["episodes"]]

    kinds = run(ask())
    assert kinds.count("busy") == 1
    assert kinds.count(None) == 600


def test_a_cancelled_episode_is_closed_and_gone():
    async def ask():
        async with playing(Recording()) as client:
            id = await client.begun()
            under_way = asyncio.create_task(client.step(id, "hang", 0))
            await until(lambda: Records.played)
            cancelled = await client.post("cancel", {"episode_id": id})
            return (
                cancelled,
                list(Records.closed),
                await under_way,
                await client.step(id, "x", 0),
                await client.post("cancel", {"episode_id": id}),
            )

    cancelled, closed, under_way, step, again = run(ask())
    assert cancelled[0] == 200
    assert cancelled[1]["cancelled"]
    assert closed == [0], "closed when the caller is told so"
    assert [under_way[0], step[0], again[0]] == [410] * 3
    assert step[1]["kind"] == "cancelled"


@BOTH
def test_episodes_that_nobody_steps_expire(workers):
    async def ask():
        async with playing(Talking(), workers=workers, http={"idle_seconds": 0.3}) as client:
            ids = [await client.begun() for _ in range(20)]
            await until(lambda: not client.http.live)
            await until(lambda: client.server.host.stats().get("loads", [0]) == [0])
            return await client.step(ids[0], "x")

    status, answer = run(ask())
    assert (status, answer["kind"]) == (410, "expired")
    assert "0.3 seconds" in answer["error"]


def test_the_deadline_ends_an_episode_also_in_the_middle_of_a_step():
    async def ask():
        async with playing(Recording(), http={"deadline_seconds": 0.3}) as client:
            answer = await client.step(await client.begun(), "hang")
            await until(lambda: Records.closed)
            return answer

    status, answer = run(ask())
    assert (status, answer["kind"]) == (410, "expired")


def test_an_environment_that_fails_ends_its_episode_and_nothing_else():
    async def ask():
        async with playing(Recording()) as client:
            id, other = await client.begun(), await client.begun()
            return await client.step(id, "boom"), await client.step(id, "x"), await client.step(other, "x")

    boom, after, other = run(ask())
    assert (boom[0], after[0], other[0]) == (500, 410, 200)
    assert "broken on purpose" in boom[1]["error"]
    assert "broken on purpose" in after[1]["error"]


def test_a_step_that_takes_too_long_is_told_as_such():
    from treetune.core.contract import Limits

    async def ask():
        async with playing(Recording(), limits=Limits(timeout=0.2)) as client:
            return await client.step(await client.begun(), "hang")

    status, answer = run(ask())
    assert (status, answer["kind"]) == (504, "timeout")


def test_actions_and_observations_of_every_type_arrive_as_they_are():
    async def ask():
        async with playing(Recording()) as client:
            id = await client.begun()
            actions = [
                "plain",
                {"type": "text", "content": "typed"},
                {"type": "json", "content": {"a": [1]}},
                {"type": "json", "content": "text in json"},
                {"type": "messages", "content": [{"role": "user", "content": "hi"}]},
                {"type": "bash", "content": "ls"},
            ]
            seen = [(await client.step(id, action))[1]["observation"]["content"] for action in actions]
            return seen, (await client.step(id, "image"))[1], (await client.step(id, "big"))[1]

    seen, image, big = run(ask())
    assert [text.partition(":")[0] for text in seen] == ["text", "text", "json", "json", "messages", "json"]
    assert seen[5] == 'json: {"type":"bash","content":"ls"}'
    assert image["observation"] == {"type": "image", "content": "data:image/png;base64,AA=="}
    assert big["observation"]["content"]["n"] == 2**80


@pytest.mark.parametrize("kind", [Colours, Stream, Dear])
@BOTH
def test_any_taskset_can_be_played(kind, workers):
    async def ask():
        async with playing(kind(), workers=workers) as client:
            begun = [await client.good("start") for _ in range(3)]
            chosen = await client.post("start", {"task_index": 1})
            return [start["observation"] for start in begun], chosen

    observations, chosen = run(ask())
    if kind is Stream:
        assert (chosen[0], chosen[1]["path"]) == (422, "$.task_index")
    else:
        assert chosen[1]["observation"] == observations[1]
    assert len({json.dumps(observation) for observation in observations}) == 3


def test_both_doors_share_one_cursor(tmp_path):
    from treetune.serve.zmq.client import EnvClient

    async def ask():
        options = {"address": "tcp://127.0.0.1:0", "state": tmp_path / "kept"}
        async with playing(Numbers(), **options) as client, EnvClient(client.server.address) as puller:
            order = [(await puller.sample()).idx, (await client.good("start"))["info"]["task_index"]]
            order.append((await puller.sample()).idx)
        async with playing(Numbers(), **options) as client:
            return [*order, (await client.good("start"))["info"]["task_index"]]

    assert run(ask()) == [0, 1, 2, 3], "and it is kept over a restart"


def test_a_token_is_asked_for_everywhere_but_health():
    async def ask():
        async with playing(Numbers(), access=Access(token="abc")) as client:
            codes = [(await client.get("/api/health"))[0], (await client.get("/api/task/info"))[0]]
            for token in ("abc", "abd", "ä"):
                headers = {"Authorization": f"Bearer {token}"}
                codes.append((await client.post("start", headers=headers))[0])
            return codes

    assert run(ask()) == [200, 401, 200, 401, 401]


def test_a_page_from_elsewhere_cannot_play():
    async def ask():
        async with playing(Numbers()) as client:
            ours = (await client.post("start", headers={"Origin": client.http.address}))[0]
            return ours, (await client.post("start", headers={"Origin": "http://evil.example"}))[0]

    assert run(ask()) == (200, 403)


@pytest.mark.parametrize("address", ["nonsense", "1.2.3.4", ":99999", "http://x/path:1", "0.0.0.0:5000", "tcp://:5"])
def test_addresses_that_are_none_or_open_to_all_are_refused(address):
    with pytest.raises(UsageError):
        parse_http_address(address, Access())


def test_an_address_without_a_host_is_this_machine_only():
    assert parse_http_address(":5000", Access()) == ("127.0.0.1", 5000)
    assert parse_http_address("[::1]:5000", Access()) == ("::1", 5000)
    assert parse_http_address("0.0.0.0:5000", Access(token="x")) == ("0.0.0.0", 5000)


def test_batches_answer_each_of_their_parts():
    async def ask():
        async with playing(Talking()) as client:
            begun = (await client.good("start_batch", {"episodes": [{"task_index": 7}, {}, {}]}))["episodes"]
            ids = [start["episode_id"] for start in begun]
            steps = [{"episode_id": id, "action": id, "turn": 0} for id in [*ids, "nobody"]]
            return begun, ids, (await client.good("step_batch", {"steps": steps}))["steps"]

    begun, ids, steps = run(ask())
    assert [start["info"]["task_index"] for start in begun] == [7, 0, 1]
    assert [step["observation"]["content"] for step in steps[:3]] == [f"you said {id}" for id in ids]
    assert steps[3]["status"] == 404


def test_a_killed_worker_is_told_of_at_once_and_replaced():
    async def ask():
        async with playing(Talking(), workers=2) as client:
            ids = [await client.begun() for _ in range(200)]
            members = client.server.host.workers.members.values()
            victim = next(iter(members))
            lost = set(list(victim.episodes)[:20])  # those that were stepped
            await asyncio.gather(*(client.step(id, "hello", 0) for id in lost))
            under_way = asyncio.create_task(client.step(next(iter(lost)), "die", 1))
            told = await under_way
            after = await asyncio.gather(*(client.step(id, "hello", int(id in lost)) for id in ids))
            await until(lambda: sum(member.ready for member in client.server.host.workers.members.values()) == 2)
            return ids, lost, told, after, len(client.http.live), (await client.post("start"))[0]

    ids, lost, told, after, live, start = run(ask())
    assert 0 < len(lost) < 200
    assert (told[0], told[1]["kind"]) == (410, "worker_lost")
    for id, (status, _) in zip(ids, after, strict=True):
        assert status == (410 if id in lost else 200)
    assert live == 200 - len(lost)
    assert start == 200


def test_stopping_lets_live_episodes_end_and_starts_none():
    async def ask():
        async with playing(Recording(), drain_seconds=30.0) as client:
            id = await client.begun()
            stopping = asyncio.create_task(client.server.stop())
            await until(lambda: client.server.stopping)
            codes = [(await client.post("start"))[0], (await client.get("/api/health"))[0]]
            codes += [(await client.step(id, "on"))[0], (await client.step(id, "stop"))[0]]
            await stopping
            return codes

    assert run(ask()) == [503, 503, 200, 200]


def test_what_has_not_ended_when_the_server_closes_is_closed():
    async def ask():
        async with playing(Recording(), drain_seconds=0.1) as client:
            for _ in range(3):
                await client.begun()
            await client.server.stop()

    run(ask())
    assert sorted(Records.closed) == [0, 1, 2]


def test_the_page_the_figures_and_the_description_are_there():
    async def ask():
        async with playing(Numbers(), access=Access(token="abc")) as client:
            texts = []
            for path in ("/", "/metrics", "/openapi.json"):
                headers = {"Authorization": "Bearer abc"} if path == "/metrics" else {}
                async with client.session.get(client.http.address + path, headers=headers) as reply:
                    texts.append((reply.status, reply.content_type, await reply.text()))
            return texts

    page, figures, description = run(ask())
    assert page[:2] == (200, "text/html")
    assert figures[:2] == (200, "text/plain")
    assert "treetune_http_episodes 0.0" in figures[2]
    described = json.loads(description[2])
    assert {"/api/task/info", "/api/episode/start", "/api/episode/step", "/api/episode/cancel", "/api/health"} <= set(
        described["paths"]
    )
    assert described["components"]["schemas"]["StepBody"]["required"] == ["episode_id"]
    assert described["components"]["schemas"]["StepBody"]["anyOf"] == [
        {"required": ["action"]},
        {"required": ["tool_calls"]},
    ]


def test_an_episode_over_a_websocket():
    async def ask():
        async with playing(Talking()) as client:
            async with client.session.ws_connect(client.http.address + "/api/episode/ws") as socket:
                said = [{"task_index": "x"}, {"task_index": 4}, {"action": 5}, {"action": "a", "turn": 0}]
                said += [{"action": "b", "turn": 0}, {"action": "stop"}]
                answers = []
                for message in said:
                    await socket.send_json(message)
                    answers.append(await socket.receive_json(timeout=10))
                closed = await socket.receive(timeout=10)
            return answers, closed.type, len(client.http.live)

    answers, closed, live = run(ask())
    assert [answers[0]["path"], answers[2]["path"]] == ["$.task_index", "$.action"]
    assert answers[1]["info"]["task_index"] == 4
    assert answers[3]["observation"]["content"] == "you said a"
    assert answers[4] == answers[3]
    assert answers[5]["done"]
    assert (closed, live) == (aiohttp.WSMsgType.CLOSE, 0)


def test_the_end_of_a_websocket_ends_its_episode_also_in_the_middle_of_a_step():
    async def ask():
        async with playing(Recording()) as client:
            async with client.session.ws_connect(client.http.address + "/api/episode/ws") as socket:
                await socket.send_json({})
                await socket.receive_json(timeout=10)
                await socket.send_json({"action": "hang"})
                await until(lambda: Records.played)
            await until(lambda: Records.closed)
            return len(client.http.live)

    assert run(ask()) == 0


def test_a_websocket_needs_the_token_too():
    async def ask():
        async with playing(Numbers(), access=Access(token="abc")) as client:
            url = client.http.address + "/api/episode/ws"
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await client.session.ws_connect(url)
            async with client.session.ws_connect(url, headers={"Authorization": "Bearer abc"}) as socket:
                await socket.send_json({})
                return await socket.receive_json(timeout=10)

    assert run(ask())["info"]["task_index"] == 0


class Builds(Talks):
    """Shows its progress from the thread that its step runs in."""

    def step(self, action):
        for number in range(3):
            show(f"{action.text} {number}\n")
        if action.text == "boom":
            raise ValueError("broken on purpose")
        return Step("built", reward=1.0, done=True)


class Building(Numbers):
    def environment(self, task):
        return Builds(task)


@BOTH
def test_a_long_step_is_watched_as_it_goes(workers):
    async def stream(client, id, action):
        url, body = client.http.address + "/api/episode/step", {"episode_id": id, "action": action, "turn": 0}
        async with client.session.post(url, json=body, headers={"Accept": "text/event-stream"}) as reply:
            return reply.status, reply.content_type, (await reply.text()).strip().split("\n\n")

    async def ask():
        async with playing(Building(), workers=workers) as client:
            good, bad = await client.begun(), await client.begun()
            plain = await client.step(await client.begun(), "x")
            return (
                await stream(client, good, "a"),
                await stream(client, bad, "boom"),
                plain,
                await stream(client, "nobody", "x"),
            )

    good, bad, plain, nobody = run(ask())
    assert good[:2] == (200, "text/event-stream")
    events = [event.split("\n") for event in good[2]]
    assert [name for name, _ in events] == ["event: partial"] * 3 + ["event: step"]
    assert [json.loads(data[6:])["content"] for _, data in events[:3]] == ["a 0\n", "a 1\n", "a 2\n"]
    assert json.loads(events[3][1][6:])["reward"] == 1.0
    assert bad[2][-1].startswith("event: error")
    assert '"status":500' in bad[2][-1]
    assert plain[1]["observation"]["content"] == "built"
    assert (nobody[0], nobody[1]) == (404, "application/json")


def test_a_wrong_method_is_told_which_is_right():
    async def ask():
        async with playing(Numbers()) as client:
            reply = await client.session.put(client.http.address + "/api/task/info")
            return reply.status, reply.headers["Allow"]

    assert run(ask()) == (405, "GET, HEAD")
