"""What the tests of the server share: a taskset with every kind of trouble in it, and servers to try it on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from treetune import Environment, Score, ShuffleConfig, Step, Task, Taskset, TasksetConfig
from treetune.serve.host import ModelsConfig
from treetune.serve.messages import pack, pack_head, unpack_plain
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.broker import EnvServerPool
from treetune.serve.server import EnvServer, ServerConfig
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor

GOLD = ModelsConfig(model="scripted:gold")


class Colour(Task, frozen=True, kw_only=True):
    """A task with fields of its own."""

    shade: str = ""
    code: int = 0
    weights: list[float] = []


class Colours(Taskset[Colour]):
    """Finite, a generator, and with big integers in its tasks."""

    def load_tasks(self):
        for number, name in enumerate(["red", "green", "blue", "white", "black", "grey"]):
            yield Colour(
                prompt=f"Say {name}.",
                reward_spec={"ground_truth": name},
                shade=name[:1],
                code=2**70 + number,
                weights=[0.5, number],
                extra_info={"big": -(2**90), "nested": {"b": 1, "a": [None, True]}},
            )

    def reward(self, task, answer):
        return Score(float(answer == task.ground_truth), metrics={"length": len(answer)})

    def gold(self, task):
        return task.ground_truth


class Numbers(Taskset):
    """Endless, random access."""

    INFINITE = True

    def task_at(self, index):
        return Task(prompt=f"{self.seed}/{index}", reward_spec={"ground_truth": str(index)})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


class Flaw(Numbers):
    """One of its tasks cannot be made."""

    def task_at(self, index):
        if index == 9:
            raise ValueError("nine is missing")
        return super().task_at(index)


class Stream(Numbers):
    """Endless, and only a generator."""

    task_at = Taskset.task_at

    def load_tasks(self):
        number = 0
        while True:
            yield Task(prompt=str(number), reward_spec={"ground_truth": str(number)})
            number += 1


class Slow(Numbers):
    """Its scorer takes as long as the index says, in hundredths of a second; an answer for each is written down."""

    async def reward(self, task, answer):
        await asyncio.sleep(0.01 * (task.idx % 50))
        return 1.0


class Hangs(Numbers):
    """Rollouts that end only when they are stopped; each leaves a file when it begins and one when it ends."""

    folder = ""

    async def reward(self, task, answer):
        mark(f"begun-{task.idx}")
        try:
            await asyncio.sleep(600)
        finally:
            mark(f"ended-{task.idx}")


class Crashes(Numbers):
    """Task 3 kills its worker; task 5 does so the first time only; task 7 blocks its worker's event loop for ever."""

    async def reward(self, task, answer):
        first = mark(f"tried-{task.idx}")
        if task.idx == 3 or (task.idx == 5 and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if task.idx == 7 and first:
            import time

            time.sleep(600)  # noqa: ASYNC251
        return 1.0


class Poison(Numbers):
    """Task 57 ends its worker; the others take a moment."""

    async def reward(self, task, answer):
        await asyncio.sleep(0.3)
        if task.idx == 57:
            os._exit(1)
        return 1.0


class Blocks(Numbers):
    """Task 13 blocks its worker's event loop; the others take a moment."""

    async def reward(self, task, answer):
        await asyncio.sleep(0.3)
        if task.idx == 13:
            import time

            time.sleep(600)  # noqa: ASYNC251
        return 1.0


def mark(name: str) -> bool:
    """Leaves a file in the folder that TREETUNE_TEST_MARKS names; whether it is the first of that name."""
    path = os.path.join(os.environ["TREETUNE_TEST_MARKS"], name)
    first = not os.path.exists(path)
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return first


class Talks(Environment):
    def step(self, action):
        if action.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(f"you said {action.text}", reward=1.0, done=action.text == "stop")


class Talking(Numbers):
    def environment(self, task):
        return Talks(task)


class Ranked(Numbers):
    def score_group(self, task, traces):
        return [float(trace.rollout) for trace in traces]


class Dear(Numbers):
    """Tasks that take long to make; each says in which process it was made."""

    def task_at(self, index):
        import time

        time.sleep(0.004)
        return Task(prompt=str(index), extra_info={"pid": os.getpid()})


class DearFew(Dear):
    INFINITE = False

    def count(self):
        return 9


def shuffled(kind, seed=3):
    return kind(TasksetConfig(shuffle=ShuffleConfig(seed=seed)))


@contextlib.asynccontextmanager
async def serving(
    taskset,
    *,
    workers: int = 0,
    models: ModelsConfig = GOLD,
    pool=None,
    server=None,
    doors=None,
    traces=None,
    **options,
):
    """A running server, closed at the end."""
    doors = doors if doors is not None else [ZmqDoor(options.pop("address", "tcp://127.0.0.1:0"))]
    config = ServerConfig(**{"drain_seconds": 1.0, **options})
    parts = {"doors": doors, "traces": traces}
    if workers:
        made = EnvServerPool(taskset, config, models, PoolConfig(workers=workers, **(pool or {})), **parts)
    else:
        made = (server or EnvServer)(taskset, config, models, **parts)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def served(taskset, **options) -> AsyncIterator[EnvClient]:
    """A client of a running server."""
    client_options = {key: options.pop(key) for key in ("token", "deadline", "run_deadline") if key in options}
    async with (
        serving(taskset, **options) as server,
        EnvClient(server.address, taskset=taskset, **client_options) as client,
    ):
        yield client


async def until(condition) -> None:
    """Waits for something that another process, or another task, brings about."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def until_in_flight(server, number: int) -> None:
    """Waits until a server, or a host, plays this many rollouts."""
    while (await server.health()).in_flight != number:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


class Raw:
    """A client that says exactly what it is told to."""

    def __init__(self, address, client=b"a raw client....", token=None):
        self.head = pack_head(client, token)
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    async def send(self, *frames):
        await self.socket.send_multipart(frames)

    async def receive(self):
        id, data = await asyncio.wait_for(self.socket.recv_multipart(), 10)
        return id, unpack_plain(data)

    async def ask(self, id, method, /, **payload):
        await self.send(id, method.encode(), self.head, pack(payload))
        answered, data = await self.receive()
        assert answered == id
        return data

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.socket.close()


def pids(server):
    return [member.handle.pid for member in server.host.workers.members.values()]
