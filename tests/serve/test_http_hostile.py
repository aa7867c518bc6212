"""The HTTP episode server among clients and environments that mean it ill, or know no better."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math

import aiohttp
import pytest
from http_playing import BOTH, playing
from serving import Numbers, Talks, run, until

from treetune import Observation, Step
from treetune.play.episode_table import EndedEpisodes, EpisodeEnded, ending
from treetune.system import http_listener as listener
from treetune.system import process_limits


class Odd(Talks):
    """Answers what it is told to, right or wrong; `hang` never ends."""

    alive = 0

    async def start(self):
        Odd.alive += 1
        if self.task.idx == 7:
            await asyncio.sleep(0.3)
        return "go"

    async def step(self, action):
        said = action.text
        if said == "hang":
            await asyncio.sleep(600)
        if said == "slow":
            await asyncio.sleep(0.2)
        if said == "none":
            return None
        if said == "exit":
            raise SystemExit(3)
        if said == "reward nan":
            return Step("x", reward=math.nan)
        if said == "reward text":
            return Step("x", reward="much")
        if said == "done text":
            return Step("x", done="perhaps")
        if said == "info none":
            return Step("x", info=None)
        if said == "info keys":
            return Step("x", info={(1, 2): 3, None: 4})
        if said == "loop":
            endless: list = []
            endless.append(endless)
            return Step({"endless": endless})
        if said == "nan":
            return Step({"value": math.nan, "half": "\ud800", "list": [math.inf], "big": 2**80})
        if said == "stubborn":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                return Step("I go on")
        return Step(said, done=said == "stop")

    async def close(self):
        Odd.alive -= 1


class Oddities(Numbers):
    def environment(self, task):
        return Odd(task)


@pytest.fixture(autouse=True)
def _fresh():
    Odd.alive = 0


WRONG = ["none", "exit", "reward nan", "reward text", "done text", "info none", "info keys", "loop"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("nonsense", WRONG)
def test_an_environment_that_answers_nonsense_is_at_fault_and_only_its_episode_ends(nonsense, workers):
    async def play():
        async with playing(Oddities(), workers=workers) as client:
            bad, other = await client.begun(), await client.begun()
            status, answer = await client.step(bad, nonsense, 0)
            after, told = await client.step(bad, "hello", 1)
            batch = await client.good(
                "step_batch",
                {
                    "steps": [
                        {"episode_id": await client.begun(), "action": nonsense},
                        {"episode_id": other, "action": "x"},
                    ]
                },
            )
            return status, answer, after, told, batch["steps"], await client.step(other, "still here")

    status, answer, after, told, batch, (fine, _) = run(play())
    assert (status, answer["kind"]) == (500, "failed"), answer
    assert (after, told["kind"]) == (410, "failed"), told
    assert (batch[0].get("status"), batch[1]["observation"]["content"]) == (500, "x"), batch
    assert fine == 200


@BOTH
def test_what_json_cannot_say_is_still_json(workers):
    async def play():
        async with playing(Oddities(), workers=workers) as client:
            episode = await client.begun()
            body = {"episode_id": episode, "action": "nan"}
            async with client.session.post(client.http.address + "/api/episode/step", json=body) as reply:
                return json.loads(await reply.read(), parse_constant=pytest.fail)

    content = run(play())["observation"]["content"]
    assert content["value"] is None
    assert content["list"] == [None]
    assert content["big"] == 2**80
    assert "d800" in repr(content["half"])


@BOTH
def test_half_a_surrogate_pair_is_an_action_like_any_other(workers):
    async def play():
        async with playing(Oddities(), workers=workers) as client:
            episode = await client.begun()
            body = b'{"episode_id": "%s", "action": "a\\ud83dz"}' % episode.encode()
            good = await client.post("step", data=body)
            bad = await client.post("step", data=b'{"episode_id": 7, "action": "\\ud83d"}')
            constant = await client.post("step", data=b'{"episode_id": "x", "action": "\\ud83d", "turn": NaN}')
            return good, bad, constant

    (status, answer), bad, constant = run(play())
    assert status == 200
    assert answer["observation"]["content"].startswith("a")
    assert (bad[0], bad[1]["path"]) == (422, "$.episode_id")
    assert constant[0] == 422


def test_one_turn_asked_for_by_many_with_other_actions_is_played_once():
    async def play():
        async with playing(Oddities()) as client:
            episode = await client.begun()
            same = await asyncio.gather(*(client.step(episode, "slow" if n == 0 else f"{n}", 0) for n in range(20)))
            ahead = await asyncio.gather(client.step(episode, "slow", 1), client.step(episode, "later", 2))
            unnumbered = await asyncio.gather(*(client.step(episode, f"{n}") for n in range(10)))
            return same, ahead, unnumbered, await client.step(episode, "x", 12)

    same, ahead, unnumbered, last = run(play())
    assert {status for status, _ in same} == {200}
    assert len({answer["observation"]["content"] for _, answer in same}) == 1
    assert sorted(status for status, _ in ahead) == [200, 409]
    assert sorted(answer["observation"]["content"] for _, answer in unnumbered) == sorted(str(n) for n in range(10))
    assert last[0] == 200, "ten steps without a number were ten turns"


@BOTH
@pytest.mark.parametrize("action", ["hang", "stubborn"])
def test_a_cancel_in_the_middle_of_a_step_ends_both(action, workers):
    async def play():
        async with playing(Oddities(), workers=workers) as client:
            episode = await client.begun()
            step = asyncio.create_task(client.step(episode, action, 0))
            waiting = asyncio.create_task(client.step(episode, action, 0))
            await asyncio.sleep(0.2)
            cancelled = await client.post("cancel", {"episode_id": episode})
            answers = [await step, await waiting]
            again = await client.post("cancel", {"episode_id": episode})
            return cancelled, answers, again, await client.step(await client.begun(), "fine")

    cancelled, answers, again, other = run(play())
    assert cancelled[0] == 200
    assert again[0] == 410
    assert other[0] == 200
    for status, answer in answers:
        assert (status, answer["kind"]) == (410, "cancelled")


async def _raw(url, data, *, wait=5.0):
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(4096), wait)
    finally:
        writer.close()


def test_a_head_without_end_is_cut_off():
    async def play():
        async with playing(Oddities()) as client:
            host, _, port = client.http.address.removeprefix("http://").partition(":")
            _reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /api/health HTTP/1.1\r\nX-Long: ")
            sent = 0
            try:
                while sent < 64 << 20:
                    writer.write(b"a" * 65536)
                    sent += 65536
                    await writer.drain()
            except OSError:
                pass
            writer.close()
            return sent, await client.get("/api/health")

    sent, (status, _) = run(play())
    assert sent < 16 << 20
    assert status == 200


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /api/episode/st",
        b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{",
        b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api/he",
    ],
)
def test_a_request_that_does_not_arrive_in_time_is_given_up(beginning, monkeypatch):
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.05)

    async def play():
        async with playing(Oddities()) as client:
            host, _, port = client.http.address.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(beginning)
            told = await asyncio.wait_for(reader.read(), 20)  # until the server closes
            writer.close()
            status, health = await client.get("/api/health")
            return told, status, health["episodes"]

    told, status, episodes = run(play())
    assert status == 200
    assert episodes == 0
    assert told == b"" or told.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))


def test_a_step_that_takes_long_is_not_taken_for_a_request_that_does(monkeypatch):
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.02)

    async def play():
        async with playing(Oddities()) as client:
            return await client.step(await client.begun(), "slow")

    assert run(play())[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /api/episode/step HTTP/9.9\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_others_are_served(garbage):
    async def play():
        async with playing(Oddities()) as client:
            return await _raw(client.http.address, garbage), await client.get("/api/health")

    told, (status, _) = run(play())
    assert told.startswith(b"HTTP/1.1 400")
    assert status == 200


@BOTH
def test_an_episode_whose_caller_left_before_it_had_begun_is_closed(workers):
    async def play():
        async with playing(Oddities(), workers=workers) as client:
            for path, body in (("start", {"task_index": 7}), ("start_batch", {"episodes": [{"task_index": 7}] * 2})):
                with pytest.raises(asyncio.TimeoutError):
                    await client.post(path, body, timeout=aiohttp.ClientTimeout(total=0.1))
            await asyncio.sleep(0.5)
            await until(lambda: not client.http.live)
            # One with a name can be asked for again, and lives.
            with pytest.raises(asyncio.TimeoutError):
                await client.post(
                    "start", {"task_index": 7, "request_id": "r"}, timeout=aiohttp.ClientTimeout(total=0.1)
                )
            again = await client.good("start", {"task_index": 7, "request_id": "r"})
            return again["episode_id"] in client.http.live, len(client.http.live)

    assert run(play()) == (True, 1)


def test_a_websocket_that_floods_is_closed_and_its_episode_with_it():
    async def play():
        async with playing(Oddities()) as client:
            async with client.session.ws_connect(client.http.address + "/api/episode/ws") as socket:
                await socket.send_json({})
                await socket.receive_json()
                for _ in range(100):
                    await socket.send_json({"action": "hang"})
                told = [message.json() async for message in socket]  # until the server closes
            await until(lambda: not client.http.live)
            return told

    assert {answer["status"] for answer in run(play())} == {410}
    assert Odd.alive == 0


def test_a_websocket_that_drops_while_its_episode_starts_leaves_none():
    async def play():
        async with playing(Oddities()) as client:
            socket = await client.session.ws_connect(client.http.address + "/api/episode/ws")
            await socket.send_json({"task_index": 7})
            await asyncio.sleep(0.1)
            socket._response.connection.transport.abort()
            await until(lambda: Odd.alive == 1)
            await until(lambda: Odd.alive == 0 and not client.http.live)

    run(play())


def test_a_watcher_that_goes_leaves_the_step_and_its_answer():
    async def play():
        async with playing(Oddities()) as client:
            episode = await client.begun()
            with pytest.raises(asyncio.TimeoutError):
                await client.post(
                    "step",
                    {"episode_id": episode, "action": "slow", "turn": 0},
                    headers={"Accept": "text/event-stream"},
                    timeout=aiohttp.ClientTimeout(total=0.05),
                )
            status, answer = await client.step(episode, "slow", 0)
            live = client.http.live[episode]
            await until(lambda: not live.watchers)
            return status, answer["observation"]["content"]

    assert run(play()) == (200, "slow")


def test_a_page_that_pretends_to_be_this_machine_cannot_play():
    async def play():
        async with playing(Oddities()) as client:
            port = client.http.address.rpartition(":")[2]
            evil = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
            mine = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
            return (await client.post("start", {}, headers=evil))[0], (await client.post("start", {}, headers=mine))[0]

    assert run(play()) == (403, 200)


# Memory


@pytest.mark.thorough
def test_of_abandoned_episodes_nothing_is_left():
    """Two rounds: what the first leaves behind, the second does not add to."""

    def counted():
        gc.collect()
        return sum(isinstance(item, Odd) for item in gc.get_objects())

    async def play():
        async with playing(Oddities(), http={"idle_seconds": 0.5, "max_episodes": 4000}) as client:
            left = []
            for round in range(2):
                for batch in range(4):
                    starts = [{"request_id": f"{round}-{batch}-{number}"} for number in range(500)]
                    await client.good("start_batch", {"episodes": starts})
                most = counted()
                await until(lambda: not client.http.live and Odd.alive == 0)
                await until(lambda: not counted())  # the tasks that closed them end a moment later
                left.append((most > 0, len(client.server.host.episodes.live)))
            return left

    assert run(play()) == [(True, 0)] * 2


def test_last_answers_of_finished_episodes_are_kept_within_bounds():
    ended = EndedEpisodes(most_bytes=1000)

    def kept(id, turn):
        try:
            return ended.reply(id, turn)
        except EpisodeEnded:
            return None

    for number in range(50):
        ended.keep_reply(f"e{number}", 3, b"x" * 100)
    assert kept("e49", 3) == b"x" * 100
    assert kept("e49", 2) is None
    assert sum(kept(f"e{number}", 3) is not None for number in range(50)) == 10
    ended.keep_reply("large", 0, b"y" * 5000)
    assert kept("large", 0) is not None
    assert kept("e49", 3) is None


def test_the_latest_ended_episodes_are_told_apart_from_those_that_never_were():
    ended = EndedEpisodes(most=100)
    for number in range(1000):
        ended.add(f"e-{number}", ending("expired" if number % 2 else "cancelled", "why"), name=f"n-{number}")
        assert ended.why(f"e-{number + 1}") is None
    for number in range(1000):
        found = ended.why(f"e-{number}")
        assert (found and found.kind) == (None if number < 900 else "expired" if number % 2 else "cancelled")
        assert ended.why(f"n-{number}") == found
    assert ended.why("\ud800") is None


def test_a_name_whose_episode_is_over_is_told_so():
    async def play():
        async with playing(Oddities()) as client:
            episode = await client.begun(request_id="once")
            await client.step(episode, "stop")
            return await client.post("start", {"request_id": "once"})

    status, answer = run(play())
    assert (status, answer["kind"]) == (410, "finished")


def test_an_observation_whose_type_is_none_is_refused_where_it_is_made():
    with pytest.raises(Exception, match="hello"):
        Observation("hello")


# Heads that two readers could read differently


HEALTH = "GET /api/health HTTP/1.1\r\n"
AMBIGUOUS = {
    "two hosts": HEALTH + "Host: localhost\r\nHost: evil.example\r\n\r\n",
    "two tokens": HEALTH + "Host: localhost\r\nAuthorization: Bearer abc\r\nAuthorization: Bearer x\r\n\r\n",
    "two origins": HEALTH + "Host: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example\r\n\r\n",
    "two sessions": HEALTH + "Host: localhost\r\nMcp-Session-Id: a\r\nMcp-Session-Id: b\r\n\r\n",
    "no host": HEALTH + "\r\n",
    "another encoding before": "POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\n"
    "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "another encoding in a header of its own": "POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\n"
    "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked and a length": "POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two lengths": "POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    "Content-Length: 2\r\n\r\n{}",
    "chunked in HTTP/1.0": "POST /api/episode/start HTTP/1.0\r\nHost: localhost\r\n"
    "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two hosts of a websocket": "GET /api/episode/ws HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_head_that_two_readers_could_read_differently_is_refused(head):
    async def play():
        async with playing(Oddities()) as client:
            return await _raw(client.http.address, head.encode()), client.http.live

    answer, live = run(play())
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert not live


@pytest.mark.parametrize(
    "head",
    [
        "GET /api/health HTTP/1.0\r\n\r\n",
        HEALTH + "Host: localhost\r\nAccept: a/b\r\nAccept: c/d\r\n\r\n",
        "POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
    ids=["HTTP/1.0 without a host", "two accepts", "chunked"],
)
def test_a_head_that_can_be_read_in_one_way_is_taken(head):
    async def play():
        async with playing(Oddities()) as client:
            return await _raw(client.http.address, head.encode())

    assert run(play()).startswith(b"HTTP/1.1 200 ")


# What all connections hold together


def _body(size):
    return b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size


def test_bodies_under_way_have_a_common_bound(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_BYTES", 3 << 20)

    async def play():
        async with playing(Oddities()) as client:
            host, _, port = client.http.address.removeprefix("http://").partition(":")
            streams = []
            for _ in range(2):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(_body(2 << 20) + b" " * (1 << 20))
                await writer.drain()
                streams.append((reader, writer))
            await until(lambda: process_limits.used >= 2 << 20)
            refused = await _raw(client.http.address, _body(2 << 20) + b" " * ((2 << 20) - 2) + b"{}")
            small = await client.post("start", {})
            for _, writer in streams:
                writer.write(b" " * ((1 << 20) - 2) + b"{}")
            answers = [await reader.read(4096) for reader, _ in streams[:1]]
            for _, writer in streams:
                writer.close()
            await until(lambda: not process_limits.used)
            again = await _raw(client.http.address, _body(2 << 20) + b" " * ((2 << 20) - 2) + b"{}")
            return refused, small[0], answers, again

    refused, small, answers, again = run(play())
    assert refused.startswith(b"HTTP/1.1 429 "), refused
    assert b"retry-after" in refused
    assert small == 200
    assert answers[0].startswith(b"HTTP/1.1 ")
    assert again.startswith(b"HTTP/1.1 200 ")


def test_messages_of_websockets_that_are_arriving_count_too(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_BYTES", 1 << 20)
    greeting = (
        b"GET /api/episode/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    frame = b"\x81\xff" + (4 << 20).to_bytes(8, "big") + bytes(4)

    async def play():
        async with playing(Oddities()) as client:
            host, _, port = client.http.address.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(greeting)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame + b" " * (4 << 20))
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(65536), 20):
                    pass
            writer.close()
            await until(lambda: not process_limits.used)
            return await client.get("/api/health")

    assert run(play())[0] == 200
