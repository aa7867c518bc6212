"""Rollouts of an exported package by verifiers' own server with its client for training: run in its environment.

    python verifiers_cpu_side.py PACKAGE MODEL_URL MODEL PROMPTS GROUP

A line of its input is the number of the first task to play; the rollouts of that one and those that follow it are
printed as a line of JSON. The client renders prompts to tokens itself and asks a real vLLM for tokens; its traces have
those, and their logprobs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

import verifiers.v1 as vf
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.serve import EnvClient, EnvServer


async def main(package: str, url: str, model: str, prompts: int, group: int) -> None:
    config = vf.resolve_env_config({"taskset": {"id": package}})
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    running = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    tasks = [task.data.model_dump() for task in vf.load_taskset(config.taskset)]
    engine = TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY", renderer_model_name=model)
    sampling = vf.SamplingConfig(max_tokens=12, temperature=1.0)

    async def play(data):
        episode = await client.run(task_data=data, client=engine, model=model, sampling=sampling)
        (trace,) = episode.traces
        assert episode.ok, trace.errors
        # Where an answer was cut off, what it is shown as differs from what was sampled, and another branch begins.
        branches = [
            {"ids": one.token_ids, "mask": [int(mine) for mine in one.sampled_mask], "logprobs": one.logprobs}
            for one in trace.branches
        ]
        return {"branches": branches, "reward": trace.reward, "turns": trace.num_turns}

    try:
        await client.wait_for_server_startup(timeout=120, interval=0.1)
        while line := await asyncio.to_thread(sys.stdin.readline):
            chosen = [tasks[(int(line) + number) % len(tasks)] for number in range(prompts) for _ in range(group)]
            print(json.dumps(await asyncio.gather(*map(play, chosen))), flush=True)
    finally:
        await client.close()
        running.cancel()
        with suppress(BaseException):
            await running


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:])))
