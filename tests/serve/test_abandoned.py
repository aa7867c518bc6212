"""Episodes that nobody wants any more, at every door: they end at once, and are not counted until they expire."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
from http_playing import playing
from serve_process import post, serve
from serving import Numbers, Talks, run, serving, until

from treetune import Action, Observation, load_taskset
from treetune.errors import UsageError
from treetune.play.protocol import Started
from treetune.serve import messages as wire
from treetune.serve.http.client import TaskServerClient
from treetune.serve.zmq.client import EnvClient


class Stubborn(Talks):
    """Begins slowly, and whoever stops it is not heard."""

    async def start(self):
        try:
            await asyncio.sleep(0.4)
        except asyncio.CancelledError:
            return "all the same"
        return "go"


class Stubbornly(Numbers):
    def environment(self, task):
        return Stubborn(task)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("after", [0.1, 1.0])
def test_a_start_that_is_cancelled_leaves_no_episode(workers, after):
    """Before it has begun, and after its answer was sent but nobody took it."""

    async def play():
        async with serving(Stubbornly(), workers=workers) as server, EnvClient(server.address) as client:
            task = await client.sample()
            request = wire.StartRequest(task=client._with_seal(task))
            start = asyncio.create_task(client._run("start", request, Started, "mine"))
            await asyncio.sleep(after)
            found = await client.cancel("mine")
            await until(lambda: server.in_flight == 0 and not server.host.episodes.live)
            start.cancel()
            return found, (await client.health()).in_flight

    assert run(play()) == (True, 0)


def test_a_start_over_http_that_is_cancelled_leaves_no_episode():
    async def play():
        async with playing(Stubbornly()) as played:
            async with TaskServerClient(played.http.address) as client:
                start = asyncio.create_task(client.start())
                await asyncio.sleep(0.2)
                start.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await start
            # Closing waits a moment for the episode, to tell the server that nobody will step it.
            return list(played.http.live), played.server.metrics.requests

    live, requests = run(play())
    assert live == []
    assert (requests["http.start"], requests["http.cancel"]) == (1, 1)


def test_both_doors_drain_in_the_seconds_of_one(tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import asyncio\n"
        "from treetune import Task, Taskset\n"
        "class Hangs(Taskset):\n"
        "    INFINITE = True\n"
        "    def task_at(self, index): return Task(prompt=str(index))\n"
        "    async def reward(self, task, answer):\n"
        "        await asyncio.sleep(600)\n"
    )
    options = ["--http", ":0", "--zmq", "tcp://127.0.0.1:0", "--drain", "1", "-m", "scripted:echo"]
    with serve(tmp_path, "hangs.py:Hangs", *options) as server:
        post(server.report["http"] + "/api/episode/start", {})

        async def run_one():
            async with EnvClient(server.address) as client:
                rollout = asyncio.create_task(client.run_rollout(await client.sample()))
                await asyncio.sleep(0.3)
                told = await asyncio.to_thread(server.stop)
                rollout.cancel()
                return told

        told = asyncio.run(asyncio.wait_for(run_one(), 60))
    assert server.process.returncode == 0
    assert "waiting for running work: zmq 1, http 1" in told
    assert "had not ended: zmq 1, http 1" in told


@pytest.mark.parametrize("kind", [Action, Observation])
def test_text_in_the_place_of_the_type_is_told_with_what_to_write(kind):
    with pytest.raises(UsageError) as told:
        kind("the answer is 42")
    assert f"{kind.__name__}.of(" in str(told.value.remedy)
    assert kind(content="42") == kind.of("42") == kind("text", "42")


def test_an_evaluation_on_a_server_that_is_not_there_says_what_it_waits_for(sockets, caplog, monkeypatch):
    from treetune.evaluation import plan
    from treetune.serve.errors import Unreachable
    from treetune.serve.zmq import client

    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.1)
    served = plan.find_served(load_taskset(f"ipc://{sockets}/nobody"))
    served.deadline = 1
    with pytest.raises(Unreachable):
        asyncio.run(plan.ask_server(served))
    assert "nobody has not answered yet: is the server running there?" in caplog.text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.thorough), "1"])
def test_the_memory_of_abandoned_episodes_is_given_back(tmp_path, workers):
    (tmp_path / "holds.py").write_text(
        "from treetune import Environment, Step, Task, Taskset\n"
        "class Holds(Environment):\n"
        "    async def start(self):\n"
        "        self.held = [str(number) * 500 for number in range(10, 40)]\n"
        "        return 'go'\n"
        "    async def step(self, action): return Step('on')\n"
        "class Many(Taskset):\n"
        "    INFINITE = True\n"
        "    def task_at(self, index): return Task(prompt=str(index))\n"
        "    def environment(self, task): return Holds(task)\n"
    )
    options = ["--http", ":0", "-w", workers, "--max-episodes", "5000", "--episode-idle", "5"]
    with serve(tmp_path, "holds.py:Many", *options) as server:
        url, pid = server.report["http"], server.process.pid
        before = memory_below(pid)
        for _ in range(10):
            post(f"{url}/api/episode/start_batch", {"episodes": [{}] * 400})
        alive = memory_below(pid) - before
        deadline = time.monotonic() + 60
        while (left := memory_below(pid) - before) > alive / 2 and time.monotonic() < deadline:
            time.sleep(0.5)
    assert alive > 80 << 20
    assert left <= alive / 2


def memory_below(pid):
    """Bytes of a process and of those that it started."""
    with open(f"/proc/{pid}/statm") as file:
        own = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return own + sum(map(memory_below, file.read().split()))
