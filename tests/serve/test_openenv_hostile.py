"""The OpenEnv door against clients that send rubbish, too much, or nothing; that leave, and that share a session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from openenv_playing import Echo, Echoes, Shopping, playing
from serving import Numbers, run, until

from treetune import Environment, Step, Task, Taskset
from treetune.serve.openenv import door as doors
from treetune.serve.openenv import session as sessions
from treetune.system import http_listener as listener
from treetune.system.access import Access

MINE = {"X-Session-ID": "mine"}
TOKEN = {"Authorization": "Bearer abc"}
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def framed(data: bytes, opcode: int = 0x81) -> bytes:
    """A frame of a client, masked with zeros."""
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + size.to_bytes(2, "big")
    return bytes([opcode]) + length + bytes(4) + data


@contextlib.asynccontextmanager
async def raw(client):
    """A connection whose WebSocket is open."""
    port = int(client.door.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(UPGRADE)
    assert b"101" in await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()


async def check_served(client):
    """Others go on."""
    async with client.socket() as other:
        await other.ask("reset", {})
        assert (await other.step("hello"))["reward"] == 0.5


def test_without_the_token_nothing_is_read_or_begun():
    async def play():
        async with playing(Echoes(), access=Access(token="abc")) as client:
            for headers in ({}, {"Authorization": "Bearer abd"}, {"X-API-Key": "abd"}):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    async with client.socket(headers=headers):
                        pass
                assert refused.value.status == 403
                for method, path in [
                    ("POST", "/reset"),
                    ("POST", "/step"),
                    ("POST", "/mcp"),
                    ("GET", "/state"),
                    ("GET", "/schema"),
                    ("GET", "/metadata"),
                    ("GET", "/list_environments"),
                    ("POST", "/create"),
                    ("POST", "/echoes/call"),
                    ("POST", "/delete"),
                ]:
                    status, told = await client.ask(method, path, {"never": "read"}, headers=headers)
                    assert (status, told) == (401, {"detail": "the token is missing or wrong"})
            assert (await client.ask("GET", "/health"))[1] == {"status": "healthy"}
            assert not client.door.sessions.by_id
            assert client.server.streams.cursor() == 0
            for headers in (TOKEN, {"X-API-Key": "abc"}):
                assert (await client.ask("GET", "/list_environments", headers=headers))[0] == 200
            async with client.socket(headers=TOKEN) as socket:
                assert (await socket.ask("reset", {}))["type"] == "observation"

    run(play())


def test_a_page_from_elsewhere_cannot_connect():
    async def play():
        async with playing(Echoes()) as client:
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    async with client.socket(headers=headers):
                        pass

    run(play())


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 200,
        framed(b"\xff\xfe not text"),
        framed(b"{}", 0x83),  # an opcode that is none
        bytes([0x81, 5]) + b"plain",  # not masked
        framed(b"x" * 200, 0x89),  # a ping that is too long
        framed(b"", 0x80),  # goes on with nothing
        bytes([0x81, 0xFF]) + (1 << 40).to_bytes(8, "big") + bytes(4),  # a terabyte
    ],
    ids=["noise", "no UTF-8", "no opcode", "no mask", "long ping", "no beginning", "a terabyte"],
)
def test_frames_that_are_none_end_their_own_connection_only(sent):
    async def play():
        async with playing(Echoes()) as client:
            async with raw(client) as (reader, writer):
                writer.write(framed(b'{"type":"reset"}'))
                await until(lambda: client.live)
                writer.write(sent)
                await asyncio.wait_for(reader.read(), 20)
            await until(lambda: not client.live and not client.door.sessions.by_id)
            await check_served(client)

    run(play())


def test_a_message_that_is_too_large_is_refused_by_its_head_or_its_fragments():
    async def play():
        async with playing(Echoes(), http={"max_bytes": 4096}) as client:
            async with client.socket() as socket:
                await socket.tell({"type": "step", "data": {"message": "a" * 5000}})
                assert await socket.hear() == 1009
            async with raw(client) as (reader, writer):
                writer.write(framed(b"{", 0x01) + framed(b" " * 1000, 0x00) * 10)
                await asyncio.wait_for(reader.read(), 20)
            await check_served(client)

    run(play())


def test_a_flood_of_fragments_is_cut_off():
    async def play():
        async with playing(Echoes()) as client:
            async with raw(client) as (reader, writer):
                with contextlib.suppress(OSError):
                    writer.write(framed(b"{", 0x01))
                    for _ in range(4 * listener.MOST_FRAGMENTS):
                        writer.write(framed(b"", 0x00))
                        await writer.drain()
                with contextlib.suppress(ConnectionError):
                    assert len(await asyncio.wait_for(reader.read(), 20)) < 1000
            await check_served(client)

    run(play())


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"type":"step","data":' + "[" * 500 + "]" * 500 + "}", '{"data":[' + "[]," * 300_000 + "[]]}"],
    ids=["open brackets", "deep", "wide"],
)
def test_what_is_small_as_text_and_large_as_values_is_refused(text):
    async def play():
        async with playing(Echoes()) as client, client.socket() as socket:
            await socket.tell(text)
            assert (await socket.hear())["data"]["code"] == "INVALID_JSON"
            assert (await socket.step("hello"))["reward"] == 0.5

    run(play())


def test_sessions_are_bounded_and_one_that_leaves_makes_room():
    async def play():
        async with playing(Echoes(), http={"max_episodes": 2}) as client:
            async with client.socket() as first, client.socket() as second:
                await first.ask("reset", {})
                await second.ask("state")
                async with client.socket() as third:
                    refused = await third.hear()
                    assert refused["data"] == {
                        "message": "Server at capacity: 2/2 sessions active. Cannot accept new connections.",
                        "code": "CAPACITY_REACHED",
                        "active_sessions": 2,
                        "max_sessions": 2,
                    }
                    assert await third.hear() == 1000
                status, told = await client.ask("POST", "/create", {"split": "train", "index": 0}, headers=MINE)
                assert (status, "at capacity" in told["detail"]) == (429, True)
            await until(lambda: not client.door.sessions.by_id)
            await check_served(client)

    run(play())


def test_the_capacity_counts_the_episodes_of_all_doors():
    async def play():
        async with playing(Echoes(), capacity=1) as client, client.socket() as first, client.socket() as second:
            assert (await first.ask("reset", {}))["type"] == "observation"
            busy = await second.ask("reset", {})
            assert (busy["type"], busy["data"]["code"]) == ("error", "CAPACITY_REACHED")
            assert (await first.ask("reset", {}))["type"] == "observation"  # its own place
            await first.step("end")
            assert (await second.ask("reset", {}))["type"] == "observation"

    run(play())


class Slow(Environment):
    """A step that lasts until it is cancelled."""

    under_way = closed = 0

    async def step(self, action):
        Slow.under_way += 1
        try:
            await asyncio.sleep(3600)
        finally:
            Slow.under_way -= 1
        return Step()

    async def close(self):
        Slow.closed += 1


class Slows(Taskset):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt=str(index))

    def environment(self, task):
        return Slow(task)


def test_a_step_under_way_is_stopped_when_its_client_leaves():
    async def play():
        async with playing(Slows()) as client:
            closed = Slow.closed
            async with client.socket() as socket:
                await socket.tell({"type": "step", "data": {"message": "a"}})
                await until(lambda: Slow.under_way)
            await until(lambda: not Slow.under_way and Slow.closed == closed + 1 and not client.door.sessions.by_id)
            assert not client.live

    run(play())


class Starts(Slow):
    async def start(self):
        return await self.step(None)


class Starting(Slows):
    def environment(self, task):
        return Starts(task)


def test_a_start_under_way_is_stopped_when_its_client_leaves():
    async def play():
        async with playing(Starting()) as client:
            async with client.socket() as socket:
                await socket.tell({"type": "reset"})
                await until(lambda: Slow.under_way)
            await until(lambda: not Slow.under_way and not client.door.sessions.by_id)
            assert client.server.in_flight == 0

    run(play())


def test_what_is_said_during_a_long_step_is_answered_after_it(monkeypatch):
    monkeypatch.setattr(doors, "_WATCH_SECONDS", 0.0)

    class Napping(Echoes):
        def environment(self, task):
            made = Echo(task)
            step = made.step

            async def slowly(action):
                await asyncio.sleep(0.1)
                return await step(action)

            made.step = slowly
            return made

    async def play():
        async with playing(Napping()) as client, client.socket() as socket:
            for text in ("a", "ab", "abc", "abcd"):
                await socket.tell({"type": "step", "data": {"message": text}})
            said = [(await socket.hear())["data"]["observation"]["text"] for _ in range(4)]
            assert said == ["a", "ab", "abc", "abcd"]

    run(play())


def test_a_client_that_is_killed_leaves_nothing():
    program = (
        "import asyncio, aiohttp, sys\n"
        "async def main():\n"
        "    async with aiohttp.ClientSession() as session:\n"
        "        sockets = [await session.ws_connect(sys.argv[1] + '/ws') for _ in range(5)]\n"
        "        for socket in sockets:\n"
        '            await socket.send_str(\'{"type": "reset"}\')\n'
        "            await socket.receive()\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )

    async def play():
        async with playing(Echoes()) as client, client.socket() as socket:
            await socket.ask("reset", {})
            closed = Echo.closed
            killed = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, client.door.address, stdout=subprocess.PIPE
            )
            await killed.stdout.readline()
            assert len(client.live) == 6
            os.kill(killed.pid, signal.SIGKILL)
            await killed.wait()
            await until(lambda: len(client.live) == 1 and len(client.door.sessions.by_id) == 1)
            await until(lambda: Echo.closed == closed + 5)
            assert (await socket.step("hello"))["reward"] == 0.5

    run(play())


def test_a_client_that_does_not_read_is_disconnected_and_its_episode_closed(monkeypatch):
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(listener, "_CHECK_SECONDS", 0.1)

    async def play():
        async with playing(Echoes()) as client:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(client.door.address.rpartition(":")[2]), limit=1024
            )
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.write(UPGRADE)
            await reader.readuntil(b"\r\n\r\n")  # and nothing after it
            writer.write(framed(b'{"type":"reset"}'))
            await until(lambda: client.live)
            said = framed(json.dumps({"type": "step", "data": {"message": "a" * 60_000}}).encode())
            while client.live:
                if not writer.is_closing() and writer.transport.get_write_buffer_size() < len(said):
                    writer.write(said)
                await asyncio.sleep(0.005)
            await until(lambda: not client.live and not client.door.sessions.by_id)
            writer.close()
            await check_served(client)

    run(play())


def test_two_clients_on_one_session_share_its_episode_and_none_leaks():
    async def play():
        async with playing(Shopping()) as client:
            rpc = {"jsonrpc": "2.0", "id": 1}
            _, made = await client.ask("POST", "/mcp", {**rpc, "method": "openenv/session/create"})
            id = made["result"]["session_id"]
            async with client.socket(f"/ws?session_id={id}") as socket:
                async with client.socket(f"/ws?session_id={id}") as second:
                    refused = await second.hear()
                    assert refused["data"]["code"] == "SESSION_ERROR"
                    assert "already has an attached WebSocket" in refused["data"]["message"]
                resets = [socket.ask("reset", {"index": 1})]
                calls = [
                    client.ask("POST", "/mcp", {**rpc, "method": "tools/list", "params": {"session_id": id}})
                    for _ in range(5)
                ]
                await asyncio.gather(*resets, *calls)
                assert len(client.live) == 1
                params = {"session_id": id, "name": "search", "arguments": {"query": "red"}}
                _, found = await client.ask("POST", "/mcp", {**rpc, "method": "tools/call", "params": params})
                assert found["result"]["data"] == '["red 0","red 1"]'
                assert (await socket.ask("state"))["data"]["step_count"] == 1
            assert len(client.live) == 1  # whoever opened it closes it
            closing = {**rpc, "method": "openenv/session/close", "params": {"session_id": id}}
            _, closed = await client.ask("POST", "/mcp", closing)
            assert closed["result"] == {"session_id": id, "closed": True}
            assert not client.live
            assert not client.door.sessions.by_id

    run(play())


def test_the_session_of_another_connection_cannot_be_taken():
    async def play():
        async with playing(Echoes()) as client, client.socket() as socket:
            await socket.ask("reset", {})
            (id,) = client.door.sessions.by_id
            async with client.socket(f"/ws?session_id={id}") as thief:
                assert (await thief.hear())["data"]["code"] == "SESSION_ERROR"
            assert (await socket.step("hello"))["reward"] == 0.5

    run(play())


def test_sessions_that_say_nothing_are_closed_and_their_episodes_before(monkeypatch):
    monkeypatch.setattr(sessions, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "_SWEEP_SECONDS", 0.1)

    async def play():
        async with playing(Echoes(), http={"idle_seconds": 0.5}) as client:
            async with client.socket() as socket:
                await socket.ask("reset", {})
                await client.ask("POST", "/create", {"split": "train", "index": 0}, headers=MINE)
                assert len(client.door.sessions.by_id) == 2
                assert await socket.hear() == 1000
            await until(lambda: not client.door.sessions.by_id and not client.live)
            assert client.server.metrics.outcomes == {"timeout": 2}

    run(play())


def test_an_expired_episode_is_told_and_the_session_goes_on():
    async def play():
        async with playing(Echoes(), http={"idle_seconds": 0.3}) as client, client.socket() as socket:
            await socket.ask("reset", {})
            await until(lambda: not client.live)
            expired = await socket.ask("step", {"message": "a"})
            assert expired["data"]["code"] == "EXECUTION_ERROR"
            assert (await socket.ask("reset", {}))["type"] == "observation"

    run(play())


def test_a_server_that_stops_closes_its_sessions():
    async def play():
        async with playing(Numbers()) as client, client.socket() as socket:
            await socket.ask("reset", {})
            await client.server.close()
            assert await socket.hear() in (1012, 1006, 1001)
            assert not client.live

    run(play())
