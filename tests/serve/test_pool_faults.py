"""What a bad task or a dead worker may cost: itself, and nothing of the server or of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from raising import raises_code
from serving import GOLD, Dear, Numbers, Slow, mark, pids, serving, until

from treetune import Environment, Step
from treetune.serve.errors import WorkerLost
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.pool import workers
from treetune.serve.pool.engines import ScratchFolder
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def get(address):
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read()


def post(address, index):
    body = json.dumps({"task_index": index}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body), timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


@pytest.fixture
def marks(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))
    return tmp_path


class Opens(Environment):
    def start(self):
        if self.task.idx == 57:
            os._exit(1)
        return "go on"

    def step(self, action):
        return Step("and on", reward=1.0, done=action.text == "stop")


class Opening(Numbers):
    """The environment of task 57 ends its worker when it starts."""

    def environment(self, task):
        return Opens(task)


def test_a_task_that_ends_its_worker_at_the_start_ends_no_other_episode():
    async def play():
        doors = [ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))]
        async with serving(Opening(), workers=2, doors=doors) as server, EnvClient(server.address) as client:
            started = [await client.start(await client.sample()) for _ in range(6)]
            with raises_code("worker-lost", "task 57", "tried 2"):
                await client.start(await client.sample(57))
            # Now it is known, and tried where nobody else is.
            again = await asyncio.to_thread(post, f"{server.addresses['http']}/api/episode/start", 57)
            alive = 0
            for one in started:
                with contextlib.suppress(WorkerLost):
                    alive += (await client.step(one.episode, "stop", 0)).done
            more = await client.start(await client.sample())
            return again["error"], alive, (await client.step(more.episode, "stop", 0)).done

    again, alive, done = run(play())
    assert re.search(r"task 57 of .*: open was tried 2 times alone", again)
    assert (alive, done) == (6, True)  # none had been stepped: those of the dead worker were started anew


class DearPoison(Dear):
    def task_at(self, index):
        if index == 905:
            os._exit(1)
        return super().task_at(index)


def test_a_task_that_ends_its_worker_when_it_is_made_is_told_by_name():
    async def draw():
        async with serving(DearPoison(), workers=1) as server, EnvClient(server.address) as client:
            asked = (client.sample(index) for index in range(900, 910))
            return await asyncio.gather(*asked, return_exceptions=True)

    results = run(draw())
    assert [idx for idx, result in enumerate(results) if isinstance(result, Exception)] == [5]
    assert "task 905: make was tried 2 times alone" in str(results[5])


class HangsOnce(Numbers):
    async def reward(self, task, answer):
        if mark(f"begun-{task.idx}"):
            await asyncio.sleep(600)
        return 1.0


def test_what_a_worker_leaves_undone_when_it_ends_is_done_by_another(marks):
    async def play():
        async with serving(HangsOnce(), workers=2) as server, EnvClient(server.address) as client:
            running = asyncio.create_task(client.run_rollout(await client.sample()))
            await until((marks / "begun-0").exists)
            for member in server.host.workers.members.values():
                if member.calls:
                    member.messages.put(b"end")  # as one does that lost its broker, or is let go
            return await running

    assert run(play()).reward == 1.0
    assert len(set((marks / "begun-0").read_text().split())) == 2


class HoldsAll(Numbers):
    """Task 13 lets no other thread of its worker run."""

    def reward(self, task, answer):
        time.sleep(0.3)
        if task.idx == 13:
            re.match(r"(a+)+$", "a" * 60 + "b")
        return 1.0


class BlocksAtStart(Environment):
    async def start(self):
        await asyncio.sleep(0.3)
        if self.task.idx == 13:
            time.sleep(600)  # noqa: ASYNC251
        return ""

    def step(self, action):
        return Step("", reward=1.0, done=True)


class StartBlocks(Numbers):
    def environment(self, task):
        return BlocksAtStart(task)


@pytest.mark.thorough
@pytest.mark.parametrize("taskset", [HoldsAll, StartBlocks])
def test_whatever_blocks_a_worker_takes_no_other_task_with_it(taskset):
    async def play():
        pool = {"silent_seconds": 2.0}
        async with serving(taskset(), workers=2, pool=pool) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(20)]
            return await asyncio.gather(*(client.run_rollout(task) for task in tasks), return_exceptions=True)

    results = run(play())
    assert [idx for idx, result in enumerate(results) if isinstance(result, Exception)] == [13]


class HeldPickle(Slow):
    """To pickle it a second time takes until the file `go` is there, or very long."""

    def __getstate__(self):
        end = time.monotonic() + 60
        if not mark("pickled"):
            while not Path(os.environ["TREETUNE_TEST_MARKS"], "go").exists() and time.monotonic() < end:
                time.sleep(0.01)
        return self.__dict__


def test_a_worker_is_replaced_without_pickling_the_taskset_again_while_health_is_answered(marks):
    async def replace():
        doors = [ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))]
        async with (
            serving(HeldPickle(), workers=2, doors=doors) as server,
            EnvClient(server.address) as client,
        ):
            tasks = [await client.sample() for _ in range(8)]
            runs = [asyncio.create_task(client.run_rollout(task)) for task in tasks]
            os.kill(pids(server)[0], signal.SIGKILL)
            await until(lambda: server.host.workers.replaced)
            assert await asyncio.to_thread(get, f"{server.addresses['http']}/api/health")
            (marks / "go").touch()
            traces = await asyncio.gather(*runs)
            await until(lambda: server.host.stats()["workers"] == 2)
            return [trace.reward for trace in traces]

    assert run(replace()) == [1.0] * 8
    assert len((marks / "pickled").read_text().split()) == 1


class FailsLater(Numbers):
    """No worker can have it while the file `closed` is there."""

    def __setstate__(self, state):
        if (Path(os.environ["TREETUNE_TEST_MARKS"]) / "closed").exists():
            raise RuntimeError("not now")
        self.__dict__.update(state)


def test_workers_that_cannot_be_started_are_told_and_tried_again(marks, monkeypatch):
    monkeypatch.setattr(workers, "_MOST_FAILURES", 2)

    async def fail():
        async with serving(FailsLater(), workers=1) as server, EnvClient(server.address) as client:
            task = await client.sample()
            (marks / "closed").touch()
            os.kill(pids(server)[0], signal.SIGKILL)
            await until(lambda: server.host.workers.replaced)
            with raises_code("worker-lost"):
                await client.run_rollout(task)
            (marks / "closed").unlink()
            await until(lambda: server.host.stats()["workers"] == 1)
            return (await client.run_rollout(task)).reward

    assert run(fail()) == 1.0


def test_a_process_that_cannot_be_started_now_is_started_later(monkeypatch):
    from treetune.serve.pool.engines import ProcessEngine

    real, refused = ProcessEngine.start, []

    def start(self, spec, on_exit):
        if spec.identity == b"worker-2":
            refused.append(spec)
            raise OSError(24, "Too many open files")
        return real(self, spec, on_exit)

    monkeypatch.setattr(ProcessEngine, "start", start)

    async def replace():
        async with serving(Numbers(), workers=1) as server, EnvClient(server.address) as client:
            os.kill(pids(server)[0], signal.SIGKILL)
            await until(lambda: refused)
            return (await client.run_rollout(await client.sample())).reward

    assert run(replace()) == 1.0


# What is left on the disk, and who is ended where memory runs out


class Litters(Numbers):
    """Each rollout leaves a temporary folder behind, and says where."""

    def reward(self, task, answer):
        folder = tempfile.mkdtemp()
        Path(os.environ["TREETUNE_TEST_MARKS"], f"made-{task.idx}").write_text(folder)
        return 1.0


def test_temporary_files_go_with_a_killed_worker_which_the_kernel_would_take_first(marks):
    async def litter():
        async with serving(Litters(), workers=1) as server, EnvClient(server.address) as client:
            await client.run_rollout(await client.sample())
            made = Path((marks / "made-0").read_text())
            (pid,) = pids(server)
            adjusted = Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
            assert made.exists()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not made.exists())
            await until(lambda: server.host.stats()["workers"] == 1)
            await client.run_rollout(await client.sample())
            return adjusted, Path((marks / "made-1").read_text())

    adjusted, last = run(litter())
    assert adjusted == "500"
    assert not last.exists()


@pytest.fixture
def temporary(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def test_what_a_killed_server_left_behind_is_removed_by_the_next(temporary):
    program = (
        "import os, signal\nfrom treetune.serve.pool.engines import ScratchFolder\n"
        "folder = ScratchFolder()\n(folder.path / 'taskset.pickle').write_text('much')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    (left,) = temporary.iterdir()
    assert (left / "taskset.pickle").exists()
    first = ScratchFolder()
    second = ScratchFolder()
    assert sorted(temporary.iterdir()) == sorted([first.path, second.path])
    first.close()
    second.close()
    assert not list(temporary.iterdir())


def test_a_server_that_cannot_be_set_up_leaves_no_folder(temporary):
    class Local(Numbers):
        pass

    async def start():
        async with serving(Local(), workers=1, models=GOLD):
            pass

    with pytest.raises(Exception, match="cannot be sent to a worker"):
        run(start())
    assert not list(temporary.iterdir())


# A step that ends its worker


class Fatal(Environment):
    """A step with `die` ends its worker."""

    def start(self):
        (Path(os.environ["TREETUNE_TEST_MARKS"]) / f"pid-{self.task.idx}").write_text(str(os.getpid()))
        return f"task {self.task.idx}"

    def step(self, action):
        if action.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return Step("go on", reward=1.0, done=action.text == "stop")


class Fatals(Numbers):
    def environment(self, task):
        return Fatal(task)


class Moody(Fatal):
    """Shows something else each time."""

    def start(self):
        super().start()
        return os.urandom(8).hex()


class Moods(Fatals):
    def environment(self, task):
        return Moody(task)


def pid_of(marks, index):
    return int((marks / f"pid-{index}").read_text())


@contextlib.asynccontextmanager
async def both_doors(taskset, **options):
    doors = [ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))]
    async with serving(taskset, doors=doors, **options) as server, EnvClient(server.address) as client:
        yield server, client


def step_of(server, episode, action, turn=0):
    """The status and the answer of a step over HTTP."""
    body = json.dumps({"episode_id": episode, "action": action, "turn": turn}).encode()
    try:
        with urllib.request.urlopen(server.addresses["http"] + "/api/episode/step", body, timeout=60) as answer:
            return 200, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def start_of(server, index):
    return post(server.addresses["http"] + "/api/episode/start", index)


def test_a_step_that_ends_its_worker_is_named_and_episodes_without_a_step_go_on(marks):
    async def play():
        async with both_doors(Fatals(), workers=2) as (server, _):
            started = [(await asyncio.to_thread(start_of, server, index))["episode_id"] for index in range(40)]
            killer = 7
            mates = [n for n in range(40) if n != killer and pid_of(marks, n) == pid_of(marks, killer)]
            stepped = mates[0]
            assert (await asyncio.to_thread(step_of, server, started[stepped], "hello"))[0] == 200
            dead = await asyncio.to_thread(step_of, server, started[killer], "die")
            rest = {
                n: await asyncio.to_thread(step_of, server, started[n], "stop", int(n == stepped))
                for n in range(40)
                if n != killer
            }
            return mates, stepped, dead, rest

    mates, stepped, dead, rest = run(play())
    assert len(mates) > 10
    assert (dead[0], dead[1]["kind"]) == (410, "worker_lost")
    assert "a step of task 7 of " in dead[1]["error"]
    lost = {n: answer for n, (status, answer) in rest.items() if status != 200}
    assert list(lost) == [stepped]  # its environment had been changed by a step
    assert "a step of task 7 of " in lost[stepped]["error"]


def test_a_task_that_has_ended_a_worker_is_started_again_on_one_of_its_own(marks):
    async def play():
        async with both_doors(Fatals(), workers=1) as (server, _):
            first = (await asyncio.to_thread(start_of, server, 7))["episode_id"]
            await asyncio.to_thread(step_of, server, first, "die")
            again = (await asyncio.to_thread(start_of, server, 7))["episode_id"]
            others = [(await asyncio.to_thread(start_of, server, n))["episode_id"] for n in range(3)]
            apart = pid_of(marks, 7) not in {pid_of(marks, n) for n in range(3)}
            for n in range(3):
                await asyncio.to_thread(step_of, server, others[n], "hello")
            dead = await asyncio.to_thread(step_of, server, again, "die")
            alive = [await asyncio.to_thread(step_of, server, one, "stop", 1) for one in others]
            # What ends well there may be with others again.
            third = (await asyncio.to_thread(start_of, server, 7))["episode_id"]
            ended = await asyncio.to_thread(step_of, server, third, "stop")
            return apart, dead, alive, ended, dict(server.host.workers.suspected)

    apart, dead, alive, ended, suspected = run(play())
    assert apart
    assert dead[1]["kind"] == "worker_lost"
    assert [status for status, _ in alive] == [200] * 3
    assert ended[0] == 200
    assert suspected == {}


def test_an_episode_that_would_begin_differently_is_not_started_anew(marks):
    async def play():
        async with both_doors(Moods(), workers=1) as (server, _):
            one, two = [(await asyncio.to_thread(start_of, server, n))["episode_id"] for n in (1, 2)]
            await asyncio.to_thread(step_of, server, one, "die")
            return await asyncio.to_thread(step_of, server, two, "hello")

    status, answer = run(play())
    assert (status, answer["kind"]) == (410, "worker_lost")
    assert "after the restart it shows something else" in answer["error"]


def test_a_pull_client_is_told_which_task_ended_the_worker(marks):
    async def play():
        async with both_doors(Fatals(), workers=1) as (_, client):
            started = await client.start(await client.sample(3))
            with raises_code("worker-lost", "task 3"):
                await client.step(started.episode, "die", 0)

    run(play())
