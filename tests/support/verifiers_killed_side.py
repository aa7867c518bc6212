"""verifiers' own server, killed in the middle of an episode of an exported package: run in verifiers' environment.

    python verifiers_killed_side.py PACKAGE MODEL_URL SECONDS      # prints what became of each case, as JSON

An episode of the package has a sandbox in which `sleep SECONDS` runs. The server is a process of its own, started as
prime-rl starts it: alone, or as a broker with workers, of which one or the broker is killed.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, env_config_data, serve_env

PACKAGE, URL, SECONDS = sys.argv[1:]


def processes() -> dict[int, tuple[int, str]]:
    """The parent and the command of each process that runs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if state != "Z":
            found[int(folder.name)] = (int(parent), command)
    return found


def started_by(pid: int) -> set[int]:
    """A process, and all that it has started."""
    running, found = processes(), {pid}
    while more := {one for one, (parent, _) in running.items() if parent in found} - found:
        found |= more
    return found


def sleeping() -> bool:
    """Whether the sandbox of an episode lives."""
    return any(command == f"sleep {SECONDS}" for _, command in processes().values())


async def until(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


@asynccontextmanager
async def served(workers: int, config):
    """The process of a server, and a client of it."""
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    settings = {"max_workers": workers, "address": "tcp://127.0.0.1:0", "config_data": env_config_data(config)}
    server = context.Process(target=serve_env, kwargs={**settings, "address_queue": addresses})
    server.start()
    try:
        client = EnvClient(await asyncio.to_thread(addresses.get, timeout=120))
        await client.wait_for_server_startup(timeout=120, interval=0.1)
        yield server, client
        await client.close()
    finally:
        server.kill()
        await asyncio.to_thread(server.join)


async def kill(workers: int, kills_worker: bool = False) -> dict:
    config = vf.resolve_env_config({"taskset": {"id": PACKAGE}})
    (task,) = vf.load_taskset(config.taskset).take(1)
    endpoint = vf.EvalClientConfig(base_url=URL, api_key_var="NO_KEY")
    asked = {"task_data": task.data.model_dump(), "client": endpoint, "sampling": vf.SamplingConfig()}
    async with served(workers, config) as (server, client):
        running = asyncio.create_task(client.run(model="silent", **asked))
        assert await until(lambda: sleeping() or running.done())
        assert not running.done(), (await running).traces[0].errors
        killed = server.pid
        if kills_worker:
            listed = processes()
            killed = next(pid for pid in started_by(server.pid) - {server.pid} if "spawn_main" in listed[pid][1])
        ours = started_by(killed)
        os.kill(killed, signal.SIGKILL)
        try:
            await asyncio.wait_for(running, 2)
            error = None
        except Exception as raised:
            error = type(raised).__name__
        gone = await until(lambda: not sleeping() and not ours & processes().keys())
        return {"error": error, "healthy": await client.health(timeout=1), "gone": gone}


async def main() -> None:
    cases = {"alone": (1,), "broker": (2,), "worker": (2, True)}
    print(json.dumps({name: await kill(*case) for name, case in cases.items()}))


if __name__ == "__main__":
    asyncio.run(main())
