"""The pool's workers as actors of a Ray cluster: a head and two more nodes, one of which is killed."""

from __future__ import annotations

import json

import pytest
import venvs

from conftest import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, json, sys, time
from ray.cluster_utils import Cluster
import ray
sys.path.insert(0, sys.argv[1])
from serving import GOLD, Slow
from treetune.serve.zmq.client import EnvClient
from treetune.serve.pool.broker import EnvServerPool
from treetune.serve.pool.workers import PoolConfig
from treetune.serve.pool.worker import RayEngine
from treetune.serve.zmq.door import ZmqDoor

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]  # three workers: some on each
ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})

async def main():
    server = EnvServerPool(
        Slow(), None, GOLD, PoolConfig(workers=3), RayEngine(), doors=[ZmqDoor("tcp://127.0.0.1:0")]
    )
    began = time.monotonic()
    await server.start()
    ready = time.monotonic() - began
    async with EnvClient(server.address) as client:
        tasks = [await client.sample() for _ in range(256)]
        assert [task.idx for task in tasks] == list(range(256))
        first = await asyncio.gather(*(client.run_rollout(task) for task in tasks[:64]))
        runs = asyncio.gather(*(client.run_rollout(task) for task in tasks))
        await asyncio.sleep(0.1)
        cluster.remove_node(nodes[0], allow_graceful=False)
        began = time.monotonic()
        traces = await runs
        while not server.host.workers.replaced:  # a worker lives on for a moment after its node
            traces = await asyncio.gather(*(client.run_rollout(task) for task in tasks))
        answered = time.monotonic() - began
        cluster.add_node(num_cpus=2)
        while server.host.stats()["workers"] < 3:
            await asyncio.sleep(0.1)
        whole = time.monotonic() - began
        more = await client.run_rollout(tasks[0])
    await server.close()
    return {"ready": ready, "first": len(first), "traces": sorted(trace.task.idx for trace in traces),
            "answered": answered, "whole": whole, "replaced": server.host.workers.replaced,
            "more": more.reward}

try:
    print("RESULT", json.dumps(asyncio.run(asyncio.wait_for(main(), 180))), flush=True)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_rollouts_survive_the_death_of_a_node():
    python = venvs.venv("ray", ["ray[default]==2.60.0"])
    path = f"{ROOT / 'src'}:{ROOT / 'tests/support'}"
    printed = venvs.run(python, "-c", PROGRAM, ROOT / "tests" / "support", path, timeout=400)
    told = [line for line in printed.splitlines() if line.startswith("RESULT ")]  # Ray prints lines of its own
    result = json.loads(told[0].removeprefix("RESULT "))
    print({key: value for key, value in result.items() if key != "traces"})
    assert result["traces"] == list(range(256))
    assert (result["first"], result["more"]) == (64, 1.0)
    assert result["replaced"] >= 1
    assert result["answered"] < 30, "what a user is promised: every rollout answered within 30 s"
