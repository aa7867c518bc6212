"""What a step over HTTP costs: CPU of the server per request and requests/s, beside FastAPI with pydantic.

Run: python benchmarks/http_steps.py [step|bare|pool|episodes|fastapi]
`fastapi` needs fastapi and pydantic in the same environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve import children_of, cpu_of, memory_of

STEPS = 10_000
CONCURRENT = 32

ECHO = """
from treetune import Environment, Step, Task, Taskset
class Echo(Environment):
    async def start(self): return "say something"
    async def step(self, action): return Step(action.text, reward=0.0)
    async def close(self): return None
class Echoes(Taskset):
    INFINITE = True
    def task_at(self, index): return Task(prompt=str(index))
    def environment(self, task): return Echo(task)
"""

FASTAPI = """
import sys, uuid
import uvicorn
from typing import Any
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
class Observation(BaseModel):
    type: str = "text"
    content: Any = ""
class Start(BaseModel):
    task_index: int | None = None
class Started(BaseModel):
    episode_id: str
    observation: Observation
    info: dict[str, Any] = {}
class Step(BaseModel):
    episode_id: str
    action: str | Observation
    turn: int | None = None
class Stepped(BaseModel):
    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = {}
app, episodes = FastAPI(), {}
@app.get("/api/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}
@app.post("/api/episode/start")
async def start(body: Start) -> Started:
    id = uuid.uuid4().hex
    episodes[id] = 0
    return Started(episode_id=id, observation=Observation(content="say something"))
@app.post("/api/episode/step")
async def step(body: Step) -> Stepped:
    if body.episode_id not in episodes:
        raise HTTPException(404)
    episodes[body.episode_id] += 1
    text = body.action if isinstance(body.action, str) else str(body.action.content)
    return Stepped(observation=Observation(content=text), reward=0.0, done=False)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
"""

BARE = """
import sys, msgspec, uvicorn
decode = msgspec.json.Decoder(dict).decode
async def app(scope, receive, send):
    body = decode((await receive())["body"])
    answer = {"episode_id": "e", "observation": {"type": "text", "content": body.get("action")}, "reward": 0.0}
    data = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, lifespan="off")
"""


# Servers


@contextmanager
def treetune(*options: str) -> Iterator[tuple[int, int]]:
    """A `treetune serve --http` of a trivial environment: its port and its process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "echo.py").write_text(ECHO)
        command = [sys.executable, "-m", "treetune", "serve", "echo.py:Echoes", "--http", ":0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder)
        assert process.stdout is not None
        try:
            lines = b""
            while not lines.endswith(b"}\n"):
                line = process.stdout.readline()
                assert line, "the server did not start"
                lines += line
            yield int(json.loads(lines)["http"].rpartition(":")[2]), process.pid
        finally:
            process.kill()
            process.wait()


@contextmanager
def other(program: str) -> Iterator[tuple[int, int]]:
    port = 5791
    process = subprocess.Popen([sys.executable, "-c", program, str(port)])
    try:
        for _ in range(200):
            time.sleep(0.05)
            assert process.poll() is None, "it could not start"
            try:
                asyncio.run(played(port, 1, 1))
                break
            except OSError:
                continue
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


# A client that costs little, so that the server is what is measured


class Connection(asyncio.Protocol):
    """One caller: the next request is sent when the last is answered."""

    def __init__(self, request: Callable[[bytes], bytes | None], done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send(b"")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            assert head.startswith(b"HTTP/1.1 200"), self._buffer
            self._buffer = b""
            self._send(body)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def _send(self, answer: bytes) -> None:
        request = self._request(answer)
        if request is None:
            self._done.set_result(None)
            self._transport.close()
        else:
            self._transport.write(request)


def posted(path: str, body: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def steps_of(count: int) -> Callable[[bytes], bytes | None]:
    """An episode of so many steps."""
    turn, id = -1, ""

    def request(answer: bytes) -> bytes | None:
        nonlocal turn, id
        if not answer:
            return posted("/api/episode/start", "{}")
        id = id or json.loads(answer)["episode_id"]
        turn += 1
        if turn == count:
            return None
        return posted("/api/episode/step", f'{{"episode_id":"{id}","action":"hello","turn":{turn}}}')

    return request


async def played(port: int, concurrent: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    ends = []
    for _ in range(concurrent):
        done = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda done=done: Connection(steps_of(count), done), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*ends)


def play(port: int, concurrent: int, count: int) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(played(port, concurrent, count))


# What is measured


def step_cost(what: str, port: int, pid: int, target: str = "") -> None:
    each = STEPS // CONCURRENT
    play(port, CONCURRENT, 50)
    best = (float("inf"), float("inf"))
    for _ in range(3):
        pids = [pid, *children_of(pid)]
        cpu, wall = cpu_of(pids), time.perf_counter()
        play(port, CONCURRENT, each)
        wall, cpu = time.perf_counter() - wall, cpu_of(pids) - cpu
        best = min(best, (cpu / (each * CONCURRENT), wall / (each * CONCURRENT)))
    print(f"{what:<44} {best[0] * 1e6:7.1f} us CPU a step {1 / best[1]:9,.0f} steps/s   {target}")


def live_episodes(count: int = 5000) -> None:
    with treetune("-w", "1", "--max-episodes", str(2 * count), "--episode-idle", "5") as (port, pid):
        pids = [pid, *children_of(pid)]
        before = sum(map(memory_of, pids))
        began = time.perf_counter()
        play(port, count // 10, 0)
        for _ in range(9):
            play(port, count // 10, 0)
        wall, alive = time.perf_counter() - began, sum(map(memory_of, pids))
        print(f"{count} episodes started in {wall:.1f} s: {alive - before:.1f} MB beyond the start   target 200 MB")
        time.sleep(7)
        print(f"{'after they expired':<44} {sum(map(memory_of, pids)) - before:.1f} MB beyond the start")


def main() -> None:
    chosen = set(sys.argv[1:]) or {"step", "bare", "pool", "episodes"}
    print(f"{os.cpu_count()} cores, {CONCURRENT} concurrent")
    if "step" in chosen:
        with treetune() as (port, pid):
            step_cost("treetune serve --http", port, pid, "target 120 us, 7,000/s")
    if "pool" in chosen:
        with treetune("-w", "2") as (port, pid):
            step_cost("treetune serve --http -w 2 (all processes)", port, pid, "target 240 us")
    if "fastapi" in chosen:
        with other(FASTAPI) as (port, pid):
            step_cost("FastAPI + pydantic, uvloop, httptools", port, pid)
    if "bare" in chosen:
        with other(BARE) as (port, pid):
            step_cost("bare ASGI + msgspec: the least there is", port, pid)
    if "episodes" in chosen:
        live_episodes()


if __name__ == "__main__":
    main()
