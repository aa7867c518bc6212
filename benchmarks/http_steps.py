"""What a step over HTTP costs: CPU of the server per request, requests/s, and the memory of live episodes.

    python -m benchmarks.http_steps [step] [episodes] [--others PYTHON]

Beside ours, in the same run and turn by turn: FastAPI + pydantic with the same five endpoints, bare ASGI, and OpenEnv's
echo environment. What `fastapi` and `openenv-core` need may clash with the rest: `--others` names the Python of an
environment that has them; those that are missing are left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.http_load import PROCESSES, Caller, WebSocket, play
from benchmarks.http_others import BARE, FASTAPI, OPENENV, PLAIN_FASTAPI, has, other
from benchmarks.measure import Cost, children_of, memory_of, read_ready, show

STEPS = 10_000
CONCURRENT = 32
ROUNDS = 3

ECHO = """
from treetune import Contract, Environment, Step, Task, Taskset
class Echo(Environment):
    CONTRACT = Contract(max_turns=1_000_000)
    async def start(self): return "say something"
    async def step(self, action): return Step(action.text, reward=0.0)
    async def close(self): return None
class Echoes(Taskset):
    INFINITE = True
    def task_at(self, index): return Task(prompt=str(index))
    def environment(self, task): return Echo(task)
"""


@contextmanager
def treetune(*options: str) -> Iterator[tuple[int, int]]:
    """A `treetune serve --http` of a trivial environment: its port and its process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "echo.py").write_text(ECHO)
        command = [sys.executable, "-m", "treetune", "serve", "echo.py:Echoes", "--http", ":0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder)
        try:
            yield int(read_ready(process)["http"].rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            time.sleep(0.2)
            process.kill()
            process.wait()


# Steps


class Measured(NamedTuple):
    cpu: float
    wall: float
    callers: float
    """How busy the callers were, of 1."""


class Contestant:
    def __init__(self, name: str, port: int, pid: int, over: Callable[..., Caller] = Caller, share: float = 1) -> None:
        self.name, self._port, self._pid, self._over = name, port, pid, over
        self._each = max(10, int(STEPS * share) // CONCURRENT)
        self.best = Measured(float("inf"), float("inf"), 0.0)
        play(port, CONCURRENT, 30, over)  # warm

    def measure(self) -> None:
        pids = [self._pid, *children_of(self._pid)]
        number = self._each * CONCURRENT
        cpu, callers, began = cpu_of(pids), _cpu_of_callers(), time.perf_counter()
        play(self._port, CONCURRENT, self._each, self._over)
        wall, cpu, callers = time.perf_counter() - began, cpu_of(pids) - cpu, _cpu_of_callers() - callers
        found = Measured(cpu / number, wall / number, callers / wall / PROCESSES)
        self.best = Measured(min(self.best.cpu, found.cpu), *min(self.best[1:], found[1:]))

    def show(self, beside: Contestant | None = None, target: str = "") -> None:
        cpu, wall, callers = self.best
        note = f"{1 / wall:,.0f} steps/s, callers {callers:.0%} busy"
        other = ("", None) if beside is None else (beside.name, Cost(*beside.best[:2]))
        show(self.name, Cost(cpu, wall), *other, target=target, note=note)


def cpu_of(pids: list[int]) -> float:
    """CPU seconds so far, those of threads that have ended included."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(found[11]) + int(found[12]) for found in fields) / os.sysconf("SC_CLK_TCK")


def _cpu_of_callers() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # servers still run, and do not count yet
    return used.ru_utime + used.ru_stime


def steps(others: str) -> None:
    with ExitStack() as running:
        lone = Contestant("step: treetune serve --http", *running.enter_context(treetune()))
        pool = Contestant(
            "step: treetune serve --http -w 2 (all processes)", *running.enter_context(treetune("-w", "2"))
        )
        beside = [
            Contestant("bare ASGI + msgspec: the least there is", *running.enter_context(other(BARE, sys.executable)))
        ]
        if has(others, "fastapi"):
            fast, plain = (running.enter_context(other(program, others)) for program in (FASTAPI, PLAIN_FASTAPI))
            beside.append(Contestant("FastAPI + pydantic, uvloop and httptools", *fast))
            beside.append(Contestant("FastAPI + pydantic, as it comes", *plain, share=0.3))
        else:
            print("no fastapi there: left out")
        if has(others, "openenv"):
            echo = running.enter_context(other(OPENENV, others))
            beside.append(Contestant("OpenEnv's echo environment, WebSocket", *echo, over=WebSocket, share=0.3))
        else:
            print("no openenv-core there: left out")
        for _ in range(ROUNDS):
            for contestant in (lone, pool, *beside):
                contestant.measure()
        for contestant in beside:
            lone.show(contestant, "120 us, 7,000/s")
        pool.show(target="240 us")


# Memory


def memory(pids: list[int]) -> float:
    return sum(map(memory_of, pids))


def live_episodes(count: int = 5000) -> None:
    """One worker; then the same twice as many, abandoned, in three rounds: what a round leaves the next uses again."""
    idle = 8
    with treetune("-w", "1", "--max-episodes", str(4 * count), "--episode-idle", str(idle)) as (port, pid):
        pids = [pid, *children_of(pid)]
        play(port, 10, 5)
        before, began = memory(pids), time.perf_counter()
        started(port, count)
        wall = time.perf_counter() - began
        print(f"{count} episodes alive, started in {wall:.1f} s: {memory(pids) - before:6.1f} MB   target 200 MB")
        time.sleep(idle + 3)
        print(f"  after they expired: {memory(pids) - before:6.1f} MB beyond the start")
        for number in range(3):
            started(port, 2 * count)
            alive = memory(pids) - before
            time.sleep(idle + 3)
            left = memory(pids) - before
            print(f"  {2 * count} more, round {number + 1}: alive {alive:6.1f} MB, expired {left:6.1f} MB")


def started(port: int, count: int, at_once: int = 500) -> None:
    for _ in range(count // at_once):
        play(port, at_once, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["step", "episodes", []], help="both where none is named")
    parser.add_argument("--others", default=sys.executable, help="the Python that has fastapi and openenv-core")
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {CONCURRENT} concurrent, best of {ROUNDS}, load {os.getloadavg()[0]:.1f}")
    if "step" in (asked.parts or ["step"]):
        steps(asked.others)
    if "episodes" in (asked.parts or ["episodes"]):
        live_episodes()


if __name__ == "__main__":
    main()
