"""Servers in processes of their own that pull answers from a model that is being trained (`trained_model.py`)."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

from serve_process import serve

from treetune.core.policy import Sampling
from treetune.serve import EnvClient

TASKS = """
import os
from treetune import Environment, Step, Task, Taskset

class Talk(Environment):
    turn = 0
    def step(self, action):
        self.turn += 1
        text = action.text
        if text == "raise":
            raise ValueError("no such answer")
        reward = float(text) if text.replace(".", "").isdigit() else 1.0
        return Step(f"turn {self.turn}", reward=reward, done=self.turn == self.task.extra_info["turns"])
    def close(self):
        with open(os.environ["TREETUNE_TEST_MARKS"], "a") as file:
            file.write("closed\\n")

class Talks(Taskset):
    INFINITE = True
    turns = 3
    def task_at(self, index):
        return Task(prompt=f"task {index}", extra_info={"turns": self.turns})
    def environment(self, task):
        with open(os.environ["TREETUNE_TEST_MARKS"], "a") as file:
            file.write("opened\\n")
        return Talk(task)

class Single(Talks):
    turns = 1
"""
EXACT = Sampling(logprobs=True, extra={"return_token_ids": True})
names = (f"model-{number}" for number in itertools.count())


@contextmanager
def pull_server(folder, model, target="Talks", *arguments):
    """A server whose requests name models of the endpoint; `marks` tells of each environment that lives and ends."""
    (folder / "tasks.py").write_text(TASKS)
    marks = folder / "marks"
    marks.touch()
    options = ("--zmq", "tcp://127.0.0.1:0", "--allow-endpoint", model.url, "--endpoint.max_retries", 1, *arguments)
    with serve(folder, f"tasks.py:{target}", *options, TREETUNE_TEST_MARKS=str(marks)) as server:
        yield SimpleNamespace(address=server.address, report=server.report, process=server.process, marks=marks)


@asynccontextmanager
async def watching(server, model):
    """A client, and what a test tells and sees of a model of its own."""
    name = next(names)
    of = {"model": name, "endpoint": model.url}
    watch = SimpleNamespace(
        name=name,
        of=of,
        ask={**of, "sampling": EXACT},
        control=lambda **change: asyncio.to_thread(model.control, name, **change),
        wait=lambda **wanted: asyncio.to_thread(model.wait, name, **wanted),
        seen=lambda: asyncio.to_thread(model.seen, name),
    )
    async with EnvClient(server.address, deadline=60, run_deadline=90) as client:
        yield client, watch


async def begin(client, watch, **options):
    """A rollout whose first call has reached the model, which answers nothing yet."""
    await watch.control(permits=0)
    task = await client.sample()
    running = asyncio.create_task(client.run_rollout(task, **{**watch.ask, **options}))
    await watch.wait(asked=1, open=1)
    return task, running


def all_closed(server):
    """Whether each environment that began has ended."""
    marks = server.marks.read_text().split()
    return marks.count("opened") == marks.count("closed")
