"""A pool of two under load for minutes, while faults are injected: nothing lost, nothing twice, memory flat.

Clients pull tasks and have rollouts run, others play episodes over HTTP, all through connections that are cut. Workers
are killed and stopped, both doors get garbage, the disk of --state fills up. At the end every draw must have been
given out once and answered, and the server must hold no more memory, processes and descriptors than before. About a
minute before that is spent on filling the books that a server keeps anyway.

Run: python -m benchmarks.soak [--minutes 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from benchmarks.measure import children_of, memory_of, read_ready
from treetune.errors import TreetuneError
from treetune.serve.errors import WorkerLost
from treetune.serve.http.client import TaskServerClient
from treetune.serve.zmq.client import EnvClient

PULLING, PLAYING = 16, 6
"""Clients at each door."""
PAUSE = 3.0
"""Seconds between two faults."""
STOPPED_FOR_GOOD = 150.0
"""Seconds between two workers that are stopped and never go on; each is replaced after a minute of silence."""
GROWTH, GROWTH_MB = 1.10, 8.0
"""Memory is flat where the last third has no more than so many times the first, and so many megabytes."""

TASKSET = """
import asyncio
from treetune import Environment, Step, Task, Taskset
class Talk(Environment):
    async def step(self, action):
        await asyncio.sleep(0.05)
        return Step(str(self.task.idx), reward=0.5, done=action.text == "last")
class Soak(Taskset):
    INFINITE = True
    def task_at(self, index):
        return Task(prompt=str(index), ground_truth="last", extra_info={"text": "x" * (index % 2000)})
    def environment(self, task): return Talk(task)
    def gold(self, task): return task.ground_truth
"""


class Cuttable:
    """A way to an address of which all connections can be cut at once."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._open |= {writer, there_writer}
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        self._open.discard(writer)
        writer.close()

    def cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()


async def fill_books(client: EnvClient, http: TaskServerClient) -> None:
    """The server remembers so many answered requests and ended episodes; memory can be flat only once it does."""
    requests, episodes = iter(range(110_000)), iter(range(21_000))

    async def ask() -> None:
        for _ in requests:
            await client.sample(0)

    async def play() -> None:
        for _ in episodes:
            await (await http.start(0)).step("last")

    await asyncio.gather(*(ask() for _ in range(32)), *(play() for _ in range(64)))


class Soak:
    def __init__(self, server: int, zmq_port: int, http_port: int, seed: int) -> None:
        self.server, self.ports = server, (zmq_port, http_port)
        self.random = random.Random(seed)
        self.given: Counter[int] = Counter()
        """How often each index was given out."""
        self.finished: Counter[int] = Counter()
        """Rollouts and episodes by index, that were answered as they should be."""
        self.ended_with_worker: set[int] = set()
        """Episodes whose worker was killed; their clients were told so."""
        self.wrong: list[str] = []
        self.faults: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.memory: list[float] = []
        self.stopped: set[int] = set()
        """Workers that were stopped for good: only the server may end them."""
        self.over = False
        """No new tasks are asked for."""

    # Load

    async def pull(self, client: EnvClient) -> None:
        while not self.over:
            try:
                task = await client.sample()
            except TreetuneError as error:
                self.refused[f"sample: {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)
                continue
            self.given[task.idx] += 1
            for _ in range(3):  # what a trainer would do: a rollout that was given up is asked for again
                try:
                    trace = await client.run_rollout(task)
                except WorkerLost:
                    self.refused["run_rollout: WorkerLost"] += 1
                    continue
                if (trace.task.idx, trace.reward) == (task.idx, 0.5):
                    self.finished[task.idx] += 1
                else:
                    self.wrong.append(f"rollout of {task.idx}: {trace.task.idx}, {trace.reward}, {trace.failure}")
                break

    async def play(self, client: TaskServerClient) -> None:
        while not self.over:
            try:
                episode = await client.start()
            except TreetuneError as error:
                self.refused[f"start: {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)
                continue
            index = int(episode.info["task_index"])
            self.given[index] += 1
            try:
                steps = [await episode.step(word) for word in ("first", "second", "last")]
            except TreetuneError as error:
                if "worker of this episode" not in str(error):
                    self.wrong.append(f"episode {index}: {error}")
                self.ended_with_worker.add(index)
                continue
            if [step.done for step in steps] == [False, False, True] and sum(step.reward for step in steps) == 1.5:
                self.finished[index] += 1
            else:
                self.wrong.append(f"episode {index}: {steps}")

    # Faults

    def workers(self) -> list[int]:
        found = []
        for child in children_of(self.server):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

    def choose_worker(self) -> int:
        return self.random.choice([pid for pid in self.workers() if pid not in self.stopped])

    async def kill_worker(self) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self.choose_worker(), signal.SIGKILL)

    async def pause_worker(self) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            pid = self.choose_worker()
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(2.0)
            os.kill(pid, signal.SIGCONT)

    async def stop_worker(self) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pid := self.choose_worker(), signal.SIGSTOP)
            self.stopped.add(pid)

    async def fill_disk(self) -> None:
        """For a moment no file of the server can grow, its state neither."""
        before = resource.prlimit(self.server, resource.RLIMIT_FSIZE)
        resource.prlimit(self.server, resource.RLIMIT_FSIZE, (1, before[1]))
        await asyncio.sleep(1.0)
        resource.prlimit(self.server, resource.RLIMIT_FSIZE, before)

    async def send_garbage(self) -> None:
        for port in self.ports:
            for start in (
                b"",
                b"GET / HTTP/1.1\r\n",
                b"POST /api/episode/step HTTP/1.1\r\nContent-Length: 999\r\n\r\n",
            ):
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(start + self.random.randbytes(self.random.randrange(1, 20_000)))
                    await writer.drain()
                    writer.close()
        with zmq.Context.instance().socket(zmq.DEALER) as peer:
            peer.linger = 200
            peer.connect(f"tcp://127.0.0.1:{self.ports[0]}")
            for _ in range(200):
                frames = [self.random.randbytes(self.random.randrange(40)) for _ in range(self.random.randrange(1, 5))]
                peer.send_multipart(frames)
            await asyncio.sleep(0.2)

    async def inject(self, until: float, cuttable: list[Cuttable]) -> None:
        async def cut() -> None:
            for one in cuttable:
                one.cut()

        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self.kill_worker,
            "worker paused for 2 s": self.pause_worker,
            "garbage on both doors": self.send_garbage,
            "connections cut": cut,
            "disk full for 1 s": self.fill_disk,
        }
        stop_next = time.monotonic() + PAUSE
        while time.monotonic() < until:
            for name, fault in kinds.items():
                await asyncio.sleep(PAUSE)
                if time.monotonic() > until:
                    return
                await fault()
                self.faults[name] += 1
                if time.monotonic() > stop_next and until - time.monotonic() > 70:
                    stop_next = time.monotonic() + STOPPED_FOR_GOOD
                    await self.stop_worker()
                    self.faults["worker stopped for good"] += 1

    async def measure(self) -> None:
        while True:
            self.memory.append(memory_of(self.server))
            await asyncio.sleep(1.0)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settle(soak: Soak, client: EnvClient, before: tuple[int, int]) -> tuple[int, int]:
    """Processes and descriptors of the server once nothing is under way any more; as few as before, within 90 s."""
    end = time.monotonic() + 90
    while True:
        stats = await client.stats()
        now = len(soak.workers()), descriptors(soak.server)
        idle = stats["workers"] == 2 and not stats["in_flight"]
        if (idle and now[0] <= before[0] and now[1] <= before[1]) or time.monotonic() > end:
            return now
        await asyncio.sleep(0.5)


async def run(process: subprocess.Popen[bytes], found: dict[str, str], minutes: float, seed: int) -> list[list[str]]:
    ports = [int(found[door].rpartition(":")[2]) for door in ("address", "http")]
    soak = Soak(process.pid, ports[0], ports[1], seed)
    cuttable = [Cuttable(port) for port in ports]
    zmq_port, http_port = [await one.listen() for one in cuttable]
    async with (
        EnvClient(found["address"]) as direct,
        EnvClient(f"tcp://127.0.0.1:{zmq_port}") as cut,
        TaskServerClient(f"http://127.0.0.1:{http_port}") as http,
    ):
        await asyncio.sleep(1.0)
        before = len(soak.workers()), descriptors(process.pid)
        await fill_books(direct, http)
        measuring = asyncio.create_task(soak.measure())
        load = [soak.pull(cut if number % 2 else direct) for number in range(PULLING)]
        load += [soak.play(http) for _ in range(PLAYING)]
        under_way = asyncio.gather(*load)
        await soak.inject(time.monotonic() + 60 * minutes, cuttable)
        measuring.cancel()
        soak.over = True
        await asyncio.wait_for(under_way, 300)
        for one in cuttable:
            one.cut()
        stats = await direct.stats()
        info = await direct.info()
    async with EnvClient(found["address"]) as client:
        after = await settle(soak, client, (before[0], before[1] + 2))
    kept_stopped = len(soak.stopped.intersection(soak.workers()))
    third = len(soak.memory) // 3
    first, last = statistics.median(soak.memory[:third]), statistics.median(soak.memory[-third:])
    missing = sorted(set(range(info.cursor)) - set(soak.given))
    twice = sorted({index for seen in (soak.given, soak.finished) for index, times in seen.items() if times > 1})
    unanswered = sorted(set(soak.given) - set(soak.finished) - soak.ended_with_worker)

    def row(what: str, value: object, good: bool) -> list[str]:
        return [what, str(value), "ok" if good else "WRONG"]

    rows = [row(f"faults: {name}", count, True) for name, count in soak.faults.items()]
    rows += [row(f"told to clients: {name}", count, True) for name, count in soak.refused.items()]
    rows += [
        row("workers replaced", stats["replaced_workers"], stats["replaced_workers"] > 0),
        row("workers stopped for good and still there", kept_stopped, not kept_stopped),
        row("tasks given out", len(soak.given), len(soak.given) > 0),
        row("rollouts and episodes finished", sum(soak.finished.values()), True),
        row("episodes whose worker was killed, and told so", len(soak.ended_with_worker), True),
        row("draws that nobody got", missing[:10] or 0, not missing),
        row("tasks given out or finished twice", twice[:10] or 0, not twice),
        row("tasks without an answer", unanswered[:10] or 0, not unanswered),
        row("answers that were wrong", soak.wrong[:3] or 0, not soak.wrong),
        row("memory, first and last third", f"{first:.0f} MB, {last:.0f} MB", last <= first * GROWTH + GROWTH_MB),
        row("workers, before and after", f"{before[0]}, {after[0]}", after[0] == before[0]),
        row("descriptors, before and after", f"{before[1]}, {after[1]}", after[1] <= before[1] + 2),
    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults (10, at most 120)")
    parser.add_argument("--seed", type=int, default=0, help="of what is chosen at random (0)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        Path(folder, "soak.py").write_text(TASKSET)
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            doors = [f"tcp://127.0.0.1:{one.getsockname()[1]}", f"127.0.0.1:{other.getsockname()[1]}"]
        options = ["--zmq", doors[0], "--http", doors[1], "-w", "2", "-m", "scripted:gold", "--state", "state"]
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "treetune", "serve", "soak.py:Soak", *options, "--json"],
                stdout=subprocess.PIPE, stderr=log, cwd=folder, env={**os.environ, "TMPDIR": str(temporary)},
            )  # fmt: skip
        try:
            rows = asyncio.run(run(process, read_ready(process), min(asked.minutes, 120.0), asked.seed))
            process.terminate()
            code = process.wait(60)
            left = [entry.name for entry in temporary.iterdir()]
            rows.append(["exit code of the server", str(code), "WRONG" if code else "ok"])
            rows.append(["temporary files left", str(left or 0), "WRONG" if left else "ok"])
        finally:
            process.kill()
            process.wait()
            said = Path(folder, "log").read_text(errors="replace")
    width = max(len(row[0]) for row in rows)
    for what, value, verdict in rows:
        print(f"{what:<{width}}  {value:>14}  {verdict}")
    if any(row[2] == "WRONG" for row in rows):
        print("the server's last lines:", *said.splitlines()[-30:], sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
