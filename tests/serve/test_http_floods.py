"""The HTTP door under floods: raw sockets that send without end, and values that grow when they are decoded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource

import pytest
from http_playing import BOTH, playing
from serving import Colours, Numbers, Talking, run, until

from treetune.serve.http import episodes, wire
from treetune.system.access import Access
from treetune.system.http_error import HttpError

START = b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"Content-Length: 100000000000\r\n\r\n"
TOKEN = b"Authorization: Bearer abc\r\n"
MOST = 24 << 20
"""What a flood sends before it is taken for one that nobody stops."""


@contextlib.asynccontextmanager
async def connected(client):
    host, _, port = client.http.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def flood(client, beginning, piece):
    """Sends a piece again and again until the connection is closed; how many bytes that took, and what was told."""
    many = piece * (65536 // len(piece) + 1)
    async with connected(client) as (reader, writer):
        told = asyncio.ensure_future(reader.read(4096))
        sent = 0
        with contextlib.suppress(OSError):
            writer.write(beginning)
            while sent < MOST:
                writer.write(many)
                sent += len(many)
                await writer.drain()
        with contextlib.suppress(OSError, TimeoutError):
            return sent, await asyncio.wait_for(told, 5)
        return sent, b""


FLOODS = {
    "trailers without a token": (START + CHUNKED + b"0\r\n", b"a: b\r\n", b"4"),
    "trailers with a token": (START + TOKEN + CHUNKED + b"0\r\n", b"a: b\r\n", b"431"),
    "one trailer that does not end": (START + TOKEN + CHUNKED + b"0\r\na: ", b"b", b"431"),
    "trailers of a path that is open to all": (
        b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED + b"0\r\n",
        b"a: b\r\n",
        b"",
    ),
    "an extension of a chunk that does not end": (START + TOKEN + CHUNKED + b"5;", b"x", b"431"),
    "chunks of one byte": (START + TOKEN + CHUNKED, b"1\r\n \r\n", b"431"),
    "chunks of one byte with extensions": (
        START + TOKEN + CHUNKED,
        b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n \r\n",
        b"431",
    ),
    "a body without a token": (START + LONG, b"x", b"401"),
    "a body that is too large": (START + TOKEN + LONG, b"x", b"413"),
    "a body for a path that is not there": (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n" + LONG, b"x", b"404"),
    "a body for a GET": (b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n" + LONG, b"x", b"200"),
    "headers": (START, b"a: b\r\n", b"431"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_whatever_has_no_end_is_cut_off_and_others_are_served(name):
    beginning, piece, status = FLOODS[name]

    async def play():
        async with playing(Numbers(), access=Access(token="abc"), http={"max_bytes": 1 << 20}) as client:
            sent, told = await flood(client, beginning, piece)
            return sent, told, await client.get("/api/health")

    sent, told, (healthy, _) = run(play())
    assert sent < MOST
    assert told.partition(b" ")[2].startswith(status) or told == b"", told[:200]
    assert healthy == 200


def test_the_first_headers_of_a_flood_are_not_kept_while_more_may_come():
    async def play():
        async with playing(Numbers()) as client, connected(client) as (reader, writer):
            writer.write(START + b"a: b\r\n" * 200)
            return await asyncio.wait_for(reader.read(4096), 10)

    assert run(play()).startswith(b"HTTP/1.1 431")


def test_a_trailer_is_no_header():
    async def play():
        async with playing(Numbers(), access=Access(token="abc")) as client, connected(client) as (reader, writer):
            writer.write(START + CHUNKED + b"2\r\n{}\r\n0\r\nAuthorization: Bearer abc\r\n\r\n")
            return await asyncio.wait_for(reader.read(4096), 10)

    assert run(play()).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(("head", "status"), [(b"", 401), (TOKEN, 413)])
def test_whoever_sends_too_much_reads_why_before_the_connection_is_closed(head, status):
    body = b"x" * (3 << 20)

    async def play():
        async with (
            playing(Numbers(), access=Access(token="abc"), http={"max_bytes": 1 << 20}) as client,
            connected(client) as (reader, writer),
        ):
            writer.write(START + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), 10)  # until the server closes

    told, _, answer = run(play()).partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 %d" % status)
    assert b"connection: close" in told.lower()
    assert json.loads(answer)["status"] == status


def test_a_request_whose_body_has_come_is_refused_and_its_connection_stays():
    async def play():
        async with playing(Numbers()) as client, connected(client) as (reader, writer):
            found = []
            for body in (b"{", b"{}"):
                writer.write(START + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                found.append((await asyncio.wait_for(reader.read(4096), 10))[9:12])
            return found

    assert run(play()) == [b"422", b"200"]


def test_requests_in_chunks_and_a_few_at_once_are_answered():
    async def play():
        async with playing(Numbers()) as client, connected(client) as (reader, writer):
            writer.write((START + CHUNKED + b"1\r\n{\r\n1;a=b\r\n}\r\n0\r\nTrailer: x\r\n\r\n") * 8)
            told = b""
            while told.count(b"episode_id") < 8:
                told += await asyncio.wait_for(reader.read(65536), 10)
            return told.count(b"HTTP/1.1 200"), len(client.http.live)

    assert run(play()) == (8, 8)


def test_a_request_that_began_while_the_one_before_was_answered_is_answered_too():
    async def play():
        async with playing(Numbers()) as client, connected(client) as (reader, writer):
            request = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            told = b""
            for piece in (request + request[:20], request[20:]):
                writer.write(piece)
                told += await asyncio.wait_for(reader.readuntil(b'"status"'), 10)
                await asyncio.sleep(0.05)
            return told.count(b"HTTP/1.1 200")

    assert run(play()) == 2


def test_of_requests_sent_behind_one_another_only_a_few_wait():
    async def play():
        async with playing(Numbers()) as client, connected(client) as (reader, writer):
            writer.write(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
            told = b""
            with contextlib.suppress(ConnectionResetError):
                while more := await asyncio.wait_for(reader.read(65536), 10):  # until the server closes
                    told += more
            return told.count(b"HTTP/1.1 200")

    assert run(play()) < 50


# Decoded values


def _step(content):
    return b'{"episode_id": "x", "action": {"type": "json", "content": %s}}' % content


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" + b"[]," * 250_000 + b"[]]", 413),
        (b"[" + b'{"":0},' * 150_000 + b"{}]", 413),
        (b"[" + b"0," * 250_000 + b"0]", 413),
        (b"[" * 5000 + b"]" * 5000, 422),
        (b'{"a":' * 500 + b"0" + b"}" * 500, 422),
        (b"[" * 3_000_000, 413),
    ],
)
def test_a_body_that_is_small_as_bytes_and_large_as_values_is_refused_before_it_is_decoded(
    content, status, monkeypatch
):
    decoded = []
    monkeypatch.setattr(wire, "decode", lambda kind, data: decoded.append(len(data)))
    with pytest.raises(HttpError) as found:
        wire.read_body(wire.StepBody, _step(content))
    assert found.value.status == status
    assert not decoded


@pytest.mark.parametrize(
    "content",
    [
        json.dumps("1,[2]{" * 200_000).encode(),
        json.dumps('quotes " and \\ [' * 30_000).encode(),
        b"[" * 120 + b"]" * 120,
        json.dumps([{"id": n, "tags": ["a", "b"]} for n in range(20_000)]).encode(),
    ],
)
def test_large_texts_and_lists_are_taken(content):
    action = wire.read_body(wire.StepBody, _step(content)).action
    assert action.content == json.loads(content)


@BOTH
def test_an_action_as_deep_as_may_be_is_played(workers):
    async def play():
        async with playing(Talking(), workers=workers) as client:
            body = _step(b"[" * 120 + b"]" * 120).replace(b'"x"', json.dumps(await client.begun()).encode())
            return (await client.post("step", data=body))[0]

    assert run(play()) == 200


# WebSockets


async def opened(reader, writer, token=b""):
    writer.write(
        b"GET /api/episode/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n" + token + b"\r\n"
    )
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)


def frame(code, data=b"", last=True):
    assert len(data) < 126
    return bytes([(0x80 if last else 0) | code, 0x80 | len(data), 0, 0, 0, 0]) + data  # masked with zeros


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (frame(1, b"", last=False), frame(0, b"", last=False)),
        (frame(1, b"{", last=False), frame(0, b" ", last=False)),
        (b"", frame(9, b"p" * 125)),
        (b"", frame(1, b"{}")),
    ],
    ids=["empty fragments", "fragments of one byte", "pings that nobody reads", "messages"],
)
def test_a_websocket_that_sends_without_end_is_closed(first, piece):
    many = piece * (65536 // len(piece))

    async def play():
        async with playing(Talking()) as client:
            async with connected(client) as (reader, writer):
                assert b" 101 " in await opened(reader, writer)
                reader._transport.pause_reading()
                writer.write(first)
                sent = 0
                with contextlib.suppress(OSError):
                    while sent < MOST:
                        writer.write(many)
                        sent += len(many)
                        await writer.drain()
            await until(lambda: not client.http.live)
            return sent, await client.get("/api/health")

    sent, (status, _) = run(play())
    assert sent < MOST
    assert status == 200


def test_nothing_that_follows_a_refused_handshake_is_read():
    async def play():
        async with playing(Talking(), access=Access(token="abc")) as client, connected(client) as (reader, writer):
            told = await opened(reader, writer)
            return told, await asyncio.wait_for(reader.read(), 10)

    told, rest = run(play())
    assert b" 403 " in told
    assert rest == b""


@pytest.mark.parametrize("says", [[], [b"{", b"nonsense"]])
def test_a_websocket_that_starts_no_episode_is_closed(says, monkeypatch):
    monkeypatch.setattr(episodes, "START_SECONDS", 0.2)

    async def play():
        async with (
            playing(Talking()) as client,
            client.session.ws_connect(client.http.address + "/api/episode/ws") as socket,
        ):
            for text in says:
                await socket.send_str(text.decode())
                assert (await socket.receive_json(timeout=10))["status"] == 422
            await socket.receive(timeout=10)
            return socket.close_code

    assert run(play()) == 1008


def test_a_websocket_whose_episode_has_expired_is_closed(monkeypatch):
    monkeypatch.setattr(episodes, "_LOOK_SECONDS", 0.05)

    async def play():
        async with (
            playing(Talking(), http={"idle_seconds": 0.2}) as client,
            client.session.ws_connect(client.http.address + "/api/episode/ws") as socket,
        ):
            await socket.send_json({})
            assert (await socket.receive_json(timeout=10))["episode_id"]
            await socket.receive(timeout=10)
            return socket.close_code

    assert run(play()) == 1008


# Descriptors


def test_where_no_descriptor_is_left_it_says_so_and_goes_on_when_there_is_one(caplog):
    caplog.set_level(logging.WARNING)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def status(client):
        async with connected(client) as (reader, writer):
            writer.write(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return (await asyncio.wait_for(reader.read(4096), 10))[9:12]

    async def play():
        async with playing(Numbers()) as client:
            found = [await status(client)]
            newest = max(map(int, os.listdir("/proc/self/fd")))
            async with contextlib.AsyncExitStack() as stack:
                while (filler := os.open(os.devnull, os.O_RDONLY)) < newest:  # the gaps below it are closed
                    stack.callback(os.close, filler)
                stack.callback(os.close, filler)
                resource.setrlimit(resource.RLIMIT_NOFILE, (newest + 72, before[1]))
                for _ in range(8):
                    await stack.enter_async_context(connected(client))
                found.append(await status(client))
            await asyncio.sleep(0.2)
            found.append(await status(client))
            return found

    try:
        assert run(play()) == [b"200", b"503", b"200"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "out of file descriptors" in caplog.text
    assert "ulimit -n" in caplog.text


# Edges


@BOTH
def test_a_task_index_beyond_the_end_is_told_the_range(workers):
    async def play():
        async with playing(Colours(), workers=workers) as client:
            last, beyond = await client.post("start", {"task_index": 5}), await client.post("start", {"task_index": 6})
            return last, beyond, (await client.get("/api/task/info"))[1]["cursor"]

    last, (status, answer), cursor = run(play())
    assert last[0] == 200
    assert (status, answer["path"]) == (422, "$.task_index")
    assert "0 to 5" in answer["error"]
    assert cursor == 0


def test_one_bad_part_of_a_batch_is_answered_in_its_place():
    async def play():
        async with playing(Colours()) as client:
            starts = [{}, {"task_index": "x"}, 7, {"task_index": 2**62}, {"task_index": 99}, {"task_index": 3.0}, {}]
            begun = (await client.good("start_batch", {"episodes": starts}))["episodes"]
            ids = [one.get("episode_id") for one in begun]
            good = {"episode_id": ids[0], "action": "red"}
            steps = [{"action": "x"}, good, None, {"episode_id": ids[-1], "action": 5}]
            return begun, ids, (await client.good("step_batch", {"steps": steps}))["steps"]

    begun, ids, steps = run(play())
    assert [one.get("status", 200) for one in begun] == [200, 422, 422, 422, 422, 200, 200]
    assert [one.get("path") for one in begun][1:5] == ["$.task_index", "$", "$.task_index", "$.task_index"]
    assert [one.get("status", 200) for one in steps] == [422, 200, 422, 422]
    assert steps[1]["reward"] == 1.0
    assert len({id for id in ids if id}) == 3


def test_under_a_name_that_is_not_this_machines_nobody_is_served():
    hosts = ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", "[::"]

    async def play(**options):
        async with playing(Numbers(), **options) as client:
            found = set()
            for host in hosts:
                name = host.format(port=client.http.address.rpartition(":")[2])
                headers = {"Host": name, "Authorization": "Bearer abc"}
                found.add((await client.post("start", {}, headers=headers))[0])
                async with client.session.get(client.http.address + "/", headers=headers) as page:
                    found.add(page.status)
            return found

    assert run(play()) == {403}
    assert run(play(access=Access(token="abc"))) == {200}
    assert run(play(access=Access(open=True))) == {200}


def test_under_every_name_of_this_machine_everybody_is_served():
    import socket

    async def play():
        async with playing(Numbers()) as client:
            names = ["localhost", "LOCALHOST:5", "127.0.0.1:80", "127.9.9.9", "[::1]:7", socket.gethostname()]
            return [(await client.post("start", {}, headers={"Host": name}))[0] for name in names]

    assert run(play()) == [200] * 6


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer abc", 200),
        ("bearer abc", 200),
        ("BEARER  abc ", 200),
        ("Basic abc", 401),
        ("abc", 401),
        ("bearer ABC", 401),
        ("bearer", 401),
        ("bearer \u00ff", 401),
    ],
)
def test_the_scheme_of_a_token_is_written_in_any_case(given, status):
    async def play():
        async with playing(Numbers(), access=Access(token="abc")) as client, connected(client) as (reader, writer):
            head = START.decode() + f"Authorization: {given}\r\nContent-Length: 2\r\n\r\n{{}}"
            writer.write(head.encode("latin-1"))
            return (await asyncio.wait_for(reader.read(4096), 10))[9:12]

    assert run(play()) == b"%d" % status
