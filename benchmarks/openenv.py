"""What a step over OpenEnv's WebSocket costs, beside OpenEnv's own server; and the memory of sessions that are held.

    python -m benchmarks.openenv [step] [sessions] [--others PYTHON] [--repeat N]

Both serve an echo environment, synchronous and asynchronous, to the same raw clients, turn by turn in one run.
`--others` names the Python of an environment that has `openenv`; without one theirs is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.http_load import WebSocket, play
from benchmarks.http_others import has, other
from benchmarks.http_steps import cpu_of
from benchmarks.measure import Cost, memory_of, read_ready, show

SESSIONS, STEPS = 64, 16_000
HELD = 2048
BOUNDS = {"sync": 0.7, "async": 1.0}
"""Of its CPU, at most."""

OURS = """
from treetune import Environment, Step, Task, Taskset
class Async(Environment):
    async def start(self): return "ready"
    async def step(self, action): return Step(action.text, reward=0.1)
    async def close(self): return None
class Sync(Environment):
    def start(self): return "ready"
    def step(self, action): return Step(action.text, reward=0.1)
    def close(self): return None
class AsyncEchoes(Taskset):
    INFINITE = True
    def task_at(self, index): return Task(prompt=str(index))
    def environment(self, task): return Async(task)
class SyncEchoes(AsyncEchoes):
    def environment(self, task): return Sync(task)
"""

THEIRS = '''
"""OpenEnv's own server with the environment of its template."""
import sys
import uvicorn
from uuid import uuid4
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class EchoAction(Action):
    message: str
class EchoObservation(Observation):
    echoed_message: str = ""
    message_length: int = 0
class Sync(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
    def _reset(self):
        self._state = State(episode_id=str(uuid4()), step_count=0)
        return EchoObservation(echoed_message="ready", done=False, reward=0.0)
    def _step(self, action):
        self._state.step_count += 1
        return EchoObservation(echoed_message=action.message, message_length=len(action.message), reward=0.1)
    def reset(self, seed=None, episode_id=None): return self._reset()
    def step(self, action): return self._step(action)
    @property
    def state(self): return self._state
class Async(Sync):
    async def reset_async(self, seed=None, episode_id=None): return self._reset()
    async def step_async(self, action): return self._step(action)
app = create_app(KIND, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=5000)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
'''


@contextmanager
def treetune(kind: str, *options: str) -> Iterator[tuple[int, int]]:
    """A `treetune serve --openenv`: its port and its process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "echo.py").write_text(OURS)
        target = f"echo.py:{kind.title()}Echoes"
        command = [sys.executable, "-m", "treetune", "serve", target, "--openenv", ":0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder)
        try:
            yield int(read_ready(process)["openenv"].rpartition(":")[2]), process.pid
        finally:
            process.kill()
            process.wait()


class Contestant:
    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name, self._port, self._pid = name, port, pid
        self.costs: list[Cost] = []
        play(port, SESSIONS, 20, WebSocket)  # warm

    def measure(self, steps: int) -> None:
        each = steps // SESSIONS
        cpu, began = cpu_of([self._pid]), time.perf_counter()
        play(self._port, SESSIONS, each, WebSocket)
        wall = time.perf_counter() - began
        self.costs.append(Cost((cpu_of([self._pid]) - cpu) / each / SESSIONS, wall / each / SESSIONS))

    @property
    def best(self) -> Cost:
        return min(self.costs)


def measure_steps(others: str | None, repeat: int) -> None:
    for kind, bound in BOUNDS.items():
        with ExitStack() as running:
            name = f"OpenEnv step, {kind}: treetune serve --openenv"
            ours = Contestant(name, *running.enter_context(treetune(kind)))
            if others is None:
                ours.measure(STEPS)
                show(ours.name, ours.best)
                continue
            program = THEIRS.replace("KIND", kind.title())
            theirs = Contestant("openenv's own server", *running.enter_context(other(program, others)))
            for _ in range(repeat):
                ours.measure(STEPS)
                theirs.measure(STEPS)
            ratios = [a.cpu / b.cpu for a, b in zip(ours.costs, theirs.costs, strict=True)]
            note = f"{statistics.median(ratios):.2f} of its CPU ({min(ratios):.2f} to {max(ratios):.2f})"
            show(ours.name, ours.best, theirs.name, theirs.best, target=f"{bound} of its CPU", note=note)


def hold_sessions(port: int, count: int) -> list[socket.socket]:
    """Connects so many clients, each with an episode."""
    reset = b'{"type":"reset","data":{}}'
    held = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(WebSocket.first)
        while b"\r\n\r\n" not in client.recv(4096):
            pass
        client.sendall(bytes([0x81, 0x80 | len(reset), 0, 0, 0, 0]) + reset)
        assert b"observation" in client.recv(4096)
        held.append(client)
    return held


def measure_sessions(others: str | None) -> None:
    with ExitStack() as running:
        options = ("--max-episodes", "4096", "--episode-idle", "900")
        servers = {"treetune serve --openenv": running.enter_context(treetune("sync", *options))}
        if others is not None:
            servers["openenv's own server"] = running.enter_context(other(THEIRS.replace("KIND", "Sync"), others))
        for name, (port, pid) in servers.items():
            play(port, SESSIONS, 20, WebSocket)
            time.sleep(1)
            before = memory_of(pid)
            held = hold_sessions(port, HELD)
            grown, threads = memory_of(pid) - before, len(os.listdir(f"/proc/{pid}/task"))
            print(f"{name}: {HELD} sessions in {grown:.0f} MB more, {threads} threads   target 100 MB", flush=True)
            for client in held:
                client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["step", "sessions", []], help="both where none is named")
    parser.add_argument("--others", default=sys.executable, help="the Python that has openenv")
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    others = asked.others if has(asked.others, "openenv") else None
    if others is None:
        print("no openenv there: left out")
    print(f"{os.cpu_count()} cores, {SESSIONS} sessions, {STEPS} steps a round, load {os.getloadavg()[0]:.1f}")
    if "step" in (asked.parts or ["step"]):
        measure_steps(others, asked.repeat)
    if "sessions" in (asked.parts or ["sessions"]):
        measure_sessions(others)


if __name__ == "__main__":
    main()
