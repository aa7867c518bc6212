"""Faults behind the gateway, and of its own: the agent gets an error, nothing hangs, and nothing false is trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_playing import TOKEN, EngineProcess, check_exact, playing
from gateway_process import SESSIONS
from openai import APIConnectionError, APIError, AsyncOpenAI
from scripted_engine import make_tokenizer
from test_sessions import asking, say, until

from treetune.gateway import Gateway, GatewayServer, HttpSampler

SUPPORT = Path(__file__).parents[1] / "support"


@contextlib.contextmanager
def gateway_process(engine, address="127.0.0.1:0"):
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1] / "src")])
    command = [sys.executable, SUPPORT / "gateway_process.py", engine.url, "plain", address]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


async def drain(client):
    stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
    async for _ in stream:
        pass


FAULTS = ["500", "garbage", "no HTTP", "NaN"]
OF_STREAMS = ["half", "error event"]


@pytest.mark.parametrize(
    ("fault", "stream"), [(fault, False) for fault in FAULTS] + [(fault, True) for fault in FAULTS + OF_STREAMS]
)
def test_a_broken_answer_is_an_error_and_trains_nothing(engine, fault, stream):
    async def play():
        script = {"fault": fault, "answer": "A long answer. " * 5}
        async with asking(engine, script=script) as (_, session, client):
            with pytest.raises(APIError) as failed:
                async with asyncio.timeout(30):
                    await (drain(client) if stream else say(client))
            assert "engine" in str(failed.value) or "logprob" in str(failed.value), failed.value
            assert session.counts["upstream_failures"] == 1
            assert session.trace().sequences == []
            engine.script()
            assert await say(client), "the next call is a call as any other"
            check_exact(engine, session.tokens().sequences, 1)

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_an_engine_that_hangs_is_given_up(engine, stream):
    async def play():
        async with asking(engine, script={"fault": "hang"}, seconds=0.5) as (_, session, client):
            with pytest.raises(APIError, match="did not answer within"):
                await (drain(client) if stream else say(client))
            await until(lambda: engine.memory()["cancelled"] == 1)
            assert session.trace().sequences == []

    asyncio.run(play())


def test_an_engine_that_dies_and_comes_back():
    async def play():
        engine = EngineProcess()
        async with asking(engine, script={"delay": 0.5}) as (_, session, client):
            assert await say(client)
            before = engine.memory()["sampled"]
            waiting = [asyncio.ensure_future(say(client, f"hi {at}")) for at in range(3)]
            await until(lambda: len(engine.memory()["begun"]) == 4)
            engine.close()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert [one.status_code for one in found] == [502] * 3
            with pytest.raises(APIError, match="no engine answers"):
                await say(client)
            assert len(session.trace().sequences) == len(before) == 1
            engine.start()
            engine.script()
            assert await say(client), "connections of the dead engine are not used"
            assert len(session.trace().sequences) == 2
            engine.close()

    asyncio.run(play())


def test_a_connection_that_the_engine_closed_while_idle_is_replaced():
    """It closes the connection just when the next request is on its way, as servers do that were idle for long."""

    async def play():
        tokenizer, asked = make_tokenizer("plain"), []

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(re.search(rb"Content-Length: (\d+)", head)[1])
            asked.append(json.loads(await reader.readexactly(size)) if size else {})
            ids = tokenizer(f"Answer {len(asked)}.<end>")["input_ids"]
            body = json.dumps({"choices": [{"token_ids": ids, "text": "", "finish_reason": "stop"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await reader.read(100)  # the next request arrives, and is not answered
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        gateway = Gateway(tokenizer, HttpSampler(url, "policy", seconds=5))
        place = GatewayServer(gateway, token=TOKEN)
        session = gateway.open()
        client = AsyncOpenAI(base_url=f"{await place.start()}/v1", api_key=session.key, max_retries=0)
        for _ in range(3):
            assert (await say(client)).startswith("Answer")
        assert session.counts["upstream_failures"] == 0
        assert len(session.tokens().sequences) == 3
        await place.close()
        server.close()

    asyncio.run(play())


def test_a_gateway_that_is_killed_leaves_no_call_behind(engine):
    """With a hundred sessions: every agent gets an error at once, and the engine stops."""

    async def play():
        engine.script("plain", fault="hang")
        with gateway_process(engine) as process:
            base, *keys = [process.stdout.readline().strip() for _ in range(1 + SESSIONS)]
            clients = [AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0) for key in keys]
            calls = [drain(client) if at % 2 else say(client) for at, client in enumerate(clients)]
            waiting = [asyncio.ensure_future(call) for call in calls]
            await until(lambda: len(engine.memory()["begun"]) == SESSIONS)
            process.kill()
            async with asyncio.timeout(30):
                found = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(one, APIConnectionError) for one in found)
            await until(lambda: engine.memory()["cancelled"] == SESSIONS)
            assert engine.memory()["sampled"] == []
        engine.script("plain")
        with gateway_process(engine, base.rpartition("/")[2]) as process:
            base, key, *_ = [process.stdout.readline().strip() for _ in range(1 + SESSIONS)]
            assert await say(AsyncOpenAI(base_url=f"{base}/v1", api_key=key)), "it starts again at its address"
            with pytest.raises(APIError, match="not the key"):
                await say(clients[0])

    asyncio.run(play())


def test_closing_the_gateway_ends_every_call(engine):
    async def play():
        async with contextlib.AsyncExitStack() as stack:
            place = await stack.enter_async_context(playing(engine, script={"fault": "hang"}))
            clients = [
                AsyncOpenAI(base_url=place.url(place.gateway.open()), api_key="any", max_retries=0) for _ in range(4)
            ]
            waiting = [asyncio.ensure_future(say(client)) for client in clients]
            await until(lambda: len(engine.memory()["begun"]) == 4)
            await stack.aclose()
            async with asyncio.timeout(30):
                found = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(one, APIError) for one in found)
            await until(lambda: engine.memory()["cancelled"] == 4)

    asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"choices": []}',
        b"\x16\x03\x01\x02",
    ],
)
def test_answers_that_are_none_are_errors(answer):
    async def play():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        gateway = Gateway(make_tokenizer("plain"), HttpSampler(url, "policy", seconds=5))
        place = GatewayServer(gateway, token=TOKEN)
        session = gateway.open()
        client = AsyncOpenAI(base_url=f"{await place.start()}/v1", api_key=session.key, max_retries=0)
        for call in (say, drain):
            with pytest.raises(APIError) as failed:
                await call(client)
            assert failed.value.status_code == 502
        assert session.trace().sequences == []
        await place.close()
        server.close()

    asyncio.run(play())
