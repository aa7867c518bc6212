"""Runs beside the real verifiers: its environment server and client over an exported package, with every fault.

    python verifiers_side.py PACKAGE MODEL_URL MARKS ENDLESS      # prints what became of each case, as JSON

MARKS is a folder in which an environment has a file while it is open, ENDLESS a package whose tasks are a generator.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, EnvServer

PACKAGE, URL, MARKS, ENDLESS = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]


@asynccontextmanager
async def served(agent=None, package=PACKAGE, **taskset):
    """A client of a server that runs the package, and the tasks that the client's side has."""
    config = vf.resolve_env_config({"taskset": {"id": package, "model_retries": 0, **taskset}, "agent": agent or {}})
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    running = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup(timeout=60, interval=0.1)
        yield client, [task.data.model_dump() for task in vf.load_taskset(config.taskset).take(8)]
    finally:
        await client.close()
        running.cancel()
        with suppress(BaseException):
            await running


async def play(client, data, model="m"):
    endpoint = vf.EvalClientConfig(base_url=URL, api_key_var="NO_KEY")
    episode = await client.run(task_data=data, client=endpoint, model=model, sampling=vf.SamplingConfig())
    (trace,) = episode.traces
    return {
        "ok": episode.ok,
        "rewards": {name: reward and reward.value for name, reward in trace.rewards.items()},
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "turns": trace.num_turns,
        "branches": len(trace.branches),
        "stop": trace.stop_condition,
        "metrics": trace.metrics,
        "open": opened(),
    }


def opened():
    """The environments that are open."""
    return sorted(file.name for file in MARKS.iterdir())


async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def main():
    cases = {}
    async with served() as (client, tasks):
        cases["played"] = await asyncio.gather(*(play(client, data) for data in tasks))
        cases["model fails"] = await play(client, tasks[0], "broken")
        cases["model fails later"] = await play(client, tasks[0], "broken-later")
        cases["environment fails"] = await play(client, tasks[3])
        cases["changed"] = await play(client, {**tasks[0], "index": 1})
        cases["prompt changed"] = await play(client, {**tasks[0], "prompt": "Count down from 9, 1."})
        cases["another taskset"] = await play(client, {**tasks[0], "taskset": "0" * 32})
        running = asyncio.create_task(play(client, tasks[0], "silent"))
        await until(opened)
        running.cancel()
        await until(lambda: not opened())
        cases["after a cancel"] = await play(client, tasks[0])
    async with served({"timeout": {"rollout": 1.0}}) as (client, tasks):
        cases["out of time"] = await play(client, tasks[0], "silent")
    async with served({"timeout": {"rollout": 1.0}}, timeout_reward=-1.0) as (client, tasks):
        cases["out of time, with a reward"] = await play(client, tasks[0], "silent")
    async with served({"max_turns": 1}) as (client, tasks):
        cases["verifiers' limit"] = await play(client, tasks[0])
    async with served(max_turns=1) as (client, tasks):
        cases["our limit"] = await play(client, tasks[0])
    async with served(overrides={"shuffle.seed": 3}) as (client, tasks):
        cases["shuffled"] = [data["prompt"] for data in tasks]
        cases["shuffled, played"] = await play(client, tasks[0])
    # Two servers of one stream, asked for its tasks in any order: an index is the same task in both.
    async with served(package=ENDLESS) as (one, tasks), served(package=ENDLESS) as (other, _):
        asked = [(one, 6), (other, 1), (one, 0), (other, 6), (one, 7)]
        cases["streamed"] = [[index, await play(client, tasks[index])] for client, index in asked]
    print(json.dumps(cases))


asyncio.run(main())
