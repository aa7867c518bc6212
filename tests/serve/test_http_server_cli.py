"""`treetune serve --http` as a user runs it: the curl session, signals, clients that vanish."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request

import aiohttp
import pytest
from serve_process import post, resident, serve


@pytest.mark.parametrize("options", [["--http", ":0"], ["--port", "0", "-w", "1"]])
@pytest.mark.quick_cases(1)
def test_the_curl_session_of_the_docs(tmp_path, options):
    with serve(tmp_path, "arithmetic", *options) as server:
        url = server.report["http"]
        assert url.startswith("http://127.0.0.1:")
        assert server.address == ""
        with urllib.request.urlopen(url + "/api/task/info") as reply:
            assert json.load(reply)["name"] == "arithmetic"
        begun = post(url + "/api/episode/start", {"task_index": 0})
        assert begun["observation"]["content"][0]["content"].startswith("What is ")
        step = post(url + "/api/episode/step", {"episode_id": begun["episode_id"], "action": "5", "turn": 0})
        assert (step["done"], step["reward"]) == (True, float(step["info"]["success"]))
        told = server.stop()
    assert server.process.returncode == 0
    assert f"serving arithmetic (endless) at {url}" in told


@pytest.mark.parametrize(
    "options",
    [
        ["--http", "nonsense"],
        ["--http", "0.0.0.0:0"],
        ["--http", ":0", "--port", "1"],
        ["--http", ":0", "--episode-idle", "0"],
        ["--http", ":0", "--max-episodes", "0"],
        ["--http", ":0", "--metrics", "127.0.0.1:99999999"],
        ["--http", "256.1.1.1:0", "--open"],
    ],
)
def test_wrong_options_are_told_with_a_remedy(treetune, options):
    result = treetune("serve", "arithmetic", *options)
    assert result.code == 2
    assert result.err.startswith("error: ")


def test_a_port_that_is_taken_is_told(tmp_path, treetune):
    with serve(tmp_path, "arithmetic", "--http", ":0") as server:
        result = treetune("serve", "arithmetic", "--http", server.report["http"])
    assert (result.code, "cannot listen" in result.err) == (2, True)


@pytest.mark.thorough
def test_a_thousand_clients_that_vanish_leave_nothing_behind(tmp_path):
    options = ["--http", ":0", "-w", "1", "--max-episodes", "3000", "--episode-idle", "1", "--metrics", ":0"]

    async def vanish(url, number):
        gate = asyncio.Semaphore(50)

        async def one():
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
                await reader.read(20)
                # Half of a step, and gone.
                writer.write(b"POST /api/episode/step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
                writer.transport.abort()

        await asyncio.gather(*(one() for _ in range(number)))
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(url + "/api/health") as reply:
                    if (await reply.json())["episodes"] == 0:
                        return
                await asyncio.sleep(0.1)

    with serve(tmp_path, "arithmetic", *options) as server:
        url = server.report["http"]
        asyncio.run(asyncio.wait_for(vanish(url, 500), 100))
        before, files = resident(server.process.pid), len(os.listdir(f"/proc/{server.process.pid}/fd"))
        asyncio.run(asyncio.wait_for(vanish(url, 1000), 100))
        assert resident(server.process.pid) < before + 10
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= files + 2
        told = server.stop()
    assert "Traceback" not in told
    assert server.process.returncode == 0


def test_asked_twice_the_server_ends_at_once(tmp_path):
    with serve(tmp_path, "arithmetic", "--http", ":0") as server:
        post(server.report["http"] + "/api/episode/start", {})
        server.process.send_signal(signal.SIGINT)
        line = b""
        while b"waiting for running work: http 1" not in line:
            line = server.process.stderr.readline()
        server.stop(signal.SIGINT)
    assert server.process.returncode == 130
