"""`treetune serve` and `treetune top` as a user runs them: real processes, signals, kills and garbage."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import urllib.error
import urllib.request

import pytest
import zmq
from command_line import ROOT
from raising import raises_code
from serve_process import resident, serve

from treetune import Sampling
from treetune.serve.errors import Denied
from treetune.serve.messages import pack, pack_head, unpack_plain
from treetune.serve.zmq.client import EnvClient
from treetune.tasksets.arithmetic import Arithmetic

HEAD = pack_head(b"0123456789abcdef")
SLOW = """
import asyncio
from treetune import Task, Taskset
class Slow(Taskset):
    INFINITE = True
    def task_at(self, index): return Task(prompt=str(index), reward_spec={"ground_truth": str(index)})
    async def reward(self, task, answer):
        await asyncio.sleep(0.5)
        return 1.0
    def gold(self, task): return task.ground_truth
"""


@pytest.fixture
def address(sockets):
    """One that stays the same over a restart."""
    return f"ipc://{sockets}/server"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_taskset_is_served_and_told_of(tmp_path):
    async def use(address):
        async with EnvClient(address) as client:
            tasks = [await client.sample() for _ in range(3)]
            return tasks, await client.run_rollout(tasks[0])

    options = ["--zmq", "tcp://127.0.0.1:0", "-m", "scripted:gold", "--taskset.shuffle.seed", "4", "--metrics", ":0"]
    with serve(tmp_path, "arithmetic", *options) as server:
        tasks, trace = run(use(server.address))
        figures = urllib.request.urlopen(server.report["metrics"]).read().decode()
        told = server.stop()
    from treetune import load_taskset

    assert tasks == load_taskset("arithmetic", {"taskset.shuffle.seed": "4"}).select_tasks(3)
    assert trace.reward == 1.0
    assert server.process.returncode == 0
    assert "serving arithmetic (endless)" in told
    assert "the next index is 3" in told
    assert 'treetune_requests_total{method="sample"} 3.0' in figures
    assert 'treetune_tasks_total{source="arithmetic"} 3.0' in figures
    assert 'outcome="completed"' in figures
    assert 'treetune_reward_sum_total{source="arithmetic"} 1.0' in figures
    assert "treetune_in_flight 0.0" in figures
    assert 'treetune_cursor{stream=""} 3.0' in figures
    assert 'treetune_seconds_bucket{le="+Inf",method="run_rollout"} 1.0' in figures


@pytest.mark.parametrize("place", ["127.0.0.1:0", "0.0.0.0:0"])
def test_figures_are_shown_only_with_the_token_that_is_set(tmp_path, place):
    options = ["--zmq", "tcp://127.0.0.1:0", "--metrics", place]
    with serve(tmp_path, "arithmetic", *options, TREETUNE_TOKEN="a-secret") as server:
        url = server.report["metrics"].replace("0.0.0.0", "127.0.0.1")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        good = urllib.request.Request(url, headers={"Authorization": "Bearer a-secret"})
        assert b"treetune_in_flight 0.0" in urllib.request.urlopen(good).read()


def test_figures_for_other_machines_need_a_token(treetune):
    done = treetune("serve", "arithmetic", "--zmq", "tcp://127.0.0.1:0", "--metrics", "0.0.0.0:0")
    assert done.code == 2
    assert "there is no token" in done.err


SAYS_SAMPLING = """
class Says:
    async def complete(self, request):
        asked = request.sampling
        return f"{asked.temperature} {asked.max_tokens} {asked.logprobs} {asked.extra}"
"""


def test_models_are_sampled_as_the_server_says_where_a_request_does_not(tmp_path):
    (tmp_path / "policies.py").write_text(SAYS_SAMPLING)

    async def use(address):
        async with EnvClient(address) as client:
            task = await client.sample()
            own = Sampling(temperature=0.0, logprobs=True, extra={"top_k": 5})
            traces = [await client.run_rollout(task), await client.run_rollout(task, sampling=own)]
            return [trace.turns[0].message["content"] for trace in traces]

    options = ["--zmq", "tcp://127.0.0.1:0", "-m", "scripted:policies.py:Says"]
    sampling = ["--sampling.temperature", "0.7", "--sampling.max_tokens", "9", "--sampling.extra", '{"min_p": 0.1}']
    with serve(tmp_path, "reverse-text", *options, *sampling) as server:
        answers = run(use(server.address))
    assert answers == ["0.7 9 False {'min_p': 0.1}", "0.0 9 True {'min_p': 0.1, 'top_k': 5}"]


@pytest.mark.parametrize(
    "options",
    [
        ["--sampling.temperatur", "1"],
        ["--sampling.extra", '{"model": "x"}', "-m", "scripted:gold"],
        ["--zmq", "nonsense"],
        ["--zmq", "tcp://0.0.0.0:0"],
        ["--engine", "x"],
        ["-w", "-1"],
        ["-w", "3", "--max-workers", "2"],
        ["--zmq", "tcp://127.0.0.1:0", "--metrics", "127.0.0.1:99999999"],
        ["--zmq", "tcp://127.0.0.1:0", "--allow-endpoint", "ftp://x"],
        ["--capacity", "0"],
    ],
)
def test_wrong_options_are_told_with_a_remedy(treetune, options):
    result = treetune("serve", "arithmetic", *options)
    assert result.code == 2
    assert result.err.startswith("error: ")


def test_a_broker_that_is_killed_goes_on_where_it_was_and_its_clients_notice_nothing(tmp_path, address):
    (tmp_path / "slow.py").write_text(SLOW)
    options = ["slow.py:Slow", "--zmq", address, "-w", "4", "-m", "scripted:gold", "--state", "kept"]

    async def work(client, number):
        seen = []
        for _ in range(number):
            task = await client.sample()
            seen.append((task.idx, (await client.run_rollout(task)).task.idx))
        return seen

    async def both():
        async with EnvClient(address) as client:
            with serve(tmp_path, *options) as server:
                workers = [asyncio.create_task(work(client, 2)) for _ in range(256)]
                while (await client.health()).in_flight < 256:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                server.process.kill()
            with serve(tmp_path, *options) as server:
                done = await asyncio.gather(*workers)
                return done, server.stop()

    done, told = run(both())
    pairs = [pair for seen in done for pair in seen]
    assert sorted(sampled for sampled, _ in pairs) == list(range(512))
    assert all(sampled == ran for sampled, ran in pairs)
    assert "the next index is 512" in told


def test_what_is_under_way_may_end_when_the_server_is_told_to_stop(tmp_path, address):
    (tmp_path / "slow.py").write_text(SLOW)

    async def use(server):
        async with EnvClient(address, run_deadline=30) as client:
            tasks = [await client.sample() for _ in range(10)]
            runs = [asyncio.create_task(client.run_rollout(task)) for task in tasks]
            await asyncio.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            return [trace.reward for trace in await asyncio.gather(*runs)]

    with serve(tmp_path, "slow.py:Slow", "--zmq", address, "-w", "1", "-m", "scripted:gold") as server:
        assert run(use(server)) == [1.0] * 10
        assert server.process.wait(30) == 0


@pytest.mark.thorough
def test_a_hundred_thousand_garbage_messages_change_nothing(tmp_path):
    with serve(tmp_path, "arithmetic", "--zmq", "tcp://127.0.0.1:0", "-w", "1", "-m", "scripted:gold") as server:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.RCVHWM, 1000)
        socket.connect(server.address)
        send_garbage(socket, 20_000)
        before = resident(server.process.pid)
        send_garbage(socket, 80_000)
        after = resident(server.process.pid)
        socket.close()

        async def use():
            async with EnvClient(server.address) as client:
                tasks = [await client.sample() for _ in range(20)]
                traces = await asyncio.gather(*(client.run_rollout(task) for task in tasks))
                while (await client.health()).in_flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                return tasks, {trace.reward for trace in traces}, await client.stats()

        tasks, rewards, stats = run(use())
        told = server.stop()
    assert [task.prompt for task in tasks] == [task.prompt for task in Arithmetic().select_tasks(20)]
    assert rewards == {1.0}
    assert stats["malformed"] > 50_000
    assert stats["in_flight"] == 0
    assert after < before + 20
    assert "Traceback" not in told


def send_garbage(socket, number):
    chance = random.Random(number)
    good = pack({"task": {"idx": 1, "prompt": "x", "reward_spec": {"a": [1, 2]}}, "n": 3, "index": 5})
    methods = b"run_rollout run_group start step cancel observe restore state nonsense".split()
    for count in range(number):
        kind = count % 7
        id = chance.randbytes(chance.choice([0, 1, 8, 80]))
        if kind == 0:
            frames = [chance.randbytes(chance.randint(0, 30)) for _ in range(chance.choice([1, 2, 4, 9]))]
        elif kind == 1:
            frames = [id, chance.choice(methods), HEAD, good[: chance.randrange(len(good))]]
        elif kind == 2:  # a map, a text or a list that claims to be huge
            frames = [
                id,
                chance.choice(methods),
                HEAD,
                chance.choice([b"\xdf", b"\xdb", b"\xdd", b"\xc6"]) + b"\xff" * 4,
            ]
        elif kind == 3:
            wrong = {"task": 7, "n": "many", "episode": [1], "id": 2**100, "reward": None, "state": {"streams": 3}}
            frames = [id, chance.choice(methods), HEAD, pack(wrong)]
        elif kind == 4:
            frames = [id, chance.choice(methods), HEAD, b"\x91" * 2000]
        elif kind == 5:
            frames = [
                id,
                chance.choice(methods),
                HEAD,
                pack({"task": {"idx": 2**90, "env_class": "/x.py:Y"}, "n": 2**40}),
            ]
        else:
            frames = [id, chance.choice(methods), chance.randbytes(chance.choice([0, 5, 20])), chance.randbytes(40)]
        socket.send_multipart(frames)
        if count % 500 == 499:
            drain(socket)
    # An honest question after all of it: what came before on this connection has then been dealt with.
    socket.send_multipart([b"honest", b"info", HEAD, pack({})])
    while True:
        assert socket.poll(30_000)
        id, data = socket.recv_multipart()
        if id == b"honest":
            break
    assert unpack_plain(data)["success"]


def drain(socket):
    while socket.poll(0):
        socket.recv_multipart()


def test_the_token_of_the_environment_is_asked_for(tmp_path):
    async def ask(address, **options):
        async with EnvClient(address, **options) as client:
            return (await client.sample()).idx

    with serve(tmp_path, "arithmetic", "--zmq", "tcp://127.0.0.1:0", TREETUNE_TOKEN="abc") as server:
        with pytest.raises(Denied):
            run(ask(server.address))
        assert run(ask(server.address, token="abc")) == 0


FLAWED = """
from treetune import Task, Taskset
class Flawed(Taskset):
    INFINITE = True
    def task_at(self, index): return Task(prompt=str(index), reward_spec={"ground_truth": str(100 // (index - 9))})
"""


def test_leases_and_tries_are_flags_and_top_shows_them(tmp_path, treetune):
    (tmp_path / "flawed.py").write_text(FLAWED)

    async def use(address):
        async with EnvClient(address) as client:
            drawn = [(await client.sample()).idx for _ in range(9)]
            with raises_code("failed", "1 of 1"):
                await client.sample()
            return [*drawn, *[(await client.sample()).idx for _ in range(2)]]

    options = ["--zmq", "tcp://127.0.0.1:0", "--lease", "600", "--draw-tries", "1"]
    with serve(tmp_path, "flawed.py:Flawed", *options) as server:
        assert run(use(server.address)) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
        shown = treetune("top", server.address, "--once").out
        told = server.stop()
    assert "11 tasks; 0 expired" in shown
    assert "1 draws whose tasks could not be made" in shown
    assert "index 9 is skipped, after 1 tries: Flawed.task_at(9) failed: ZeroDivisionError" in told


def test_top_shows_a_running_server(tmp_path, treetune):
    with serve(tmp_path, "arithmetic", "--zmq", "tcp://127.0.0.1:0", "-w", "1", "-m", "scripted:gold") as server:

        async def use():
            async with EnvClient(server.address) as client:
                await client.run_rollout(await client.sample())

        run(use())
        shown = treetune("top", server.address, "--once")
        figures = treetune("top", server.address, "--json").json
    assert shown.code == 0
    assert "arithmetic" in shown.out
    assert "completed" in shown.out
    assert figures["requests"]["run_rollout"] == 1
    assert figures["sources"]["arithmetic"]["mean_reward"] == 1.0
    assert figures["workers"] == 1
    gone = treetune("top", server.address, "--once", "--deadline", "0.5")
    assert gone.code == 3
    assert "no answer" in gone.err


def test_an_address_or_a_key_that_is_none_is_told(treetune):
    for arguments in (["top", "foo"], ["top", "tcp://127.0.0.1:1", "--server-key", "x"], ["eval", "--server", "foo"]):
        result = treetune(*arguments)
        assert result.code == 2
        assert "cannot connect" in result.err or "is not an address" in result.err


@pytest.mark.thorough
def test_a_server_goes_on_with_what_it_has_learned_after_a_kill(tmp_path):
    async def learn(address, draws):
        async with EnvClient(address) as client:
            tasks = []
            for _ in range(draws):
                tasks.append(await client.sample())
                await client.observe(tasks[-1], float(tasks[-1].extra_info["level"] < 3))
            return [task.idx for task in tasks]

    target, options = f"{ROOT}/examples/curriculum.yaml", ("--zmq", "tcp://127.0.0.1:0", "--state")
    with serve(tmp_path, target, *options, "killed") as server:
        first = run(learn(server.address, 40))
        server.process.kill()
    with serve(tmp_path, target, *options, "killed") as server:
        rest = run(learn(server.address, 40))
    with serve(tmp_path, target, *options, "whole") as server:
        assert first + rest == run(learn(server.address, 80))


def test_a_model_that_does_not_answer_yet_is_told_when_a_server_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        options = ["--zmq", "tcp://127.0.0.1:0", "-m", "later", "--endpoint.base_url", url]
        with serve(tmp_path, "arithmetic", *options) as server:
            told = server.stop()
    assert f"nothing answers at {url}" in told
    assert "until it answers, its rollouts fail" in told
    assert server.process.returncode == 0
