"""The pool's workers as actors of a Ray cluster that `ray start` made: a head and a second node, which is killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess

import pytest
import venvs
from ray_start import RayCluster
from serve_process import serve

from treetune.serve.http.client import TaskServerClient
from treetune.serve.zmq.client import EnvClient

pytestmark = pytest.mark.slow

MACHINES = """
import asyncio
from treetune import Environment, Step, Task, Taskset
from treetune.sandbox.shell import Shell

class Machine(Environment):
    async def start(self):
        self.shell = await Shell.open()
        await self.shell.execute(f"number={self.task.idx}")
        return "a shell"
    async def step(self, action):
        said = await self.shell.execute(action.text)
        return Step(said.text.strip(), reward=1.0, done=action.text.startswith("echo"))
    async def close(self):
        await self.shell.close()

class Machines(Taskset):
    INFINITE = True
    def task_at(self, index):
        return Task(prompt=str(index), reward_spec={"ground_truth": "echo $number"})
    def environment(self, task):
        return Machine(task)
    def gold(self, task):
        return task.ground_truth
"""


@pytest.fixture(scope="module")
def python():
    return venvs.venv(*venvs.RAY)


def test_rollouts_and_http_episodes_in_sandboxes_survive_the_death_of_a_node(tmp_path, python):
    (tmp_path / "machines.py").write_text(MACHINES)
    options = ["machines.py:Machines", "--engine", "ray", "-w", "3", "-m", "scripted:gold"]
    doors = ["--zmq", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0"]

    async def play(server, node):
        async with EnvClient(server.address) as client, TaskServerClient(server.report["http"], patience=5) as http:
            tasks = [await client.sample() for _ in range(64)]
            episodes = await asyncio.gather(*(http.start(index) for index in range(6)))
            seen = [(await episode.step("true")).done for episode in episodes]
            runs = asyncio.gather(*(client.run_rollout(task) for task in tasks))
            await asyncio.sleep(0.2)
            node.kill()
            traces = await runs
            while not (await client.stats())["replaced_workers"]:  # those of a dead node may live on for a moment
                traces = await asyncio.gather(*(client.run_rollout(task) for task in tasks))
            alive = 0
            for episode in episodes:
                with contextlib.suppress(Exception):
                    step = await episode.step("echo $number")
                    assert step.observation.content == str(episodes.index(episode))
                    alive += step.done
            async with await http.start(70) as more:
                last = await more.step("echo $number")
            return seen, [trace.final[-1]["content"] for trace in traces], alive, last.observation.content

    with RayCluster(python, cpus=2) as cluster:
        node = cluster.add_node(cpus=1)  # three workers: one there
        with serve(tmp_path, *options, *doors, python=python, **cluster.environment) as server:
            seen, said, alive, last = asyncio.run(asyncio.wait_for(play(server, node), 180))
            told = server.stop()
    assert seen == [False] * 6
    assert said == [str(idx) for idx in range(64)]
    assert alive == 4  # two were on the node
    assert last == "70"
    assert "no heartbeat" in told or "ended (" in told
    assert server.process.returncode == 0


def test_a_pool_that_the_cluster_has_no_room_for_is_told_why(tmp_path, python):
    with RayCluster(python, cpus=1) as cluster:
        options = ["--zmq", "tcp://127.0.0.1:0", "--engine", "ray", "-w", "2"]
        command = [python, "-m", "treetune", "serve", "arithmetic", *options]
        streams = {"stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=tmp_path, env=cluster.environment, **streams) as server:
            told = next(line for line in server.stderr if "no CPU of the Ray cluster is free" in line)
            server.terminate()
            server.communicate(timeout=60)
    assert "each worker needs one (-w)" in told


def test_the_inner_state_of_a_raylet_that_ended_is_not_printed(tmp_path, python):
    async def wait(server):
        async with EnvClient(server.address) as client:
            while not (await client.stats())["replaced_workers"]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            await asyncio.sleep(10)  # until Ray has told of it

    with RayCluster(python, cpus=2) as cluster:
        node = cluster.add_node(cpus=2)
        options = ["arithmetic", "--engine", "ray", "-w", "3", "-m", "scripted:gold", "--zmq", "tcp://127.0.0.1:0"]
        with serve(tmp_path, *options, python=python, **cluster.environment) as server:
            node.kill_raylet()
            asyncio.run(asyncio.wait_for(wait(server), 120))
            said = server.stop()
    assert "aylet is terminated" in said
    assert "state-dump" not in said
    assert len(said.splitlines()) < 20
