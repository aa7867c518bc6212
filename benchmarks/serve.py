"""What the pull server costs: CPU of the server per call, and wall time, beside bare pyzmq + msgspec.

Run: python -m benchmarks.serve [sample|rollouts|large|start]
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from benchmarks.measure import Cost, children_of, cpu_of, memory_of, read_ready, show
from treetune.serve.messages import CLIENT_BYTES, pack, pack_head
from treetune.serve.zmq.client import EnvClient

CALLS = 40_000
CONCURRENT = 32


LARGE = """
from treetune import ShuffleConfig, Task, Taskset, TasksetConfig
class Large(Taskset):
    def count(self): return 10_000_000
    def task_at(self, index): return Task(prompt=f"What is {index} + 1?", ground_truth=str(index + 1))
    def reward(self, task, answer): return float(answer == task.ground_truth)
    def gold(self, task): return task.ground_truth
"""


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, list[int], float]]:
    """A `treetune serve`: its address, its processes, and the seconds it took to be ready."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "serve", *arguments, "--zmq", "tcp://127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = read_ready(process)["address"]
        took = time.perf_counter() - began
        yield address, [process.pid, *children_of(process.pid)], took
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextmanager
def bare_server() -> Iterator[tuple[str, list[int], float]]:
    """The least that could answer: a ROUTER that decodes a map and sends one back."""
    address = f"ipc://{tempfile.mkdtemp()}/bare"
    program = (
        "import sys, msgspec, zmq\n"
        "s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1])\n"
        "decode, encode = msgspec.msgpack.Decoder(dict).decode, msgspec.msgpack.Encoder().encode\n"
        "task = {'idx': 1, 'prompt': 'What is 3 + 4? Answer with just the number.', 'ground_truth': '7'}\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    identity, id, method, head, payload = s.recv_multipart()\n"
        "    decode(payload); s.send_multipart([identity, id, encode({'success': True, 'task': task})])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield address, [process.pid], 0.0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def best(
    name: str,
    measured: list[tuple[float, float]],
    calls: int,
    target: str = "",
    other: str = "",
    theirs: Cost | None = None,
) -> Cost:
    found = Cost(min(cpu for cpu, _ in measured) / calls, min(wall for _, wall in measured) / calls)
    show(name, found, other, theirs, target, f"{1 / found.wall:,.0f} calls/s")
    return found


# sample


def raw_samples(address: str, calls: int) -> None:
    """A pipelined client with no more in it than frames: `CONCURRENT` requests are always under way."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    payload, head = pack({}), pack_head(os.urandom(CLIENT_BYTES))
    for number in range(CONCURRENT):
        socket.send_multipart([number.to_bytes(8, "big"), b"sample", head, payload])
    for number in range(CONCURRENT, calls + CONCURRENT):
        socket.recv_multipart()
        if number < calls:
            socket.send_multipart([number.to_bytes(8, "big"), b"sample", head, payload])
    socket.close(0)


async def our_samples(address: str, calls: int) -> None:
    async with EnvClient(address) as client:

        async def pull() -> None:
            for _ in range(calls // CONCURRENT):
                await client.sample()

        await asyncio.gather(*(pull() for _ in range(CONCURRENT)))


def measured(pids: list[int], work: Any, repeat: int = 3) -> list[tuple[float, float]]:
    found = []
    for _ in range(repeat):
        cpu, wall = cpu_of(pids), time.perf_counter()
        work()
        found.append((cpu_of(pids) - cpu, time.perf_counter() - wall))
    return found


def sample() -> None:
    """From ten million shuffled tasks: the order, the task, its seal and the commit of the cursor are all in it."""
    with bare_server() as (address, pids, _):
        raw_samples(address, 2000)
        times = measured(pids, lambda: raw_samples(address, CALLS))
        bare = Cost(min(cpu for cpu, _ in times) / CALLS, min(wall for _, wall in times) / CALLS)
    lone = 0.0
    for name, options in {"lone server": [], "pool of 2": ["-w", "2"]}.items():
        with (
            large_taskset() as target,
            tempfile.TemporaryDirectory() as state,
            server(*target, *options, "--state", state) as (address, pids, _),
        ):
            raw_samples(address, 2000)
            times = measured(pids, lambda address=address: raw_samples(address, CALLS))
            beside = ("bare pyzmq + msgspec", bare)
            cpu, _ = best(f"sample: {name}, durable, raw client", times, CALLS, "90 us, 10,000/s", *beside)
            if options:
                print(f"  a pool's CPU per call beside a lone server's: {cpu / lone:.2f}   target 1.15", flush=True)
            lone = cpu
            times = measured(pids, lambda address=address: asyncio.run(our_samples(address, CALLS // 2)))
            best(f"sample: {name}, durable, our client", times, CALLS // 2, "5,000/s")


# sample + run_rollout

ENDPOINT = """
import asyncio, sys
BODY = (b'{"choices":[{"message":{"role":"assistant","content":"7"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":9,"completion_tokens":1}}')
REPLY = (b'HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: '
         + str(len(BODY)).encode() + b'\\r\\n\\r\\n' + BODY)
class Model(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.data, self.need = transport, b'', None
    def data_received(self, data):
        self.data += data
        while True:
            end = self.data.find(b'\\r\\n\\r\\n')
            if end < 0: return
            head = self.data[:end].lower()
            at = head.index(b'content-length:') + 15
            length = int(head[at:].split(b'\\r\\n')[0])
            if len(self.data) < end + 4 + length: return
            self.data = self.data[end + 4 + length:]
            self.transport.write(REPLY)
async def main():
    server = await asyncio.get_running_loop().create_server(Model, '127.0.0.1', 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


async def our_rollouts(address: str, calls: int, concurrent: int) -> None:
    async with EnvClient(address) as client:

        async def pull() -> None:
            for _ in range(calls // concurrent):
                await client.run_rollout(await client.sample())

        await asyncio.gather(*(pull() for _ in range(concurrent)))


def rollouts() -> None:
    model = subprocess.Popen([sys.executable, "-c", ENDPOINT], stdout=subprocess.PIPE)
    assert model.stdout is not None
    calls, concurrent = 6400, 64
    try:
        url = f"http://127.0.0.1:{int(model.stdout.readline())}/v1"
        with (
            tempfile.TemporaryDirectory() as state,
            server("arithmetic", "-w", "2", "-m", "raw", "--endpoint.base_url", url, "--state", state) as (
                address,
                pids,
                _,
            ),
        ):
            asyncio.run(our_rollouts(address, 640, concurrent))
            times = measured(pids, lambda: asyncio.run(our_rollouts(address, calls, concurrent)))
            best("sample + run_rollout: two workers, raw endpoint", times, calls, "1,000 us, 1,000/s")
    finally:
        model.kill()
        model.wait()
        model.stdout.close()


# Start and size


@contextmanager
def large_taskset() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "large.py"
        file.write_text(LARGE)
        yield [f"{file}:Large", "--taskset.shuffle.seed", "3"]


def large() -> None:
    for name, options in {"lone": [], "two workers": ["-w", "2"]}.items():
        with large_taskset() as target, server(*target, "-m", "scripted:gold", *options) as (address, pids, took):
            cpu = cpu_of(pids)
            asyncio.run(our_rollouts(address, 2000, 50))
            sizes = ", ".join(f"{memory_of(pid):.0f} MB" for pid in pids)
            print(f"10,000,000 shuffled tasks, {name}: ready in {took:.2f} s, {cpu:.2f} s CPU   target 2 s")
            print(f"  resident after 2,000 rollouts: {sizes}   target 150 MB a worker", flush=True)


def start() -> None:
    for name, options, target in (("lone", [], "1.5 s"), ("two workers", ["-w", "2"], "3 s")):
        times, cpus = [], []
        for _ in range(3):
            with server("arithmetic", "-m", "scripted:gold", *options) as (_, pids, took):
                times.append(took)
                cpus.append(cpu_of(pids))
        print(f"start to ready, {name}: {min(times):.2f} s, {min(cpus):.2f} s CPU   target {target}", flush=True)


PARTS = {"sample": sample, "rollouts": rollouts, "large": large, "start": start}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
