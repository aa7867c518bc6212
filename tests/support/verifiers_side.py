"""Runs in verifiers' environment, and says what its own server and clients make of exported packages, as JSON.

    python verifiers_side.py faults PACKAGE MODEL_URL MARKS ENDLESS
    python verifiers_side.py kinds MODEL_URL PACKAGE...
    python verifiers_side.py killed PACKAGE MODEL_URL SECONDS
    python verifiers_side.py sample PACKAGE MODEL_URL MODEL PROMPTS GROUP [RENDERED]
    python verifiers_side.py answer                     # plays conversations: sides.py

What each is asked stands with its function.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import sides
import verifiers.v1 as vf
from model_endpoint import calls, endpoint, said
from stories import Played
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.serve import EnvClient, EnvServer, env_config_data, serve_env

from treetune.errors import TreetuneError
from treetune.trainers.verifiers import export_package


def config_of(package, agent=None, **taskset):
    return vf.resolve_env_config({"taskset": {"id": package, **taskset}, "agent": agent or {}})


def client_at(url):
    return vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")


@asynccontextmanager
async def served(config):
    """A client of a server in this process."""
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    running = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup(timeout=120, interval=0.1)
        yield client
    finally:
        await client.close()
        running.cancel()
        with suppress(BaseException):
            await running


async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def play_story(target, says, num_tasks=None):
    """A conversation in an exported package, by the client for evaluations, with the defaults of both."""
    name = f"env-{len(list(Path().glob('env-*')))}"
    try:
        package = export_package(target, Path(name)).folder
    except TreetuneError as error:
        return Played(None, refused=str(error))
    sys.path.insert(0, str(package.absolute()))
    return asyncio.run(_play_story(name, says))


async def _play_story(package, says):
    asked = 0

    def answer(number, _):
        nonlocal asked
        asked += 1
        text, made = says[number]
        whole = calls(*made, content=text or None) if made else said(text)
        whole["choices"][0]["index"] = 0
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", **whole}

    config = config_of(package)
    async with served(config) as client, endpoint(answer) as (policy, _):
        (task,) = vf.load_taskset(config.taskset).take(1)
        model = client_at(policy.endpoint.base_url)
        data = task.data.model_dump()
        episode = await client.run(task_data=data, client=model, model="m", sampling=vf.SamplingConfig())
    (trace,) = episode.traces
    assert episode.ok, trace.errors
    assert asked == len(says), f"only {asked} of {len(says)} turns were played"
    return Played(trace.rewards["episode_reward"].value)


def faults(package, url, marks, endless):
    """The server and client for evaluations, with every fault: what became of each case. `marks` is a folder in which
    an environment has a file while it is open, `endless` a package whose tasks are a generator."""
    print(json.dumps(asyncio.run(_faults(package, url, Path(marks), endless))))


async def _faults(package, url, marks, endless):
    def opened():
        """The environments that are open."""
        return sorted(file.name for file in marks.iterdir())

    @asynccontextmanager
    async def run(agent=None, package=package, **taskset):
        """A client of a server that runs the package, and the tasks that the client's side has."""
        config = config_of(package, agent, **{"model_retries": 0, **taskset})
        async with served(config) as client:
            yield client, [task.data.model_dump() for task in vf.load_taskset(config.taskset).take(8)]

    async def play(client, data, model="m"):
        asked = {"task_data": data, "client": client_at(url), "model": model, "sampling": vf.SamplingConfig()}
        episode = await client.run(**asked)
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

    cases = {}
    async with run() as (client, tasks):
        cases["played"] = await asyncio.gather(*(play(client, data) for data in tasks))
        cases["model fails"] = await play(client, tasks[0], "broken")
        cases["model fails later"] = await play(client, tasks[0], "broken-later")
        cases["environment fails"] = await play(client, tasks[3])
        cases["changed"] = await play(client, {**tasks[0], "index": 1})
        cases["prompt changed"] = await play(client, {**tasks[0], "prompt": "Count down from 9, 1."})
        cases["another taskset"] = await play(client, {**tasks[0], "taskset": "0" * 32})
        running = asyncio.create_task(play(client, tasks[0], "silent"))
        assert await until(opened)
        running.cancel()
        assert await until(lambda: not opened())
        cases["after a cancel"] = await play(client, tasks[0])
    async with run({"timeout": {"rollout": 1.0}}) as (client, tasks):
        cases["out of time"] = await play(client, tasks[0], "silent")
    async with run({"timeout": {"rollout": 1.0}}, timeout_reward=-1.0) as (client, tasks):
        cases["out of time, with a reward"] = await play(client, tasks[0], "silent")
    async with run({"max_turns": 1}) as (client, tasks):
        cases["verifiers' limit"] = await play(client, tasks[0])
    async with run(max_turns=1) as (client, tasks):
        cases["our limit"] = await play(client, tasks[0])
    async with run(overrides={"shuffle.seed": 3}) as (client, tasks):
        cases["shuffled"] = [data["prompt"] for data in tasks]
        cases["shuffled, played"] = await play(client, tasks[0])
    # Two servers of one stream, asked for its tasks in any order: an index is the same task in both.
    async with run(package=endless) as (one, tasks), run(package=endless) as (other, _):
        asked = [(one, 6), (other, 1), (one, 0), (other, 6), (one, 7)]
        cases["streamed"] = [[index, await play(client, tasks[index])] for client, index in asked]
    return cases


def kinds(url, *packages):
    """The first task of each package, played by its own environment: whether it went well, its reward, its branches."""

    async def play(package):
        env = vf.load_environment(config_of(package))
        context = vf.ModelContext(client=client_at(url), model=package, sampling=vf.SamplingConfig())
        async with env.serving():
            episode = await env.run_episode(next(iter(env.taskset)), context)
        (trace,) = episode.traces
        for error in trace.errors:
            print(error.message, file=sys.stderr)
        return [episode.ok, trace.reward, len(trace.branches)]

    async def play_all():
        return {package: await play(package) for package in packages}

    print(json.dumps(asyncio.run(play_all())))


def killed(package, url, seconds):
    """The server, killed in the middle of an episode that has a sandbox in which `sleep SECONDS` runs. It is a process
    of its own, started as prime-rl starts it: alone, or as a broker with workers, of which one or the broker is
    killed."""
    print(json.dumps(asyncio.run(_killed(package, url, seconds))))


async def _killed(package, url, seconds):
    cases = {"alone": (1,), "broker": (2,), "worker": (2, True)}
    return {name: await kill(package, url, seconds, *case) for name, case in cases.items()}


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


def sleeping(seconds) -> bool:
    """Whether the sandbox of an episode lives."""
    return any(command == f"sleep {seconds}" for _, command in processes().values())


@asynccontextmanager
async def served_apart(workers: int, config):
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


async def kill(package, url, seconds, workers: int, kills_worker: bool = False) -> dict:
    config = config_of(package)
    (task,) = vf.load_taskset(config.taskset).take(1)
    asked = {"task_data": task.data.model_dump(), "client": client_at(url), "sampling": vf.SamplingConfig()}
    async with served_apart(workers, config) as (server, client):
        running = asyncio.create_task(client.run(model="silent", **asked))
        assert await until(lambda: sleeping(seconds) or running.done())
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
        gone = await until(lambda: not sleeping(seconds) and not ours & processes().keys())
        return {"error": error, "healthy": await client.health(timeout=1), "gone": gone}


def sample(package, url, model, prompts, group, rendered=None):
    """Rollouts by the client for training. A line of the input is the number of the first task to play; the rollouts of
    that one and those that follow it are printed as a line of JSON. The client renders prompts to tokens itself, by the
    chat template of `rendered`, and asks a real vLLM for tokens; its traces have those, and their logprobs."""
    asyncio.run(_sample(package, url, model, int(prompts), int(group), rendered or model))


async def _sample(package, url, model, prompts, group, rendered):
    config = config_of(package)
    tasks = [task.data.model_dump() for task in vf.load_taskset(config.taskset)]
    engine = TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY", renderer_model_name=rendered)
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
        return {
            "branches": branches,
            "reward": trace.reward,
            "turns": trace.num_turns,
            "sampled": trace.usage.completion_tokens,
            "episode": episode.model_dump_json(),
        }

    async with served(config) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            chosen = [tasks[(int(line) + number) % len(tasks)] for number in range(prompts) for _ in range(group)]
            print(json.dumps(await asyncio.gather(*map(play, chosen))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        sides.answer(play_story)
    else:
        {each.__name__: each for each in (faults, kinds, killed, sample)}[sys.argv[1]](*sys.argv[2:])
