"""Runs beside the real verifiers: its environments as TARGETs, played by scripted policies; prints what became of them.

python verifiers_target_side.py v1|v0 FOLDER         # with `verifiers_envs` on the PYTHONPATH
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import pickle
import sys
from pathlib import Path

from treetune import run_rollout
from treetune.cli.app import run as run_command
from treetune.core.policy import Completion
from treetune.core.tool import message_of_action
from treetune.data.datasets.build import build_rows
from treetune.data.rows.reading import read_rows
from treetune.errors import PolicyError, TreetuneError
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.serve.server import EnvServer
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor
from treetune.tasksets.target import load_taskset
from treetune.trainers.verl import compute_score

VERSION, FOLDER = sys.argv[1], Path(sys.argv[2])


class Says:
    """A policy that says what it was told to, turn by turn."""

    name = "says"

    def __init__(self, *answers):
        self._answers = answers
        self.asked = []

    async def complete(self, request):
        self.asked.append(request)
        answer = self._answers[min(request.turn, len(self._answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            return Completion(message=message_of_action(answer), finish_reason="tool_calls")
        return Completion(text=answer)

    async def close(self):
        pass


async def play(taskset, index, *answers):
    policy = Says(*answers)
    trace = await run_rollout(taskset, taskset[index], policy)
    return {
        "outcome": trace.outcome.value,
        "reward": trace.reward,
        "metrics": trace.metrics,
        "turns": len(trace.turns),
        "error": trace.failure and f"{trace.failure.type}: {trace.failure.message}",
        "warnings": trace.warnings,
        "shown": [message["content"] for turn in trace.turns for message in turn.observed],
        "tools": [tool["function"]["name"] for tool in trace.tools],
    }


def refused(target, **keys):
    """What is said of a target that cannot be played."""
    try:
        taskset = load_taskset(target, {f"taskset.{key}": str(value) for key, value in keys.items()})
        taskset.select_tasks(1)
    except TreetuneError as error:
        return f"{type(error).__name__}: {error}"
    return None


def scored(target, *answers):
    """Rows of a target for verl, and what its scorer gives for answers to the first."""
    _, path = build_rows(load_taskset(target), "verl", None, FOLDER / "cache")
    row = next(iter(read_rows([str(path)])))
    scorer = [row["data_source"], row["reward_model"].get("ground_truth"), row["extra_info"]]
    return [compute_score(scorer[0], answer, scorer[1], scorer[2])["score"] for answer in answers]


async def cancelled(taskset):
    """A policy that never answers is cancelled: verifiers' run must end too."""

    class Never(Says):
        async def complete(self, request):
            asking.set()
            await asyncio.Event().wait()

    asking = asyncio.Event()
    running = asyncio.create_task(run_rollout(taskset, taskset[0], Never("")))
    await asking.wait()
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        from treetune.trainers.verifiers.model_calls import _open

        return len(_open)


def verbs(folder):
    """Each verb with the code that it ends with, and what both doors of a server give for a right answer."""
    target = str(folder / "target.yaml")
    env = "vf-reverse', words: 3" if VERSION == "v1" else "v0-double', number: 3"
    Path(target).write_text(f"taskset: {{id: 'verifiers:{env}, gold: answer}}\n")
    gold = ["-m", "scripted:gold", "-n", "3"]
    checks = "tasks-differ,reward-differs,observations-differ,not-portable"
    commands = {
        "show": ["show", target, "-n", "3"],
        "validate": ["validate", target, "-n", "3"],
        "audit": ["audit", target, "-n", "3", "--skip", checks],
        "eval": ["eval", target, *gold, "-o", str(folder / "run")],
        "profile": ["profile", target, *gold, "-r", "2", "-o", str(folder / "rates.jsonl")],
        **{f"build {each}": ["build", target, "--format", each, "-n", "3"] for each in ("verl", "skyrl", "trl")},
        "train": ["train", "verl", target, "-n", "3", "--dry-run"],
        "convert": ["convert", target, str(folder / "out.parquet"), "--to", "verl", "-n", "3"],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        codes = {verb: run_command(arguments) for verb, arguments in commands.items()}
    return {**codes, "serve": asyncio.run(serve(target))}


async def serve(target):
    pull, http = ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))
    server = EnvServer(load_taskset(target), models=ModelsConfig(model="scripted:gold"), doors=[pull, http])
    await server.start()
    try:
        async with EnvClient(pull.address) as client, TaskServerClient(http.address) as episodes:
            task = await client.sample()
            trace = await client.run_rollout(task)
            async with await episodes.start(0) as episode:
                step = await episode.step(task.data["answer"] if hasattr(task, "data") else task.own["data"]["answer"])
            return [(await client.info()).num_tasks, trace.reward, step.reward]
    finally:
        await server.close()


async def v1():
    reverse, files = load_taskset("verifiers:vf-reverse"), load_taskset("verifiers:vf-files")
    guess, tools = load_taskset("verifiers:vf-guess"), load_taskset("verifiers:vf-tools")
    call = {"tool": "math_double", "arguments": {"number": 1}}
    return {
        "count": reverse.count(),
        "fewer": load_taskset("verifiers:vf-reverse", {"taskset.words": "2"}).count(),
        "right": await play(reverse, 2, "cba"),
        "wrong": await play(reverse, 2, "abc, abc, abc"),
        "answer breaks the reward": await play(reverse, 2, "broken"),
        "needs a runtime": await play(files, 1, "1"),
        "needs a runtime, wrong": await play(files, 1, "7"),
        "policy breaks the reward": await play(files, 1, "unreadable"),
        "empty": await play(files, 1, ""),
        "reward is broken": await play(files, 2, "2"),
        "policy fails": await play(files, 1, PolicyError("no model")),
        "several turns": await play(guess, 13, "5", "1", "3"),
        "several turns, lost": await play(guess, 3, "5"),
        "tools": await play(tools, 1, {"tool": "nothing", "arguments": {}}, call, "2"),
        "infinite": [guess.INFINITE, guess.count(), reverse.INFINITE],
        "left after a cancel": await cancelled(guess),
        "pickled": await play(pickle.loads(pickle.dumps(files)), 1, "1"),
    }


async def v0():
    double, guess, tools = (load_taskset(f"verifiers:v0-{name}") for name in ("double", "guess", "tools"))
    call = {"tool": "double", "arguments": {"number": 1}}
    return {
        "count": double.count(),
        "fewer": load_taskset("verifiers:v0-double", {"taskset.number": "2"}).count(),
        "eval": load_taskset("verifiers:v0-double", {"taskset.split": "eval"}).count(),
        "right": await play(double, 2, "4"),
        "wrong": await play(double, 2, "5"),
        "policy breaks the reward": await play(double, 2, "four"),
        "empty": await play(double, 2, ""),
        "reward is broken": await play(double, 3, "6"),
        "several turns": await play(guess, 3, "5", "1", "3"),
        "several turns, lost": await play(guess, 3, "5"),
        "tools": await play(tools, 1, call, "2"),
        "policy fails": await play(double, 2, PolicyError("no model")),
        "left after a cancel": await cancelled(guess),
        "pickled": await play(pickle.loads(pickle.dumps(double)), 2, "4"),
    }


if VERSION == "v1":
    found = asyncio.run(v1())
    found["rows"] = scored("verifiers:vf-reverse", "a", "no")
    found["refused"] = {
        name: refused(f"verifiers:{name}") for name in ("vf-boxed", "vf-debate", "v0-double", "nothing", "json", "")
    }
    found["wrong argument"] = refused("verifiers:vf-reverse", words="many")
else:
    found = asyncio.run(v0())
    found["rows"] = scored("verifiers:v0-double", "0", "1")
    found["refused"] = {name: refused(f"verifiers:v0-{name}") for name in ("empty", "group")}
found["verbs"] = verbs(FOLDER)
print(json.dumps(found))
