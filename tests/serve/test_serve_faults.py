"""Eleven faults that pull servers have had: each has a check, and, switched on in a double, makes its check fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio
from serving import GOLD, Dear, Hangs, Numbers, Slow, shuffled, until

from treetune import ShuffleConfig, TasksetConfig
from treetune.core.order import locate
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy
from treetune.serve.errors import Denied, TaskRefused
from treetune.serve.host import Models, ModelsConfig
from treetune.serve.messages import pack, pack_head, unpack_plain
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.broker import EnvServerPool
from treetune.serve.pool.workers import WorkerPool
from treetune.serve.server import EnvServer, ServerConfig
from treetune.serve.task_signer import TaskSigner, concrete_task
from treetune.serve.zmq.calls import ReplyCache
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor

HEAD = pack_head(b"0123456789abcdef")
Start = Callable[..., Awaitable[EnvServer]]
"""Starts a server over a taskset: the real one, or one with a fault."""


async def _started(server: EnvServer) -> EnvServer:
    await server.start()
    return server


async def real(taskset, workers=0, models=GOLD, **options):
    return await _started(make(EnvServerPool if workers else EnvServer, taskset, workers, models, **options))


def make(kind, taskset, workers, models, **options):
    config, doors = ServerConfig(drain_seconds=0.0, **options), [ZmqDoor("tcp://127.0.0.1:0")]
    if issubclass(kind, EnvServerPool):
        return kind(taskset, config, models, PoolConfig(workers=max(1, workers)), doors=doors)
    return kind(taskset, config, models, doors=doors)


async def soon(awaitable, what):
    """Its result; that it does not come is the fault, not an error of the test."""
    try:
        return await asyncio.wait_for(awaitable, 8)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


# 1. An infinite taskset in a pool served 20 duplicates in 40.


async def check_infinite_pool(start: Start, folder) -> None:
    server = await start(Numbers(), workers=2)
    try:
        async with EnvClient(server.address) as client:
            drawn = [(await client.sample()).idx for _ in range(40)]
        assert drawn == list(range(40))
    finally:
        await server.close()


class OwnCursors(EnvServerPool):
    """Each worker draws from a stream of its own."""

    async def _start(self):
        await super()._start()
        turns = itertools.count()
        advance = self.streams.advance
        self.order.advance = lambda stream: advance(f"worker {next(turns) % 2}")


# 2. Epoch 0 differed from the order in process.


async def check_epoch_0(start: Start, folder) -> None:
    taskset = shuffled(Few)
    server = await start(taskset)
    try:
        async with EnvClient(server.address) as client:
            drawn = [(await client.sample()).idx for _ in range(9)]
        assert drawn == [task.idx for task in shuffled(Few).select_tasks()]
    finally:
        await server.close()


class Few(Numbers):
    INFINITE = False

    def count(self):
        return 9


class OtherOrder(EnvServer):
    async def _start(self):
        await super()._start()
        self.streams.task = lambda draw: self.taskset[locate(draw.index, 9, seed=12345)[1]]


# 3. A tampered task was scored.


async def check_tampering(start: Start, folder) -> None:
    server = await start(Numbers())
    try:
        async with EnvClient(server.address) as client:
            task = client.portable(await client.sample())
            changed = msgspec.structs.replace(task, reward_spec={"ground_truth": "anything"})
            try:
                await client.run_rollout(changed)
            except TaskRefused:
                return
            raise AssertionError("a changed task was run")
    finally:
        await server.close()


class Trusting(EnvServer):
    async def _start(self):
        await super()._start()
        self.host._spec = msgspec.structs.replace(self.host._spec, signer=Lenient(b"k" * 32))


class Lenient(TaskSigner):
    def read_task(self, data, taskset):
        return concrete_task(data, taskset)


# 4. One malformed message killed the pool.


async def check_malformed(start: Start, folder) -> None:
    server = await start(Numbers(), workers=1)
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(server.address)
    try:
        for frames in ([b"x"], [b"id", b"sample", HEAD, b"\xc1"], [b"", b"", b""], [b"id", b"nonsense", b""]):
            await socket.send_multipart(frames)
        await asyncio.sleep(0.2)
        async with EnvClient(server.address) as client:
            task = await soon(client.sample(), "a task after a malformed message")
            assert (await soon(client.run_rollout(task), "a rollout after a malformed message")).reward == 1.0
        assert server.metrics.malformed == 4
    finally:
        socket.close()
        await server.close()


class Fragile(EnvServerPool):
    async def _start(self):
        await super()._start()
        self.doors[0].refuse_malformed = lambda frames: asyncio.get_running_loop().create_task(self.close())


# 5. A killed worker left callers waiting for ever, and was never replaced.


async def check_killed_worker(start: Start, folder) -> None:
    server = await start(Slow(), workers=2)
    try:
        async with EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(30)]
            runs = asyncio.gather(*(client.run_rollout(task) for task in tasks))
            await asyncio.sleep(0.05)
            members = server.host.workers.members
            os.kill(next(iter(members.values())).handle.pid, signal.SIGKILL)
            await soon(runs, "every rollout is answered")
            await soon(until(lambda: server.host.stats()["workers"] == 2), "the pool is whole again")
    finally:
        await server.close()


class Forgetful(WorkerPool):
    def _remove(self, member, how):
        self.members.pop(member.identity, None)


class ForgetfulPool(EnvServerPool):
    WORKERS = Forgetful


# 6. "Healthy" came long before the first answer.


async def check_readiness(start: Start, folder) -> None:
    server = await start(Numbers(), workers=2)
    try:
        async with EnvClient(server.address) as client:
            await client.health()
            assert server.host.stats()["workers"] == 2, "healthy, but nobody is there to work"
    finally:
        await server.close()


class Hasty(WorkerPool):
    async def start(self):
        starting = asyncio.create_task(super().start())
        await asyncio.sleep(0)
        self._starting = starting


class HastyPool(EnvServerPool):
    WORKERS = Hasty


# 7. A lost reply lost the task.


async def check_lost_reply(start: Start, folder) -> None:
    server = await start(Numbers())
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(server.address)
    try:
        indices = []
        for id in (b"a", b"a", b"b"):  # the reply to the first never arrived, so it is asked for again
            await socket.send_multipart([id, b"sample", HEAD, pack({})])
            indices.append(unpack_plain((await soon(socket.recv_multipart(), "a task"))[1])["index"])
        assert indices == [0, 0, 1]
    finally:
        socket.close()
        await server.close()


class NoMemory(EnvServer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.doors[0].calls.replies = ReplyCache(most=0)
        self.doors[0].calls.replies.keep = lambda key, digest, data: None


# 8. The cursor was lost on a restart.


async def check_restart(start: Start, folder) -> None:
    drawn = []
    for _ in range(2):
        server = await start(Numbers(), state=folder)
        try:
            async with EnvClient(server.address) as client:
                drawn += [(await client.sample()).idx for _ in range(5)]
        finally:
            await server.close()
    assert drawn == list(range(10))


class Amnesiac(EnvServer):
    async def _start(self):
        await super()._start()
        self.order.store.commit = lambda *arguments: None


# 9. Cancelled rollouts ran on.


async def check_cancelled(start: Start, folder) -> None:
    server = await start(Hangs(), workers=1)
    try:
        async with EnvClient(server.address) as client:
            running = asyncio.create_task(client.run_rollout(await client.sample(), request="mine"))
            try:
                await soon(until((folder / "begun-0").exists), "the rollout begins")
                await client.cancel("mine")
                await soon(until((folder / "ended-0").exists), "the rollout stops")
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    finally:
        await server.close()


class Deaf(EnvServerPool):
    async def _start(self):
        await super()._start()
        for member in self.host.workers.members.values():
            put = member.messages.put
            member.messages.put = lambda *said, put=put: put(*said) if said[0] != b"stop" else None


# 10. A client could make the server send one of its environment variables to any URL.


async def check_secrets(start: Start, folder) -> None:
    heard: list[bytes] = []

    async def listen(reader, writer):
        heard.append(await reader.read(4096))
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    server = await start(Numbers(), models=ModelsConfig(model="scripted:gold"))
    try:
        async with EnvClient(server.address) as client:
            with contextlib.suppress(Denied):
                await client.run_rollout(await client.sample(), model="TREETUNE_TEST_SECRET", endpoint=url)
        assert not heard, "the server went where a client sent it"
    finally:
        listener.close()
        await server.close()


class Obedient(EnvServer):
    async def _start(self):
        await super()._start()
        errands = Errands(ModelsConfig(), self.taskset)
        self.host.models, self.host._policy_of = errands, errands.policy_of
        self._opened.push_async_callback(errands.close)


class Errands(Models):
    def check(self, model, endpoint):
        return model, endpoint

    def _load(self, name, address):
        return OpenAIPolicy(name, EndpointConfig(base_url=address, api_key_env=name, max_retries=0))


# 11. Seeds that were offset by the worker's number served near-duplicates.


async def check_seeds(start: Start, folder) -> None:
    taskset = shuffled(Seeded, 7)
    server = await start(taskset, workers=2)
    try:
        async with EnvClient(server.address) as client:
            drawn = await asyncio.gather(*(client.sample() for _ in range(20)))
        assert [task.prompt for task in drawn] == [taskset.at(index).prompt for index in range(20)]
    finally:
        await server.close()


class Seeded(Dear):
    def task_at(self, index):
        task = super().task_at(index)
        return msgspec.structs.replace(task, prompt=f"{self.seed + index}")


class Offset(WorkerPool):
    def _start_one(self):
        seed = self._taskset.config.shuffle.seed + 1
        self._taskset = type(self._taskset)(TasksetConfig(shuffle=ShuffleConfig(seed=seed)))
        self._engine.prepare(self._taskset)
        super()._start_one()


class OffsetPool(EnvServerPool):
    WORKERS = Offset


FAULTS = {
    "1 duplicates in a pool": (check_infinite_pool, OwnCursors),
    "2 another epoch 0": (check_epoch_0, OtherOrder),
    "3 tampered tasks": (check_tampering, Trusting),
    "4 malformed messages": (check_malformed, Fragile),
    "5 killed workers": (check_killed_worker, ForgetfulPool),
    "6 healthy too early": (check_readiness, HastyPool),
    "7 lost replies": (check_lost_reply, NoMemory),
    "8 lost cursors": (check_restart, Amnesiac),
    "9 cancelled rollouts": (check_cancelled, Deaf),
    "10 secrets": (check_secrets, Obedient),
    "11 offset seeds": (check_seeds, OffsetPool),
}


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))
    monkeypatch.setenv("TREETUNE_TEST_SECRET", "the secret")


@pytest.mark.parametrize(("check", "double"), FAULTS.values(), ids=FAULTS)
def test_the_fault_is_absent(check, double, tmp_path):
    asyncio.run(check(real, tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize(("check", "double"), FAULTS.values(), ids=FAULTS)
def test_its_check_would_find_it(check, double, tmp_path):
    async def faulty(taskset, workers=0, models=GOLD, **options):
        return await _started(make(double, taskset, workers, models, **options))

    with pytest.raises(AssertionError):
        asyncio.run(check(faulty, tmp_path))


def test_there_is_a_check_for_each_of_the_eleven():
    assert [int(name.split()[0]) for name in FAULTS] == list(range(1, 12))
