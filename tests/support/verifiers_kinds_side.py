"""Runs beside the real verifiers: the first task of each exported package, played by its own environment.

python verifiers_kinds_side.py MODEL_URL PACKAGE...      # prints whether it went well, its reward and its branches
"""

from __future__ import annotations

import asyncio
import json
import sys

import verifiers.v1 as vf

URL, PACKAGES = sys.argv[1], sys.argv[2:]


async def play(package):
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": package}}))
    client = vf.EvalClientConfig(base_url=URL, api_key_var="NO_KEY")
    context = vf.ModelContext(client=client, model=package, sampling=vf.SamplingConfig())
    async with env.serving():
        episode = await env.run_episode(next(iter(env.taskset)), context)
    (trace,) = episode.traces
    for error in trace.errors:
        print(error.message, file=sys.stderr)
    return [episode.ok, trace.reward, len(trace.branches)]


async def main():
    print(json.dumps({package: await play(package) for package in PACKAGES}))


asyncio.run(main())
