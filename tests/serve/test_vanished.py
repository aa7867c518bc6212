"""Clients that vanish and workers that are killed, with real sandboxes: nothing of them is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
import uuid
from pathlib import Path

import aiohttp
import pytest
from serve_process import resident, serve

from treetune.sandbox import probe
from treetune.sandbox.limits import CgroupParent

pytestmark = pytest.mark.slow
TASKSET = """
from treetune import Environment, Step, Taskset
from treetune.tasksets.shell.environment import OSInteractionEnvironment, OSTask
from treetune.tasksets.shell.sample import OSSample, SampleEvaluation

class Talks(Environment):
    def step(self, action):
        return Step(f"you said {action.text}")

class Both(Taskset[OSTask]):
    '''Every twelfth task is a machine, the others only talk.'''
    INFINITE = True
    def task_at(self, index):
        sample = OSSample(description="Do what you like.", evaluation=SampleEvaluation(match="3"))
        info = {"machine": index % 12 == 0, "command_seconds": 600, "max_turns": 50}
        return OSTask(prompt="Do what you like.", sample=sample, extra_info=info)
    def environment(self, task):
        return OSInteractionEnvironment(task) if task.extra_info["machine"] else Talks(task)
"""
SECONDS = 120
"""What anything here may take before it counts as hanging."""


@pytest.fixture
def both(tmp_path):
    capability = probe(shell=True)
    if not capability.available:
        pytest.skip(str(capability))
    cgroup_parent()
    (tmp_path / "both.py").write_text(TASKSET)
    (tmp_path / "tmp").mkdir()
    return str(tmp_path / "both.py") + ":Both"


class Traces:
    """What a server and its workers have of this machine."""

    def __init__(self, pid: int, folder: Path) -> None:
        family = descendants(pid)
        self.processes = len(family)
        self.files = sum(len(os.listdir(f"/proc/{member}/fd")) for member in [pid, *workers(pid)])
        self.temporary = sorted(os.listdir(folder / "tmp"))
        mounted = Path("/proc/self/mountinfo").read_text().splitlines()
        self.mounts = [line for line in mounted if any(name in line for name in ("shown", "merged", "newroot"))]
        self.cgroups = len(cgroups([pid, *family]))
        self.megabytes = sum(resident(member) for member in [pid, *workers(pid)])

    def __repr__(self) -> str:
        return str(vars(self))


def parents() -> dict[int, int]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    above = parents()
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in above.items() if parent in fresh]
        found += fresh
    return found


def workers(pid: int) -> list[int]:
    """Python processes of the server itself, not sandboxes that they have started."""
    return [child for child, parent in parents().items() if parent == pid and b"spawn_main" in command_line(child)]


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def marked(marker: str) -> list[int]:
    return [pid for pid in parents() if marker.encode() in command_line(pid)]


@functools.cache
def cgroup_parent() -> CgroupParent | None:
    return CgroupParent.find()  # once: it also removes what was left


def cgroups(pids: list[int]) -> list[str]:
    parent = cgroup_parent()
    if parent is None:
        return []
    return [entry.name for pid in pids for entry in Path(parent.path).glob(f"treetune-{pid}-*")]


def bash(script: str) -> str:
    return f"Act: bash\n\n```bash\n{script}\n```"


def restless(marker: str) -> str:
    """Leaves processes of several kinds, and files."""
    sleeper = f"bash -c 'exec -a {marker} sleep 1000'"
    return f"{sleeper} & setsid nohup {sleeper} >/dev/null 2>&1 & seq 100000 > /tmp/x; cp -r /etc /srv/; sleep 0.2"


async def until(condition) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, **body):
        async with self.session.post(f"{self.url}/api/episode/{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def start(self, index: int) -> str:
        status, said = await self.post("start", task_index=index)
        assert status == 200, said
        return said["episode_id"]

    async def alive(self) -> int:
        async with self.session.get(f"{self.url}/api/health") as reply:
            return (await reply.json())["episodes"]


@contextlib.asynccontextmanager
async def client(url: str):
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    connector = aiohttp.TCPConnector(limit=100)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Client(session, url)


async def vanish(url: str, index: int, marker: str) -> None:
    """Start an episode, begin a step, and cut the connection in the middle of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    body = json.dumps({"task_index": index}).encode()
    writer.write(
        b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    episode = json.loads(await reader.readexactly(size))["episode_id"]
    command = [restless(marker), f"{restless(marker)}; sleep 2", "seq 1000000", "exec sleep 1"][index // 12 % 4]
    body = json.dumps({"episode_id": episode, "action": bash(f"timeout 3 bash -c {json.dumps(command)}")}).encode()
    cut = len(body) // 2 if index % 5 == 0 else len(body)  # some in the middle of what they say
    head = b"POST /api/episode/step HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body[:cut])
    await writer.drain()
    await asyncio.sleep(index % 7 / 20)
    writer.transport.abort()


async def crowd(url: str, indices, marker: str) -> None:
    gate = asyncio.Semaphore(40)

    async def one(index: int) -> None:
        async with gate:
            await vanish(url, index, marker)

    await asyncio.gather(*(one(index) for index in indices))
    assert marked(marker)  # what is to be gone was there
    async with client(url) as caller:
        async with asyncio.timeout(2 * SECONDS):
            while await caller.alive():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    await until(lambda: not marked(marker))


def test_a_thousand_clients_that_vanish_leave_nothing_behind(tmp_path, both):
    marker = f"marker-{uuid.uuid4().hex}"
    options = ["--http", ":0", "-w", "2", "--max-episodes", "2000", "--episode-idle", "2"]
    with serve(tmp_path, both, *options, TMPDIR=str(tmp_path / "tmp")) as server:
        url, pid = server.report["http"], server.process.pid
        asyncio.run(crowd(url, range(120), marker))  # both workers are warm then
        before = settled(pid, tmp_path)
        asyncio.run(crowd(url, range(1000), marker))
        deadline = time.monotonic() + SECONDS
        while (after := Traces(pid, tmp_path)).processes > before.processes and time.monotonic() < deadline:
            time.sleep(0.2)  # warm sandboxes that are just being started
        print(before, after)
        assert after.processes <= before.processes
        assert after.files <= before.files + 8
        assert after.temporary == before.temporary
        assert after.mounts == before.mounts == []
        assert after.cgroups <= before.cgroups
        assert after.megabytes < before.megabytes + 40
        assert asyncio.run(played(url)) == ["hello", "you said hello"]
        family = [pid, *descendants(pid)]
        told = server.stop()
        assert server.process.returncode == 0
    assert "Traceback" not in told
    asyncio.run(until(lambda: not [member for member in family if os.path.exists(f"/proc/{member}")]))
    assert cgroups(family) == []
    assert os.listdir(tmp_path / "tmp") == []


def settled(pid: int, tmp_path: Path) -> Traces:
    """The traces of a server once three seconds changed nothing: on a busy machine warm sandboxes take a while."""
    deadline, seen = time.monotonic() + SECONDS, [Traces(pid, tmp_path)]
    while len(seen) < 4 and time.monotonic() < deadline:
        time.sleep(1)
        now = Traces(pid, tmp_path)
        seen = [*seen, now] if now.processes == seen[-1].processes else [now]
    return seen[-1]


async def played(url: str) -> list[str]:
    """What a machine and an episode that only talks say."""
    async with client(url) as caller:
        said = []
        for index, action in ((0, bash("echo hello")), (1, "hello")):
            episode = await caller.start(index)
            status, step = await caller.post("step", episode_id=episode, action=action)
            assert status == 200, step
            said.append(step["observation"]["content"])
            await caller.post("cancel", episode_id=episode)
        return said


def test_a_worker_that_is_killed_takes_its_sandboxes_along_and_its_callers_are_told(tmp_path, both):
    marker = f"marker-{uuid.uuid4().hex}"
    with serve(tmp_path, both, "--http", ":0", "-w", "2", TMPDIR=str(tmp_path / "tmp")) as server:
        told = asyncio.run(killed(server.report["http"], server.process.pid, marker))
        assert marked(marker) == []
        family = [server.process.pid, *descendants(server.process.pid)]
        server.stop(signal.SIGINT)
    assert cgroups([*family, told["victim"]]) == []
    assert os.listdir(tmp_path / "tmp") == []


async def killed(url: str, pid: int, marker: str) -> dict[str, int]:
    async with client(url) as caller:
        episodes = await asyncio.gather(*(caller.start(index) for index in range(200)))
        assert await caller.alive() == 200
        machines = episodes[::12]
        for episode in machines:
            action = bash(restless(marker).replace(marker, f"{marker}-{episode}"))
            assert (await caller.post("step", episode_id=episode, action=action, turn=0))[0] == 200
        both_workers = workers(pid)
        assert len(both_workers) == 2
        homes = {episode: home(f"{marker}-{episode}", both_workers) for episode in machines}
        victim = homes[machines[0]]
        assert set(homes.values()) == set(both_workers)
        # Steps under way when it happens: on the worker that dies, and on the other.
        waiting = {
            episode: asyncio.create_task(
                caller.post("step", episode_id=episode, action=bash(f"bash -c 'exec -a {marker}-busy sleep 1000'"))
            )
            for episode in machines
            if homes[episode] == victim
        }
        await until(lambda: len(marked(f"{marker}-busy")) >= len(waiting))
        os.kill(victim, signal.SIGKILL)
        for status, said in await asyncio.gather(*waiting.values()):
            assert (status, said["kind"]) == (410, "worker_lost"), said
        answers = await asyncio.gather(
            *(caller.post("step", episode_id=episode, action=bash("echo on"), turn=1) for episode in machines)
        )
        for episode, (status, said) in zip(machines, answers, strict=True):
            if homes[episode] == victim:
                assert (status, said["kind"]) == (410, "worker_lost"), said
                assert "worker" in said["error"]
            else:
                assert (status, said["observation"]["content"]) == (200, "on"), said
        others = [episode for episode in episodes if episode not in machines]
        answers = await asyncio.gather(*(caller.post("step", episode_id=one, action="hi", turn=0) for one in others))
        # None of them had a step, so those of the worker that died begin anew on another.
        assert {status for status, _ in answers} == {200}
        assert all(said["observation"]["content"] == "you said hi" for _, said in answers)
        await until(lambda: len(workers(pid)) == 2 and victim not in workers(pid))
        lost = {f"{marker}-{episode}" for episode in machines if homes[episode] == victim}
        await until(lambda: not any(map(marked, lost)))
        for episode in episodes:
            await caller.post("cancel", episode_id=episode)
        for index in range(
            0, 96, 12
        ):  # one after the other: each may have ended the worker, and needs a worker to itself
            episode = await caller.start(index)
            status, said = await caller.post("step", episode_id=episode, action=bash("echo back"), turn=0)
            assert (status, said["observation"]["content"]) == (200, "back")
            await caller.post("cancel", episode_id=episode)
        await until(lambda: not marked(marker))
        return {"victim": victim}


def home(marker: str, candidates: list[int]) -> int:
    """The worker that a process comes from."""
    above = parents()
    pid = marked(marker)[0]
    while pid not in candidates:
        pid = above[pid]
    return pid
