"""What comes over ZMQ from strangers, and from clients that have the token and send too much."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket as sockets_of_python
import struct
import sys
from urllib.parse import urlsplit

import msgspec
import pytest
from raising import raises_code
from serve_process import serve
from serving import Numbers, Raw, Talking, run, serving, until

from treetune.serve.messages import MOST_VALUES, check_values, pack, pack_head
from treetune.serve.zmq import listener
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.listener import SMALL_BYTES
from treetune.system import process_limits
from treetune.system.access import Access

MILLIONS = 20_000_000


def arrays(number):
    """A list of so many empty ones: a byte each, and 64 bytes each when decoded."""
    return b"\xdd" + number.to_bytes(4, "big") + b"\x90" * number


def flood(number):
    return b"\x82" + pack("episode") + pack("e") + pack("action") + arrays(number)


# Floods


def peak(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_flood_costs_little_memory_with_and_without_the_token(tmp_path):
    """20 MB that would be 1.5 GB."""

    async def send(address, pid):
        async with EnvClient(address, token="s3cret") as client:
            await client.sample()
            before = peak(pid)
            kinds = []
            with Raw(address, token="wrong") as stranger, Raw(address, token="s3cret") as known:
                for number, raw in enumerate([stranger] * 3 + [known]):
                    await raw.send(b"%d" % number, b"step", raw.head, flood(MILLIONS))
                    await client.sample()
                    kinds.append((await raw.receive())[1]["kind"])
            return kinds, peak(pid) - before

    options = ["--zmq", "tcp://127.0.0.1:0", "--token", "s3cret"]
    with serve(tmp_path, "arithmetic", *options) as server:
        kinds, more = run(send(server.address, server.process.pid))
    assert kinds == ["denied"] * 3 + ["bad_request"]
    assert more < 100 << 20


def test_a_large_frame_of_a_stranger_is_not_even_taken():
    async def send():
        async with serving(Numbers(), access=Access(token="s3cret")) as server:
            taken = []
            door = server.doors[0]
            take_batch = door._socket._on_batch
            door._socket._on_batch = lambda batch: (taken.extend(batch), take_batch(batch))
            for token in ("wrong", "s3cret"):
                with Raw(server.address, token=token) as raw:
                    for size in (SMALL_BYTES, SMALL_BYTES + 1):
                        await raw.send(b"%d" % size, b"step", raw.head, b"\xc1" * size)
                        await raw.receive()
                    await raw.send(b"x" * (SMALL_BYTES + 1), b"step", raw.head, b"")
                    await raw.send(b"1", b"step", b"x" * (SMALL_BYTES + 1), b"")
                    await raw.receive()
            return [[len(frame) for frame in frames[1:]] for frames in taken]

    stranger, known = 1 + 16 + len("wrong"), 1 + 16 + len("s3cret")
    small, large = len(str(SMALL_BYTES)), SMALL_BYTES + 1
    assert run(send()) == [
        [small, 4, stranger, SMALL_BYTES],
        [small, 4, stranger, 0],
        [0, 4, stranger, 0],
        [1, 4, 0, 0],
        [small, 4, known, SMALL_BYTES],
        [small, 4, known, large],
        [0, 4, known, 0],
        [1, 4, 0, 0],
    ]


def connect(address):
    host = urlsplit(address)
    return sockets_of_python.create_connection((host.hostname, host.port), timeout=20)


def test_a_message_of_very_many_parts_is_dropped_and_what_follows_it_is_answered():
    def send_parts(address):
        with connect(address) as stranger:
            greet(stranger)
            stranger.sendall(b"\x01\x00" * 200_000 + b"\x00\x00" + LARGE_PART * 3 + b"\x00\x00")
            stranger.sendall(b"\x01\x01a\x01\x06health\x00\x00")
            return stranger.recv(4)

    async def send():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            answer = await asyncio.to_thread(send_parts, server.address)
            drawn = [(await client.sample()).idx for _ in range(3)]
            return answer[:3], drawn, server.metrics.malformed

    assert run(send()) == (b"\x01\x01a", [0, 1, 2], 2)


LARGE_PART = b"\x01\x00" * 8 + b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_message_without_end_takes_no_memory(tmp_path):
    """10 MB of empty parts took 300 MB, from whoever could connect."""

    def send_parts(address):
        with connect(address) as stranger:
            greet(stranger)
            for _ in range(10):
                stranger.sendall(b"\x01\x00" * (1 << 19))

    with serve(tmp_path, "arithmetic", "--zmq", "tcp://127.0.0.1:0", "--token", "s3cret") as server:
        before = peak(server.process.pid)
        send_parts(server.address)
        more = peak(server.process.pid) - before
    assert more < 20 << 20


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
NULL = b"NULL" + bytes(16 + 32)
NOT_OURS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "an older ZMTP": b"\xff" + bytes(8) + b"\x7f\x01\x00",
    "another security": GREETING + b"CURVE" + bytes(15 + 32),
    "a message instead of a handshake": GREETING + NULL + b"\x00\x01x",
    "another command": GREETING + NULL + b"\x04\x06\x05HELLO",
}
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
TOO_MUCH = {
    "a frame of 2 GB": b"\x02" + (2 << 30).to_bytes(8, "big"),
    "a command of a megabyte": b"\x06" + (1 << 20).to_bytes(8, "big"),
    "flags that are none": b"\x48\x00",
}


@pytest.mark.parametrize(
    "data",
    [*NOT_OURS.values(), *(GREETING + NULL + READY + more for more in TOO_MUCH.values())],
    ids=[*NOT_OURS, *TOO_MUCH],
)
def test_what_is_no_client_is_cut_off_and_others_are_served(data):
    def say(address):
        with connect(address) as stranger:
            stranger.sendall(data)
            return is_cut_off(stranger)

    async def send():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            return await asyncio.to_thread(say, server.address), (await client.sample()).idx

    assert run(send()) == (True, 0)


def test_a_connection_that_does_not_say_what_it_is_in_time_is_cut_off(monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.1)

    def say(address):
        with connect(address) as stranger:
            stranger.sendall(GREETING)
            return is_cut_off(stranger)

    async def send():
        async with serving(Numbers()) as server:
            return await asyncio.to_thread(say, server.address)

    assert run(send())


def test_a_request_is_read_byte_by_byte_and_a_ping_is_answered():
    def say(address):
        with connect(address) as stranger:
            greet(stranger)
            for byte in b"\x01\x01a\x01\x06health\x01\x00\x00\x00" + b"\x04\x0a\x04PING\x00\x00abc":
                stranger.sendall(bytes([byte]))
            reply = b""
            while b"PONGabc" not in reply or b"in_flight" not in reply:
                reply += stranger.recv(4096)
            return reply

    async def send():
        async with serving(Numbers()) as server:
            return await asyncio.to_thread(say, server.address)

    reply = run(send())
    assert b"\x04\x08\x04PONGabc" in reply
    assert b"\x01\x01a\x00" in reply


def test_large_frames_that_are_arriving_have_a_common_bound(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_BYTES", 1 << 20)

    def say(address):
        with connect(address) as client:
            greet(client)
            head = pack_head(b"c" * 16)
            client.sendall(b"\x01\x01a\x01\x04step\x01" + bytes([len(head)]) + head)
            client.sendall(b"\x02" + (2 << 20).to_bytes(8, "big"))
            return is_cut_off(client)

    async def send():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            cut = await asyncio.to_thread(say, server.address)
            return cut, (await client.sample()).idx, process_limits.used

    assert run(send()) == (True, 0, 0)


def is_cut_off(stranger):
    """Reads until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(65536):
            pass
    return True


def greet(stranger):
    """As a DEALER says who it is."""
    stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32))
    read_exactly(stranger, 64)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
    read_exactly(stranger, read_exactly(stranger, 2)[1])  # what the server says in turn


def read_exactly(stranger, size):
    data = b""
    while len(data) < size:
        more = stranger.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


ATTACKS = {
    "an action of a million lists": ("step", flood(1_000_000)),
    "as many numbers": ("step", b"\x82" + pack("episode") + pack("e") + pack("action") + pack([1.5] * 300_000)),
    "acknowledgements": ("info", pack({"ack": [b""] * 300_000})),
    "an id to cancel": ("cancel", b"\x81" + pack("id") + arrays(300_000)),
    "a field that nobody reads": ("info", b"\x81" + pack("more") + arrays(300_000)),
    "a state": ("restore", b"\x81" + pack("state") + pack({"streams": {str(n): {"index": 1} for n in range(200_000)}})),
    "a task": ("run_rollout", b"\x81" + pack("task") + arrays(300_000)),
    "a list that ends too early": ("step", b"\x81" + pack("action") + b"\xdd\xff\xff\xff\xff" + b"x" * 300_000),
    "a text that ends too early": ("step", b"\x81" + pack("action") + b"\xdb\xff\xff\xff\xff" + b"x" * 300_000),
    "deep lists": ("step", b"\x82" + pack("episode") + pack("e") + pack("action") + b"\x91" * 200_000),
    "very deep lists": ("step", b"\x82" + pack("episode") + pack("e") + pack("action") + b"\x91" * 300_000),
}


@pytest.mark.parametrize(("method", "payload"), ATTACKS.values(), ids=ATTACKS)
def test_what_would_become_too_much_is_refused(method, payload):
    async def send():
        async with serving(Talking()) as server, EnvClient(server.address) as client:
            with Raw(server.address) as raw:
                await raw.send(b"1", method.encode(), raw.head, payload)
                answer = (await raw.receive())[1]
            return answer["kind"], server.streams.cursors, (await client.sample()).idx

    assert run(send()) == ("bad_request", {}, 0)


def test_an_action_that_is_nested_as_deep_as_it_may_be_is_played_or_refused_and_no_more():
    async def play():
        async with serving(Talking()) as server, EnvClient(server.address) as client:
            kinds = set()
            for depth in (10, 100, 300, 600, 900, 990):
                episode = (await client.start(await client.sample())).episode
                with Raw(server.address) as raw:
                    payload = b"\x82" + pack("episode") + pack(episode) + pack("action") + b"\x91" * depth + b"\x00"
                    await raw.send(b"%d" % depth, b"step", raw.head, payload)
                    kinds.add((await raw.receive())[1]["kind"])
            return kinds, (await client.sample()).idx

    kinds, after = run(play())
    assert kinds <= {None, "bad_request", "failed", "usage"}
    assert after == 6


def test_more_streams_than_there_may_be_are_refused_before_any_is_opened():
    async def restore():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                state = (await raw.ask(b"1", "state"))["state"]
                state["streams"] = {str(number): {"index": 1} for number in range(2000)}
                return (await raw.ask(b"2", "restore", state=state))["kind"], server.streams.cursors

    assert run(restore()) == ("usage", {})


def count(value):
    if isinstance(value, dict):
        return 1 + sum(count(key) + count(item) for key, item in value.items())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


def made(rng, depth=0):
    kinds = [
        lambda: rng.choice([None, True, False, 0, -1, 127, -32, 255, -128, 2**15, -(2**15), 2**31, 2**40, -(2**40)]),
        lambda: rng.random(),
        lambda: "é" * rng.choice([0, 1, 20, 40, 300, 40_000]),
        lambda: rng.randbytes(rng.choice([0, 3, 300, 70_000])),
        lambda: 2 ** rng.choice([70, 300, 3000]),
        lambda: [made(rng, depth + 1) for _ in range(rng.choice([0, 3, 20]))],
        lambda: {str(number): made(rng, depth + 1) for number in range(rng.choice([0, 3, 20]))},
    ]
    return rng.choice(kinds[:5] if depth > 3 else kinds)()


def test_the_number_of_values_is_known_without_decoding_them(monkeypatch):
    rng = random.Random(0)
    extensions = [msgspec.msgpack.Ext(1, b"1" * size) for size in (1, 2, 4, 8, 16, 3, 300, 70_000)]
    for value in [extensions, *([made(rng) for _ in range(20)] for _ in range(60))]:
        data = pack(value)
        monkeypatch.setattr("treetune.serve.messages.MOST_VALUES", count(value))
        check_values(data)
        monkeypatch.setattr("treetune.serve.messages.MOST_VALUES", count(value) - 1)
        with raises_code("bad-request"):
            check_values(data)


def test_large_texts_and_as_many_values_as_there_may_be_pass():
    check_values(pack(["x" * 600_000, b"y" * 600_000, {"k": [1] * (MOST_VALUES - 6)}]))


# Who asks


def test_the_id_of_a_request_belongs_to_its_client():
    async def ask():
        async with serving(Numbers()) as server:
            with Raw(server.address, b"1" * 16) as one, Raw(server.address, b"2" * 16) as two:
                tasks = [(await raw.ask(b"1", "sample"))["task"] for raw in (one, two)]
                traces = [
                    (await raw.ask(b"2", "run_rollout", task=task))["trace"]["task"]["idx"]
                    for raw, task in zip((one, two), tasks, strict=True)
                ]
                return [task["idx"] for task in tasks], traces

    assert run(ask()) == ([0, 1], [0, 1])


def test_another_request_under_a_used_id_is_refused(tmp_path, monkeypatch):
    from serving import Hangs

    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def ask():
        async with serving(Hangs()) as server:
            with Raw(server.address) as raw, Raw(server.address) as anew:
                first = await raw.ask(b"1", "sample")
                again = await anew.ask(b"1", "sample")  # the same client, connected anew
                others = [
                    await raw.ask(b"1", "sample", stream="other"),
                    await raw.ask(b"1", "run_rollout", task=first["task"]),
                    await raw.ask(b"1", "observe", task=first["task"], reward=1.0),
                ]
                await raw.send(b"2", b"run_rollout", raw.head, pack({"task": first["task"]}))
                await until((tmp_path / "begun-0").exists)
                others.append(await raw.ask(b"2", "run_rollout", task=first["task"], rollout=1))
                return first == again, others, server.streams.cursors

    same, others, cursors = run(ask())
    assert same
    assert {answer["kind"] for answer in others} == {"usage"}
    assert all("used the id for another request" in answer["error"] for answer in others)
    assert cursors == {"": 1}


def test_another_request_under_an_id_from_before_a_restart_is_refused_too(tmp_path):
    async def restart():
        async with serving(Numbers(), state=tmp_path) as server:
            with Raw(server.address) as raw, Raw(server.address, b"2" * 16) as other:
                first = await raw.ask(b"1", "sample")
                await other.ask(b"1", "sample")
        async with serving(Numbers(), state=tmp_path) as server:
            with Raw(server.address) as raw, Raw(server.address, b"3" * 16) as other:
                wrong = await raw.ask(b"1", "sample", stream="s")
                again = await raw.ask(b"1", "sample")
                return wrong["kind"], again == first, (await other.ask(b"1", "sample"))["index"]

    assert run(restart()) == ("usage", True, 2)


def test_a_client_cancels_and_acknowledges_only_what_is_its_own(tmp_path, monkeypatch):
    from serving import Hangs

    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def meddle():
        async with serving(Hangs()) as server:
            with Raw(server.address) as raw, Raw(server.address, b"2" * 16) as other:
                task = (await raw.ask(b"1", "sample"))["task"]
                await raw.send(b"2", b"run_rollout", raw.head, pack({"task": task}))
                await until((tmp_path / "begun-0").exists)
                found = [(await other.ask(b"3", "cancel", id=b"2", ack=[b"1"]))["found"]]
                repeated = await raw.ask(b"1", "sample")
                await raw.send(b"4", b"cancel", raw.head, pack({"id": b"2"}))
                answers = dict([await raw.receive(), await raw.receive()])
                return found, repeated["task"] == task, answers[b"4"]["found"], answers[b"2"]["kind"]

    assert run(meddle()) == ([False], True, True, "cancelled")


def test_a_client_of_an_older_version_is_told():
    """It sends three frames, with the token among the fields."""

    async def ask():
        async with serving(Numbers(), access=Access(token="s3cret")) as server:
            with Raw(server.address) as raw:
                answers = []
                for method in ("info", "sample"):
                    await raw.send(b"1", method.encode(), pack({"token": "s3cret", "protocol": 2}))
                    answers.append((await raw.receive())[1])
                await raw.send(b"2", b"health", b"")
                return answers, (await raw.receive())[1]["ready"]

    answers, ready = run(ask())
    assert [answer["kind"] for answer in answers] == ["usage"] * 2
    assert "protocol 3: a request has four frames, not 3" in answers[0]["error"]
    assert ready


@pytest.mark.parametrize("head", [b"", b"\x03", b"\x03" + b"c" * 15, b"\x03" + b"c" * 5000])
def test_a_head_that_is_none_is_told(head):
    async def ask():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                await raw.send(b"1", b"sample", head, pack({}))
                return (await raw.receive())[1]["kind"], server.streams.cursors

    assert run(ask()) == ("bad_request", {})


def test_what_gets_no_reply():
    async def ask():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                await raw.send(b"only one frame")
                await raw.send(b"", b"sample", raw.head, pack({}))
                await raw.send(b"x" * 65, b"sample", raw.head, pack({}))
                await raw.send(b"1", b"ack", raw.head, pack({}))
                last = await raw.ask(b"2", "health")
                return last["ready"], server.metrics.malformed

    assert run(ask()) == (True, 3)


def test_two_requests_of_one_name_cannot_be_under_way_in_process():
    from treetune.models import load_policy
    from treetune.play.host import LocalHost, always

    class Brief(Numbers):
        async def reward(self, task, answer):
            await asyncio.sleep(0.05)
            return 1.0

    async def twice():
        host = await LocalHost.open(taskset := Brief(), always(load_policy("scripted:gold", taskset)))
        task = await host.sample()
        first = asyncio.create_task(host.run_rollout(task, request="mine"))
        await asyncio.sleep(0)
        with raises_code("usage", "'mine'"):
            await host.run_rollout(task, request="mine")
        return (await first).reward, (await host.run_rollout(task, request="mine")).reward

    assert run(twice()) == (1.0, 1.0)


def test_a_head_has_the_version_the_client_and_the_token():
    assert pack_head(b"c" * 16, "é") == b"\x03" + b"c" * 16 + "é".encode()
