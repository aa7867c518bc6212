"""Runs beside prime-rl's source: its `Env` class, as its orchestrator uses it, over verifiers' server.

    python prime_rl_side.py CHECKOUT PACKAGE MODEL_URL NUMBER        # prints the length and the rewards, as JSON

Tried with commit 559b44772e471d1538537b8805cc77f3824a5e64. The two modules that need torch, the algorithm and the
sampling of the trainer, are stand-ins: neither is asked for anything here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
from contextlib import suppress

CHECKOUT, PACKAGE, URL, NUMBER = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
PLACES = [f"{CHECKOUT}/src/prime_rl", f"{CHECKOUT}/packages/prime-rl-configs/src/prime_rl"]

for name, parts in {"algo": ("Algorithm", "build_algorithm"), "generation_source": ("GenerationSource",)}.items():
    module = types.ModuleType(f"prime_rl.orchestrator.{name}")
    vars(module).update(dict.fromkeys(parts, object))
    sys.modules[module.__name__] = module
package = types.ModuleType("prime_rl")
package.__path__ = PLACES
sys.modules["prime_rl"] = package

import verifiers.v1 as vf  # noqa: E402
from prime_rl.configs.orchestrator import EnvConfig  # noqa: E402
from prime_rl.orchestrator.envs import Env  # noqa: E402
from verifiers.v1.serve import EnvServer  # noqa: E402


async def main():
    config = EnvConfig.model_validate({"env": {"taskset": {"id": PACKAGE}}})
    server = EnvServer(config.env, address="tcp://127.0.0.1:0")
    running = asyncio.create_task(server.run())
    env = Env(config, server.address)
    await env.start()
    client = vf.EvalClientConfig(base_url=URL, api_key_var="NO_KEY")
    rewards = []
    for _ in range(NUMBER):
        data = next(env.tasks).data.model_dump()
        episode = await env.run(client=client, model_name="m", cache_salt=None, task_data=data)
        rewards.append(episode.traces[0].reward if episode.ok else None)
    print(json.dumps({"num_tasks": env.num_tasks, "rewards": rewards}))
    await env.env_client.close()
    running.cancel()
    with suppress(BaseException):
        await running


asyncio.run(main())
