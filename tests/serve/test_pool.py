"""A pool of workers: one order however many there are, and no call without an answer whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import pytest
from raising import raises_code
from serving import (
    Blocks,
    Colours,
    Crashes,
    Dear,
    DearFew,
    Hangs,
    Numbers,
    Poison,
    Ranked,
    Slow,
    Stream,
    Talking,
    pids,
    served,
    serving,
    shuffled,
    until,
)

from treetune import Mixture, Task
from treetune.serve.errors import Cancelled, WorkerLost
from treetune.serve.pool import workers
from treetune.serve.pool.engines import ProcessEngine
from treetune.serve.zmq.client import EnvClient


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture
def marks(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))
    return tmp_path


TASKSETS = {
    "finite": lambda: shuffled(Colours),
    "infinite": Numbers,
    "generator": Stream,
    "mixture": lambda: Mixture.of([shuffled(Colours), Numbers()], [1, 2], seed=1),
}


@pytest.mark.parametrize("make", TASKSETS.values(), ids=TASKSETS)
@pytest.mark.quick_cases(2)
def test_a_pool_gives_the_order_of_the_process_and_runs_what_it_gave(make):
    async def draw():
        async with served(make(), workers=2) as client:
            tasks = await asyncio.gather(*(client.sample() for _ in range(20)))
            traces = await asyncio.gather(*(client.run_rollout(task) for task in tasks))
            return tasks, traces

    tasks, traces = run(draw())
    here = make()
    assert tasks == [here.at(index) for index in range(20)]
    assert [trace.task for trace in traces] == tasks
    assert {trace.reward for trace in traces} == {1.0}


@pytest.mark.thorough
def test_two_workers_unshuffled_give_each_of_six_tasks_once_and_steps_of_groups_repeat_no_task():
    async def train():
        async with served(Colours(), workers=2) as client:
            first = [(await client.sample()).idx for _ in range(6)]
        async with served(Numbers(), workers=2) as client:
            steps = []
            for _ in range(4):
                tasks = await asyncio.gather(*(client.sample() for _ in range(8)))
                runs = [client.run_rollout(task, rollout=number) for task in tasks for number in range(16)]
                steps += [trace.task.idx for trace in await asyncio.gather(*runs)]
        return first, steps

    first, steps = run(train())
    assert first == [0, 1, 2, 3, 4, 5]
    assert {idx: steps.count(idx) for idx in set(steps)} == dict.fromkeys(range(32), 16)


def test_a_finite_taskset_is_loaded_by_the_broker_alone(marks):
    async def loads():
        async with served(Mixture.of([Loads(), Numbers()], [1, 1]), workers=2) as client:
            tasks = [await client.sample() for _ in range(12)]
            await asyncio.gather(*(client.run_rollout(task) for task in tasks))

    run(loads())
    assert len(set((marks / "loaded").read_text().split())) == 1


class Loads(Colours):
    def load_tasks(self):
        from serving import mark

        mark("loaded")
        return list(super().load_tasks())


def test_work_is_spread_over_the_workers(marks):
    async def spread():
        async with serving(Hangs(), workers=3) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(9)]
            runs = [asyncio.create_task(client.run_rollout(task)) for task in tasks]
            await until(lambda: len(list(marks.glob("begun-*"))) == 9)
            loads = server.host.stats()["loads"]
            for one in runs:
                one.cancel()
            await until(lambda: len(list(marks.glob("ended-*"))) == 9)
            return loads

    assert run(spread()) == [3, 3, 3]


@pytest.mark.thorough
def test_a_killed_worker_under_load_costs_no_call_and_is_replaced():
    async def kill():
        async with serving(Slow(), workers=4) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(256)]
            runs = asyncio.gather(*(client.run_rollout(task) for task in tasks))
            await until(lambda: server.in_flight)
            os.kill(pids(server)[0], signal.SIGKILL)
            traces = await runs
            await until(lambda: server.host.stats()["workers"] == 4)
            more = await asyncio.gather(*(client.run_rollout(task) for task in tasks[:8]))
            return sorted(trace.task.idx for trace in traces), len(more), server.host.workers.replaced

    assert run(kill()) == (list(range(256)), 8, 1)


def test_all_workers_killed_at_once_cost_no_call_either():
    async def kill():
        async with serving(Slow(), workers=2) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(40)]
            runs = asyncio.gather(*(client.run_rollout(task) for task in tasks))
            await until(lambda: server.in_flight)
            for pid in pids(server):
                os.kill(pid, signal.SIGKILL)
            return len(await runs)

    assert run(kill()) == 40


def test_a_task_that_kills_its_worker_is_tried_once_more_and_then_answered_with_an_error(marks):
    async def crash():
        async with serving(Crashes(), workers=2) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(7)]
            results = await asyncio.gather(*(client.run_rollout(task) for task in tasks[:3]))
            recovered = await client.run_rollout(tasks[5])
            with raises_code("worker-lost", "tried 2"):
                await client.run_rollout(tasks[3])
            await until(lambda: server.host.stats()["workers"] == 2)
            results.append(await client.run_rollout(tasks[6]))
            return [trace.reward for trace in [*results, recovered]]

    assert run(crash()) == [1.0] * 5
    assert len((marks / "tried-3").read_text().split()) == 2


@pytest.mark.parametrize("workers", [2, *(pytest.param(workers, marks=pytest.mark.thorough) for workers in (1, 3))])
@pytest.mark.quick_cases(1)
def test_a_task_that_ends_its_worker_takes_no_other_with_it(workers):
    async def play():
        async with serving(Poison(), workers=workers) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(200)]
            results = await asyncio.gather(*(client.run_rollout(task) for task in tasks), return_exceptions=True)
            return results, server.host.workers.replaced

    results, replaced = run(play())
    lost = {idx: result for idx, result in enumerate(results) if isinstance(result, Exception)}
    assert list(lost) == [57]
    assert isinstance(lost[57], WorkerLost)
    assert "task 57 of" in str(lost[57])
    assert replaced <= 5


def test_a_task_that_blocks_its_worker_takes_no_other_with_it():
    async def play():
        pool = {"silent_seconds": 2.0}
        async with serving(Blocks(), workers=2, pool=pool) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(20)]
            return await asyncio.gather(*(client.run_rollout(task) for task in tasks), return_exceptions=True)

    results = run(play())
    assert [idx for idx, result in enumerate(results) if isinstance(result, Exception)] == [13]


@pytest.mark.parametrize("said", [b"", b"\xc1", b"\x91\x90", b"ready"])
@pytest.mark.quick_cases(2)
def test_a_worker_that_cannot_be_understood_is_replaced_and_its_work_done(said):
    async def garble():
        async with serving(Slow(), workers=1) as server, EnvClient(server.address) as client:
            tasks = [await client.sample() for _ in range(50)]
            rollout = asyncio.create_task(client.run_rollout(tasks[49]))
            (member,) = server.host.workers.members.values()
            await until(lambda: member.calls)
            server.host.workers.take_batch([[member.identity, said]])
            return (await rollout).reward, server.host.workers.replaced

    assert run(garble()) == (1.0, 1)


def test_a_worker_that_hangs_is_replaced(marks):
    async def hang():
        async with (
            serving(Crashes(), workers=1, pool={"silent_seconds": 2.0}) as server,
            EnvClient(server.address) as client,
        ):
            tasks = [await client.sample() for _ in range(8)]
            trace = await client.run_rollout(tasks[7])
            return trace.reward, server.host.workers.replaced

    assert run(hang()) == (1.0, 1)


def test_health_is_answered_only_when_work_is_done_at_once(sockets):
    address = f"ipc://{sockets}/server"

    async def ready():
        async with EnvClient(address, deadline=60) as client:
            asked = asyncio.create_task(client.health())
            await asyncio.sleep(0.1)
            assert not asked.done()
            async with serving(Numbers(), workers=2, address=address) as server:
                await asked
                return server.host.stats()["workers"], (await client.run_rollout(await client.sample())).reward

    assert run(ready()) == (2, 1.0)


def test_workers_are_reached_where_the_folder_of_temporary_files_has_a_long_name(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    async def play():
        async with served(Numbers(), workers=1, address="tcp://127.0.0.1:0") as client:
            return (await client.run_rollout(await client.sample())).reward

    assert run(play()) == 1.0


def test_a_cancelled_rollout_stops_in_its_worker(marks):
    async def cancel():
        async with served(Hangs(), workers=1) as client:
            task = await client.sample()
            running = asyncio.create_task(client.run_group(task, 3, request="mine"))
            await until((marks / "begun-0").exists)
            assert await client.cancel("mine")
            with pytest.raises(Cancelled):
                await running
            await until((marks / "ended-0").exists)
            return (await client.health()).in_flight

    assert run(cancel()) == 0


def test_episodes_live_in_one_worker_and_their_loss_is_told():
    async def play():
        async with serving(Talking(), workers=2) as server, EnvClient(server.address) as client:
            started = [await client.start(await client.sample()) for _ in range(4)]
            loads = server.host.stats()["loads"]
            for turn in range(3):
                for one in started:
                    step = await client.step(one.episode, f"turn {turn}", turn)
                    assert step.observation.content == f"you said turn {turn}"
            with pytest.raises(WorkerLost):
                await client.step(started[0].episode, "die", 3)
            with raises_code("worker-lost"):
                await client.step(started[0].episode, "again", 3)
            alive = 0
            for one in started[1:]:
                with contextlib.suppress(WorkerLost):
                    alive += (await client.step(one.episode, "stop", 3)).done
            return loads, alive, (await client.health()).in_flight

    loads, alive, in_flight = run(play())
    assert (loads, alive, in_flight) == ([2, 2], 2, 0)


def test_the_host_of_a_pool_is_a_host_like_any_other(marks):
    async def use():
        async with serving(Ranked(), workers=1) as server:
            host, task = server.host, await server.host.sample(3)
            group = await host.run_group(task, 2, rollouts=[4, 5])
            with raises_code("usage", "run_group"):
                await host.run_rollout(task)
        async with serving(Hangs(), workers=1) as server:
            host = server.host
            running = asyncio.create_task(host.run_rollout(await host.sample(), request="mine", rollout=1))
            await until((marks / "begun-0").exists)
            assert await host.cancel("mine")
            with pytest.raises(asyncio.CancelledError):
                await running
            await until((marks / "ended-0").exists)
        async with serving(Talking(), workers=1) as server:
            host = server.host
            started = await host.start(await host.sample())
            steps = [await host.step(started.episode, word, 0) for word in ("hello", "again")]
            assert await host.cancel(started.episode)
            return [trace.rollout for trace in group], steps

    rollouts, (first, repeated) = run(use())
    assert rollouts == [4, 5]
    assert first.observation.content == "you said hello"
    assert repeated is first


def test_groups_are_scored_together_in_a_worker():
    async def group():
        async with served(Ranked(), workers=1) as client:
            task = await client.sample()
            with raises_code("usage", "run_group"):
                await client.run_rollout(task)
            return [trace.reward for trace in await client.run_group(task, 4)]

    assert run(group()) == [0.0, 1.0, 2.0, 3.0]


def test_tasks_that_are_dear_to_make_are_made_by_the_workers():
    async def draw():
        async with serving(Dear(), workers=2) as server, EnvClient(server.address) as client:
            workers = set(pids(server))
            tasks = await asyncio.gather(*(client.sample() for _ in range(40)))
            return workers, tasks

    workers, tasks = run(draw())
    assert [task.idx for task in tasks] == list(range(40))
    assert {task.extra_info["pid"] for task in tasks} <= workers
    assert os.getpid() not in workers


def test_a_pool_grows_with_its_work_and_shrinks_without(marks):
    async def breathe():
        pool = {"max_workers": 3, "busy_load": 4, "idle_seconds": 0.5}
        async with serving(Hangs(), workers=1, pool=pool) as server, EnvClient(server.address) as client:
            runs = []
            while server.host.stats()["workers"] < 3:  # a worker may take long to start
                runs.append(asyncio.create_task(client.run_rollout(await client.sample())))
                await asyncio.sleep(0.1)
            for one in runs:
                one.cancel()
            await until(lambda: server.host.stats()["workers"] == 1)
            return server.host.workers.replaced

    assert run(breathe()) == 0


def test_a_worker_that_cannot_start_is_told_at_once():
    class Local(Numbers):
        pass

    async def start(taskset, **options):
        async with serving(taskset, workers=1, **options):
            pass

    with raises_code("usage", "Local", "--workers"):
        run(start(Local()))
    with raises_code("failed", "code 1"):
        run(start(Unstartable()))


@pytest.mark.parametrize("why", ["no CPU is free", RuntimeError("the head does not answer")])
def test_a_worker_that_fails_late_is_told_by_its_own_failure(monkeypatch, caplog, why):
    def ask(engine):
        if isinstance(why, Exception):
            raise why
        return why

    async def start():
        async with serving(Unstartable(), workers=1):
            pass

    monkeypatch.setattr(ProcessEngine, "why_waiting", ask)
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.001)  # as if it took long
    with raises_code("failed", "code 1") as failed:
        run(start())
    assert "its own messages are above" in failed.value.remedy
    assert ("no CPU is free" in caplog.text) == isinstance(why, str)


class Unstartable(Numbers):
    def __setstate__(self, state):
        raise RuntimeError("not here")


def test_workers_end_with_their_broker(tmp_path):
    import subprocess
    import sys

    program = (
        "import asyncio, sys; sys.path[:0] = ['tests/support', 'tests/serve']\n"
        "from serving import Numbers, serving\n"
        "from serving import pids\n"
        "async def main():\n"
        "    async with serving(Numbers(), workers=2) as server:\n"
        "        print(*pids(server), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    from command_line import ROOT

    script = tmp_path / "broker.py"
    script.write_text(program)
    broker = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, cwd=ROOT, env=_with_path(ROOT))
    workers = [int(pid) for pid in broker.stdout.readline().split()]
    assert len(workers) == 2
    broker.kill()
    broker.wait()
    broker.stdout.close()
    until_then = time.monotonic() + 30
    while any(_lives(pid) for pid in workers) and time.monotonic() < until_then:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in workers)


def _with_path(root):
    return {**os.environ, "PYTHONPATH": f"{root / 'tests/support'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_dear_tasks_of_a_finite_taskset_come_in_the_order_of_each_epoch():
    async def draw():
        async with served(shuffled(DearFew), workers=2) as client:
            return [(await client.sample()).idx for _ in range(18)]

    assert run(draw()) == [shuffled(DearFew).at(index).idx for index in range(18)]


@pytest.mark.thorough
def test_seeds_are_never_offset_by_a_workers_number():
    async def draw(workers):
        async with served(shuffled(Dear, 7), workers=workers) as client:
            return [(await client.sample()).prompt for _ in range(12)]

    assert run(draw(1)) == run(draw(3)) == [shuffled(Dear, 7).at(index).prompt for index in range(12)]
    assert isinstance(Dear()[0], Task)
