"""A client that vanishes takes nothing with it: what it neither finished nor renewed is given out again."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from http_playing import playing
from serving import Hangs, Numbers, Raw, Talking, run, serving, until

from treetune.core.contract import Limits
from treetune.errors import UsageError
from treetune.models import load_policy
from treetune.play.host import LocalHost, always
from treetune.serve.errors import Misused
from treetune.serve.zmq.client import EnvClient

LEASE, ENDS = 600.0, 601.0
"""Seconds of a clock that the tests move: it does not depend on how busy the machine is."""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def stop_clock(streams):
    clock = streams.pending.clock = Clock()
    return clock


def vanish(client):
    """Its process is killed: it says nothing any more."""
    client._socket.close(0)
    client._socket = None
    client._acknowledge = lambda: None


async def leave(server, number=2, **options):
    """A client that takes some tasks and vanishes."""
    client = EnvClient(server.address)
    tasks = [await client.sample(**options) for _ in range(number)]
    vanish(client)
    return [task.idx for task in tasks]


def out(server):
    return server.streams.pending.leased


def test_what_a_client_took_comes_again_marked_and_counted():
    async def draw():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            clock = stop_clock(server.streams)
            taken = await leave(server, lease=LEASE)
            between = (await client.sample(), out(server))
            clock.now += ENDS
            await until(lambda: not out(server))
            again = [await client.sample() for _ in range(2)]
            traces = [await client.run_rollout(task, occurrence=3) for task in again]
            stats = await client.stats()
            return taken, between, again, traces, stats, await client.sample()

    taken, (next_one, leased), again, traces, stats, after = run(draw())
    assert (taken, next_one.idx, leased) == ([0, 1], 2, 2)
    assert ([task.idx for task in again], after.idx) == ([0, 1], 3)
    assert [(trace.attempt, trace.occurrence, trace.reward) for trace in traces] == [(1, 3, 1.0)] * 2
    assert (stats["leases"], stats["expired_leases"]) == (0, 2)


def test_without_a_lease_nothing_comes_again():
    async def draw():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            await leave(server)
            await leave(server, lease=0)
            return out(server), (await client.sample()).idx

    assert run(draw()) == (0, 4)


ENDINGS = {
    "a rollout": lambda client, task: client.run_rollout(task),
    "a group": lambda client, task: client.run_group(task, 2),
    "observe": lambda client, task: client.observe(task, 1.0),
    "finish": lambda client, task: client.finish(task),
}


@pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
def test_what_is_finished_does_not_come_again(end):
    async def draw():
        async with serving(Numbers(), lease=LEASE) as server, EnvClient(server.address) as client:
            task = await client.sample()
            before = out(server)
            await end(client, task)
            await until(lambda: not out(server))  # no other request tells that the answer has arrived
            return before, await client.finish(task), server.streams.pending.expired

    assert run(draw()) == (1, False, 0)


def test_a_lease_holds_while_its_client_waits_for_the_rollout():
    """The client repeats its request, which renews it."""

    ended = asyncio.Event()

    class Long(Numbers):
        async def reward(self, task, answer):
            await ended.wait()
            return 1.0

    async def wait():
        async with serving(Long()) as server, EnvClient(server.address) as client:
            clock, pending = stop_clock(server.streams), server.streams.pending
            rollout = asyncio.create_task(client.run_rollout(await client.sample(lease=0.6)))
            await until(lambda: pending.work)
            for _ in range(3):
                clock.now += 0.4
                await until(lambda: list(pending.expires.values()) == [clock.now + 0.6])
            ended.set()
            trace = await rollout
            await until(lambda: not out(server))
            return trace.reward, trace.attempt, pending.expired

    assert run(wait()) == (1.0, 0, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_rollouts_of_a_client_that_vanished_are_stopped(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def leave_running(**options):
        async with serving(Hangs(), workers=workers) as server, EnvClient(server.address) as client:
            clock, gone = stop_clock(server.streams), EnvClient(server.address)
            rollout = asyncio.create_task(gone.run_rollout(await gone.sample(lease=LEASE)))
            await until((tmp_path / "begun-0").exists)
            gone._send = lambda frames: None
            clock.now += ENDS
            await until((tmp_path / "ended-0").exists)
            await until(lambda: server.in_flight == 0)
            rollout.cancel()
            return (await client.sample()).idx

    assert run(leave_running()) == 0


def test_an_episode_holds_its_lease_by_its_steps_and_finishes_it_by_its_end():
    async def play():
        async with serving(Talking()) as server, EnvClient(server.address) as client:
            clock = stop_clock(server.streams)
            left, played = [await client.start(await client.sample(lease=LEASE)) for _ in range(2)]
            for turn in range(8):
                clock.now += LEASE / 4
                await client.step(played.episode, "on", turn)
            await until(lambda: len(server.host.episodes.live) == 1)
            live = list(server.host.episodes.live)
            await client.step(played.episode, "stop", 8)
            with pytest.raises(Misused, match="no episode"):
                await client.step(left.episode, "on", 0)
            return live == [played.episode], out(server), (await client.sample()).idx, (await client.sample()).idx

    assert run(play()) == (True, 0, 0, 2)


def test_an_episode_over_http_that_nobody_steps_is_given_out_again():
    async def play():
        async with playing(Talking(), lease=LEASE) as played:
            clock = stop_clock(played.server.streams)
            left, done = [await played.good("start", {}) for _ in range(2)]
            await played.step(done["episode_id"], "stop", 0)
            clock.now += ENDS
            await until(lambda: left["episode_id"] not in played.http.live)
            status, answer = await played.step(left["episode_id"], "on", 0)
            again = [(await played.good("start", {}))["info"]["task_index"] for _ in range(2)]
            return status, answer["kind"], again, played.server.streams.pending.expired

    assert run(play()) == (410, "expired", [0, 2], 1)


@pytest.mark.parametrize("ended", ["killed", "stopped"])
def test_a_lease_outlives_the_server(ended, tmp_path, sockets):
    folder = tmp_path / "state"

    async def restart():
        address = f"ipc://{sockets}/server"
        async with EnvClient(address) as client:
            async with serving(Numbers(), address=address, state=folder) as server:
                kept, finished, left = [await client.sample(lease=LEASE) for _ in range(3)]
                await client.finish(finished)
                shutil.copytree(folder, tmp_path / "killed")
            if ended == "stopped":
                shutil.rmtree(tmp_path / "killed")
                shutil.copytree(folder, tmp_path / "killed")
            async with serving(Numbers(), address=address, state=tmp_path / "killed") as server:
                before, clock = out(server), stop_clock(server.streams)
                assert await client.renew(left, 1.0)
                assert (await client.run_rollout(kept)).reward == 1.0
                await until(lambda: out(server) == 1)
                clock.now += ENDS
                await until(lambda: not out(server))
                return before, [((await client.sample()).idx) for _ in range(2)]

    assert run(restart()) == (2, [2, 3])


def test_a_checkpoint_gives_out_again_what_was_out():
    async def restore():
        async with serving(Numbers()) as server, EnvClient(server.address) as client:
            tasks = [await client.sample(lease=LEASE) for _ in range(3)]
            await client.finish(tasks[1])
            state = await client.state()
            await client.sample()
            await client.restore(state)
            again = [await client.sample() for _ in range(3)]
            return [(task.idx, client.attempt_of(task)) for task in again], out(server)

    assert run(restore()) == ([(0, 1), (2, 1), (3, 0)], 0)


def test_a_task_that_is_none_is_answered_once_also_while_leases_are_out():
    async def ask():
        async with serving(Numbers(), lease=LEASE) as server:
            with Raw(server.address) as raw:
                await raw.ask(b"1", "sample")
                kinds = [(await raw.ask(b"2", "run_rollout", task={"idx": "x"}))["kind"]]
                kinds.append((await raw.ask(b"3", "run_rollout", task={"idx": 2**90}))["kind"])
                return kinds, (await raw.ask(b"4", "health"))["in_flight"]

    assert run(ask()) == (["bad_request", "refused"], 0)


def test_only_its_own_client_renews_or_finishes_a_lease():
    async def meddle():
        async with (
            serving(Numbers()) as server,
            EnvClient(server.address) as client,
            EnvClient(server.address) as other,
        ):
            task = await client.sample(lease=LEASE)
            passed_on = await other.run_rollout(client.portable(task))
            return passed_on.reward, await other.renew(task), await other.finish(task), await client.finish(task)

    assert run(meddle()) == (1.0, False, False, True)


def test_a_client_that_comes_back_too_late_does_not_finish_what_another_has():
    async def late():
        async with (
            serving(Numbers()) as server,
            EnvClient(server.address) as client,
            EnvClient(server.address) as other,
        ):
            clock = stop_clock(server.streams)
            task = await client.sample(lease=LEASE)
            clock.now += ENDS
            await until(lambda: not out(server))
            same = await other.sample(lease=LEASE)
            trace = await client.run_rollout(task)
            await client.health()
            return same.idx, trace.attempt, await client.finish(task), out(server), other.attempt_of(same)

    assert run(late()) == (0, 0, False, 1, 1)


def test_a_lease_that_cannot_be_is_refused_and_draws_nothing():
    async def ask():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                kinds = [
                    (await raw.ask(b"%d" % number, "sample", lease=lease))["kind"]
                    for number, lease in enumerate([-1, 1e12, float("nan"), "long"])
                ]
            return kinds, server.streams.cursor()

    assert run(ask()) == (["usage", "usage", "usage", "bad_request"], 0)


def test_in_process():
    async def draw():
        host = await LocalHost.open(taskset := Talking(), always(load_policy("scripted:echo", taskset)))
        clock = stop_clock(host.streams)
        left, finished, stepped = [await host.sample(lease=LEASE) for _ in range(3)]
        await host.finish(finished)
        started = await host.start(stepped)
        clock.now += ENDS
        again = await host.sample(lease=LEASE)
        trace = await host.run_rollout(again, limits=Limits(max_turns=1))
        await host.step(started.episode, "stop")
        assert not await host.renew(left)
        with pytest.raises(UsageError):
            await host.sample(lease=-1)
        return again.idx, trace.attempt, host.streams.pending.leased, (await host.sample()).idx

    assert run(asyncio.wait_for(draw(), 60)) == (0, 1, 0, 3)


def test_top_and_prometheus_show_what_is_out():
    from treetune.cli.servers import make_servers_table

    async def look():
        async with serving(Numbers(), lease=LEASE) as server, EnvClient(server.address) as client:
            await client.sample()
            stats = await client.stats()
            return stats, server.metrics.render().decode()

    stats, shown = run(look())
    table = make_servers_table("tcp://here", stats, stats)
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert "1 task; 0 expired and were handed out again" in cells
    assert "treetune_leases 1.0" in shown
