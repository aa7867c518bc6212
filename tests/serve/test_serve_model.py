"""A pool under a seeded scheduler that loses, repeats, delays and reorders messages, and kills servers and workers.

Ten thousand steps on a network that is simulated, with the real server, store, pool and workers (in this process).
What must hold: every request is answered with one task, no task is lost, none is given twice in an epoch, and each is
the one that its index stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from serving import GOLD, Colours, Numbers, Stream, shuffled

from treetune import Mixture, Task
from treetune.serve.messages import pack, pack_head, unpack_plain
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.broker import EnvServerPool
from treetune.serve.pool.worker import Worker
from treetune.serve.server import ServerConfig
from treetune.serve.task_signer import unpack_task
from treetune.serve.zmq.door import ZmqDoor

STEPS = 10_000
LOST, REPEATED = 0.1, 0.1
HEAD = pack_head(b"0123456789abcdef")


class Killed(BaseException):
    """The server's process ends here."""


class InProcess:
    """An engine whose workers are tasks of this event loop; a kill cancels them in the middle of what they do."""

    encrypted = False
    silent_seconds = 3600.0

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="treetune-")
        self.handles = []

    def prepare(self, taskset):
        self.taskset = taskset

    def address(self):
        return f"ipc://{self.folder}/workers"

    def start(self, spec, on_exit):
        handle = Handle(spec, self.taskset, on_exit)
        self.handles.append(handle)
        return handle

    def close(self):
        for handle in self.handles:
            handle.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Handle:
    def __init__(self, spec, taskset, on_exit):
        self.worker = Worker(spec, taskset)
        self.on_exit = on_exit
        self.task = asyncio.create_task(self.worker.run())
        self.task.add_done_callback(self._ended)

    def kill(self):
        self.task.cancel()

    def _ended(self, task):
        for one in list(self.worker._tasks.values()):
            one.cancel()
        if hasattr(self.worker, "_socket") and not self.worker._socket._socket.closed:
            self.worker._socket.close(0)
        self.on_exit("killed" if task.cancelled() else "ended")


class Flaky(Numbers):
    """Every seventh task fails twice before it can be made."""

    failed: ClassVar[Counter[int]] = Counter()

    def task_at(self, index):
        if index > 7 and index % 7 == 3 and self.failed[index] < 2:
            self.failed[index] += 1
            raise OSError("the disk is away")
        return super().task_at(index)


class DearFlaky(Flaky):
    """Made by the workers."""


class World:
    def __init__(self, make, seed, folder):
        self.make, self.random, self.folder = make, random.Random(seed), folder
        self.to_server: list[list[bytes]] = []
        self.to_client: list[tuple[bytes, bytes]] = []
        self.outstanding: dict[bytes, tuple[bytes, dict]] = {}
        self.acks: list[bytes] = []
        self.tasks: list[dict] = []
        self.first = {"a": 0, "b": 0}
        self.given: dict[str, dict[int, Task]] = {"a": {}, "b": {}}
        self.streams: dict[bytes, str] = {}
        self.number = 0
        self.counts = dict.fromkeys(["samples", "rollouts", "kills", "worker kills", "restores"], 0)

    # The server

    async def start(self):
        self.engine = InProcess()
        self.server = EnvServerPool(
            self.make(),
            ServerConfig(state=Path(self.folder) / "state", capacity=64),
            GOLD,
            PoolConfig(workers=2),
            self.engine,
            doors=[ZmqDoor(f"ipc://{self.folder}/server")],
        )
        await self.server.start()
        self.server.doors[0].calls.send = lambda reply: self.to_client.append((reply[1], reply[2]))
        if isinstance(self.server.taskset, DearFlaky):
            self.server.streams.cheap = False

    async def kill(self):
        self.counts["kills"] += 1
        self.server.doors[0].calls.send = lambda reply: None
        self.server.order.store.commit = lambda *arguments: None
        await self.server.close()
        self.to_server = [message for message in self.to_server if self.random.random() < 0.5]
        await self.start()

    async def serve(self, batch, dies=None):
        """The server takes a batch, and may die before its commit or before its replies are out."""
        server = self.server
        if dies == "before the commit":
            server.order.store.commit = _die
        elif dies == "before the replies":
            server.doors[0].calls.send = _die
        with contextlib.suppress(Killed):
            server.doors[0].take_batch([[b"client", *message] for message in batch])
        if dies:
            await self.kill()

    # The client

    def ask(self, method, payload):
        self.number += 1
        id = self.number.to_bytes(8, "big")
        payload = {**payload, "ack": self.acks}
        self.acks = []
        self.outstanding[id] = (method, payload)
        self.send(id)
        return id

    def send(self, id):
        method, payload = self.outstanding[id]
        self.to_server.append([id, method, HEAD, pack(payload)])

    def hear(self, id, data):
        if id not in self.outstanding:
            return
        answer = unpack_plain(data)
        method, payload = self.outstanding[id]
        if not answer["success"]:
            if answer["kind"] in ("busy", "cancelled"):
                self.send(id)
                return
            if answer["kind"] == "failed":  # its task could not be made: somebody asks for another
                assert "the disk is away" in answer["error"] or "could not be created" in answer["error"]
                del self.outstanding[id]
                self.streams[self.ask(b"sample", {"stream": self.streams[id]})] = self.streams[id]
                return
            assert answer["kind"] == "worker_lost", answer
        elif method == b"sample":
            self.note(self.streams[id], answer, data)
        elif method == b"run_rollout":
            assert answer["trace"]["reward"] == 1.0
            assert answer["trace"]["task"]["idx"] == payload["task"]["idx"]
        del self.outstanding[id]
        self.acks.append(id)

    def note(self, stream, answer, data):
        index = answer["index"]
        assert index not in self.given[stream], f"{stream} gave index {index} twice"
        self.given[stream][index] = answer["task"]
        self.tasks.append(answer["task"])

    # The scheduler

    async def step(self):
        choice = self.random.random()
        if choice < 0.35:
            stream = self.random.choice("ab")
            self.streams[self.ask(b"sample", {"stream": stream})] = stream
            self.counts["samples"] += 1
        elif choice < 0.5 and self.tasks:
            self.ask(b"run_rollout", {"task": self.random.choice(self.tasks[-50:])})
            self.counts["rollouts"] += 1
        elif choice < 0.75:
            await self.deliver_to_server()
        elif choice < 0.95:
            self.deliver_to_client()
        elif choice < 0.97:
            for id in list(self.outstanding):
                self.send(id)
        elif choice < 0.98:
            self.to_server.append([self.random.randbytes(4), b"sample", HEAD, self.random.randbytes(20)])
        elif choice < 0.985:
            if alive := [handle for handle in self.engine.handles if not handle.task.done()]:
                self.counts["worker kills"] += 1
                self.random.choice(alive).kill()
        elif choice < 0.99:
            await self.kill()
        elif choice < 0.993:
            await self.restore()
        await asyncio.sleep(0)

    async def deliver_to_server(self):
        batch = []
        for _ in range(min(len(self.to_server), self.random.randint(1, 8))):
            message = self.to_server.pop(self.random.randrange(len(self.to_server)))
            if self.random.random() < REPEATED:
                self.to_server.append(message)
            if self.random.random() >= LOST:
                batch.append(message)
        dies = self.random.choice(["before the commit", "before the replies"]) if self.random.random() < 0.01 else None
        await self.serve(batch, dies)

    def deliver_to_client(self):
        for _ in range(min(len(self.to_client), self.random.randint(1, 8))):
            id, data = self.to_client.pop(self.random.randrange(len(self.to_client)))
            if self.random.random() < REPEATED:
                self.to_client.append((id, data))
            if self.random.random() >= LOST:
                self.hear(id, data)

    async def settle(self):
        """Until every request has its answer, and what failed was tried again."""
        await self._deliver_all()
        for _ in range(200):
            failed = [stream for stream in "ab" if self.server.streams.pending.of(stream)]
            for stream in failed:
                self.streams[self.ask(b"sample", {"stream": stream})] = stream
            if not failed:
                return
            await self._deliver_all()

    async def _deliver_all(self):
        """Messages are still lost, and sent again."""
        for _ in range(2000):
            if not self.outstanding:
                break
            for id in list(self.outstanding):
                self.send(id)
            while self.to_server:
                await self.deliver_to_server()
            await asyncio.sleep(0.002)
            while self.to_client:
                self.deliver_to_client()
        assert not self.outstanding, f"never answered: {len(self.outstanding)}"

    async def restore(self):
        """To an earlier place, as a trainer does that goes back to a checkpoint."""
        await self.settle()
        self.check()
        state = self.server.streams.state()
        entry = state.streams.get("a")
        if entry is None:
            return
        back = max(0, entry.index - self.random.randint(0, 30))
        plain = unpack_plain(pack(state))
        plain["streams"] = {"a": {"index": back, "curriculum": None}}
        self.ask(b"restore", {"state": plain})
        await self.settle()
        self.counts["restores"] += 1
        self.first["a"], self.given["a"] = back, {}

    def check(self):
        """What was given is one unbroken stretch of the order, each task once."""
        taskset = self.make()
        for stream, given in self.given.items():
            first = self.first[stream]
            assert sorted(given) == list(range(first, first + len(given)))
            assert self.server.streams.cursor(stream) == first + len(given)
            for index, task in given.items():
                kinds = {"Colour": Colours.task_type}
                assert unpack_task(pack(task), kinds)[0] == taskset.at(index)


def _die(*arguments):
    raise Killed


TASKSETS = {
    "finite": lambda: shuffled(Colours),
    "infinite": Numbers,
    "generator": Stream,
    "mixture": lambda: Mixture.of([shuffled(Colours), Numbers()], [1, 2], seed=1),
    "flaky": Flaky,
    "flaky in workers": DearFlaky,
}


LIVES = [
    *((name, STEPS // 20) for name in TASKSETS),
    *(pytest.param(name, STEPS // 5, marks=pytest.mark.thorough) for name in TASKSETS),
    pytest.param("infinite", STEPS, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "steps"), LIVES)
def test_no_task_is_lost_or_given_twice_whatever_happens(name, steps, sockets):
    Flaky.failed.clear()
    counts = asyncio.run(lived(World(TASKSETS[name], 20260 + len(name), sockets), steps))
    assert steps < STEPS // 5 or min(counts.values()) >= 1, counts  # a long life has seen everything
    assert counts["samples"] > steps / 4


async def lived(world, steps):
    await world.start()
    try:
        for _ in range(steps):
            await world.step()
        await world.settle()
        world.check()
    finally:
        await world.server.close()
    return world.counts


class Careless(World):
    """Whose server does something in the wrong order, or not at all."""

    def __init__(self, fault, folder):
        super().__init__(Numbers, 5, folder)
        self.fault = fault

    async def start(self):
        await super().start()
        if self.fault == "keeps no cursor":
            self.server.order.store.commit = lambda *arguments: None
        elif self.fault == "keeps no draws":
            commit = self.server.order.store.commit
            self.server.order.store.commit = lambda streams, answers=(), pending=None: commit(streams, (), pending)
        elif self.fault == "keeps no answers":
            self.server.doors[0].calls.replies.keep = lambda key, digest, data: None
        elif self.fault == "takes late repetitions for new":
            self.server.doors[0].calls.replies.is_settled = lambda key: False


FAULTS = ["keeps no cursor", "keeps no draws", "keeps no answers", "takes late repetitions for new"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_a_server_that(fault, sockets):
    with pytest.raises(AssertionError):
        asyncio.run(lived(Careless(fault, sockets), STEPS // 5))
