"""A draw that fails is not drawn: it is tried again. Where others succeed it is skipped after so many tries, named and
counted; while nothing succeeds, nothing is skipped."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from contextlib import AsyncExitStack

import pytest
from http_playing import playing
from raising import raises_code
from serving import Numbers, Raw, run, serving, until

from treetune import Mixture, Task, Taskset
from treetune.errors import TreetuneError
from treetune.models import load_policy
from treetune.play import reader
from treetune.play.host import LocalHost, always
from treetune.serve.errors import ServeError
from treetune.serve.zmq.client import EnvClient

BAD = 9
"""Beyond those that a server looks at when it starts."""


class Wobbly(Numbers):
    """Task 9 cannot be made while the file is there."""

    broken = None
    seconds = 0.0

    def task_at(self, index):
        time.sleep(self.seconds)
        if index == BAD and self.broken.exists():
            raise OSError("the disk is away")
        return super().task_at(index)


class DearWobbly(Wobbly):
    seconds = 0.005


class WobblyStream(Wobbly):
    """The same, only a generator."""

    task_at = Taskset.task_at
    read = 0

    def load_tasks(self):
        type(self).read += 1
        index = 0
        while True:
            yield Wobbly.task_at(self, index)
            index += 1


@pytest.fixture
def broken(tmp_path, monkeypatch):
    path = tmp_path / "broken"
    path.touch()
    monkeypatch.setattr(Wobbly, "broken", path)
    return path


async def draw_until_mended(sample, broken):
    """The indices that are drawn while one fails twice, until it came."""
    drawn, told = [], []
    while BAD not in drawn:
        try:
            drawn.append(await sample())
        except (TreetuneError, AssertionError) as error:
            told.append("the disk is away" in str(error))
            if len(told) == 2:
                broken.unlink()
    return told, drawn


TWICE = ([True, True], [*range(BAD), 10, 11, BAD])
"""The next index is tried in between: it shows whether anything can be made."""
KINDS = {"cheap": Wobbly, "dear": DearWobbly}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_in_process(kind, broken):
    async def draw():
        host = await LocalHost.open(taskset := kind(), always(load_policy("scripted:gold", taskset)))

        async def sample():
            return (await host.sample()).idx

        return await draw_until_mended(sample, broken)

    assert run(draw()) == TWICE


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_in_a_server(kind, broken):
    async def draw():
        async with serving(kind()) as server, EnvClient(server.address) as client:

            async def sample():
                return (await client.sample()).idx

            return await draw_until_mended(sample, broken), server.streams.pending.skipped

    assert run(draw()) == (TWICE, 0)


def test_where_a_worker_makes_the_tasks(broken, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_BROKEN", str(broken))

    async def draw():
        async with serving(InWorkers(), workers=1) as server, EnvClient(server.address) as client:

            async def sample():
                return (await client.sample()).idx

            return server.streams.cheap, await draw_until_mended(sample, broken)

    assert run(draw()) == (False, TWICE)


class InWorkers(Numbers):
    def task_at(self, index):
        time.sleep(0.005)
        if index == BAD and os.path.exists(os.environ["TREETUNE_TEST_BROKEN"]):
            raise OSError("the disk is away")
        return super().task_at(index)


@pytest.mark.parametrize("kind", [Wobbly, DearWobbly])
def test_over_http(kind, broken):
    async def draw():
        async with playing(kind()) as played:

            async def sample():
                status, answer = await played.post("start", {})
                assert status == 200, answer["error"]
                return answer["info"]["task_index"]

            return await draw_until_mended(sample, broken)

    assert run(draw()) == TWICE


async def draw_some(client, number):
    """Indices, and None where there was an error; the errors."""
    found, told = [], []
    for _ in range(number):
        try:
            found.append((await client.sample()).idx)
        except ServeError as error:
            found.append(None)
            told.append(str(error))
    return found, told


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_after_so_many_tries_an_index_is_skipped_and_counted(kind, broken, caplog):
    async def draw():
        async with serving(kind(), draw_tries=2) as server, EnvClient(server.address) as client:
            found, told = await draw_some(client, 15)
            shown = "treetune_skipped_draws 1.0" in str(server.metrics.render())
            return found, told, shown, (await client.stats())["skipped_draws"]

    found, (first, last), shown, skipped = run(draw())
    assert found == [*range(9), None, 10, None, 11, 12, 13]
    assert f"{kind.__name__}.task_at(9) failed: OSError: the disk is away" in first
    assert "tried 1 of 2" in first
    assert "tried 2 of 2 times, and is skipped if others succeed" in last
    assert (shown, skipped) == (True, 1)
    assert "index 9 is skipped, after 2 tries: " in caplog.text


# Where nothing can be made


class Away(Numbers):
    """Nothing can be made while the file is there."""

    seconds = 0.0

    def task_at(self, index):
        time.sleep(self.seconds)
        if os.path.exists(os.environ["TREETUNE_TEST_BROKEN"]):
            raise OSError("the disk is away")
        return super().task_at(index)


class DearAway(Away):
    seconds = 0.003


CLIENTS = 16
OUTAGE = 3.0


@pytest.mark.parametrize(
    ("kind", "workers"), [(Away, 0), (DearAway, 0), (DearAway, 1)], ids=["cheap", "dear", "in a pool"]
)
def test_an_outage_loses_no_index(kind, workers, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    monkeypatch.setenv("TREETUNE_TEST_BROKEN", str(broken))

    async def draw():
        drawn, told = [], []
        async with AsyncExitStack() as opened:
            server = await opened.enter_async_context(serving(kind(), workers=workers))
            clients = [await opened.enter_async_context(EnvClient(server.address)) for _ in range(CLIENTS)]

            async def ask(client):
                while len(drawn) < 400 or len(server.streams.pending):
                    try:
                        drawn.append((await client.sample()).idx)
                    except ServeError as error:
                        told.append(str(error))

            asking = [asyncio.ensure_future(ask(client)) for client in clients]
            await until(lambda: len(drawn) > 50)
            broken.touch()
            await asyncio.sleep(OUTAGE)
            reached = server.streams.cursor()
            broken.unlink()
            await asyncio.gather(*asking)
            return drawn, told, reached, server.streams.cursor(), server.streams.pending.skipped

    drawn, told, reached, cursor, skipped = run(draw())
    assert sorted(drawn) == list(range(cursor))
    assert skipped == 0
    assert all("the disk is away" in one for one in told)
    assert CLIENTS <= len(told) < 20 * CLIENTS  # they wait between the tries
    assert reached < 400 + 10 * CLIENTS


def test_indices_that_fail_beside_each_other_are_skipped_and_the_next_ones_come():
    class Hole(Numbers):
        def task_at(self, index):
            if 9 <= index < 14:
                raise ValueError("there is a hole")
            return super().task_at(index)

    async def draw():
        async with serving(Hole()) as server, EnvClient(server.address) as client:
            found = []
            while server.streams.pending.skipped < 5:
                found += (await draw_some(client, 1))[0]
            return [index for index in found if index is not None]

    drawn = run(draw())
    assert drawn == sorted({*range(drawn[-1] + 1)} - {*range(9, 14)})


# Generators


@pytest.fixture
def anew(monkeypatch):
    """A generator is begun anew soon."""
    monkeypatch.setattr(reader, "FIRST_WAIT", 0.05)
    WobblyStream.read = 0


@pytest.mark.parametrize("workers", [0, 1], ids=["server", "pool"])
def test_a_generator_that_fails_is_begun_anew_until_it_comes_further(workers, broken, anew):
    async def draw():
        taskset = WobblyStream()
        async with serving(taskset, workers=workers, draw_tries=9) as server, EnvClient(server.address) as client:
            drawn = [(await client.sample()).idx for _ in range(BAD)]
            waiting = asyncio.gather(*(client.sample() for _ in range(16)))
            await until(lambda: WobblyStream.read == 3)
            broken.unlink()
            return drawn + sorted(task.idx for task in await waiting), server.streams.pending.skipped

    assert run(draw()) == (list(range(BAD + 16)), 0)


@pytest.mark.parametrize("make", [WobblyStream, lambda: Mixture.of([WobblyStream()], [1])], ids=["alone", "mixed"])
def test_a_generator_that_fails_at_the_same_place_ends_the_stream_and_nothing_is_skipped(make, broken, anew):
    async def draw():
        async with serving(make()) as server, EnvClient(server.address) as client:
            found, told = await draw_some(client, BAD + 5)
            read, state = WobblyStream.read, await client.state()
            broken.unlink()
            await asyncio.sleep(1.0)  # mended, it goes on
            return found, told, read, state.streams[""], (await draw_some(client, 3))[0], server.streams.pending.skipped

    found, told, read, state, after, skipped = run(draw())
    assert found == [*range(BAD), *[None] * 5]
    assert all("load_tasks() failed: OSError: the disk is away; it failed 3 times at task 9" in one for one in told)
    assert (read, [one.index for one in state.pending], after, skipped) == (3, [BAD], [9, 10, 11], 0)


def test_a_generator_that_says_it_never_ends_and_does_ends_the_stream():
    class Short(Numbers):
        task_at = Taskset.task_at

        def load_tasks(self):
            yield from (Task(prompt=str(number)) for number in range(3))

    async def draw():
        async with serving(Short()) as server, EnvClient(server.address) as client:
            return *await draw_some(client, 6), server.streams.pending.skipped

    found, told, skipped = run(draw())
    assert (found, skipped) == ([0, 1, 2, None, None, None], 0)
    assert "Short declares INFINITE = True, but it ended after 3 tasks" in told[0]


def test_a_task_of_a_generator_that_is_none_is_skipped_and_the_next_ones_come():
    class Odd(Numbers):
        task_at = Taskset.task_at

        def load_tasks(self):
            index = 0
            while True:
                yield "no task" if index == 2 else Task(prompt=str(index))
                index += 1

    async def draw():
        async with serving(Odd()) as server, EnvClient(server.address) as client:
            return (await draw_some(client, 9))[0], server.streams.pending.skipped

    assert run(draw()) == ([0, 1, None, 3, None, 4, None, 5, 6], 1)


@pytest.mark.parametrize("kind", [Wobbly, DearWobbly])
def test_what_failed_is_given_by_the_next_server_after_a_kill(kind, broken, tmp_path):
    async def kill():
        async with serving(kind(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            drawn = [(await client.sample()).idx for _ in range(BAD)]
            with raises_code("failed", "1 of 3"):
                await client.sample()
            drawn.append((await client.sample()).idx)
            with raises_code("failed", "2 of 3"):
                await client.sample()
            shutil.copytree(tmp_path / "state", tmp_path / "killed")
        async with serving(kind(), state=tmp_path / "killed") as server, EnvClient(server.address) as client:
            with raises_code("failed", "3 of 3"):
                await client.sample()
            after = [(await client.sample()).idx for _ in range(2)]
            skipped = server.streams.pending.skipped
            shutil.copytree(tmp_path / "killed", tmp_path / "again")
        broken.unlink()
        async with serving(kind(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            mended = (await client.sample()).idx
        async with serving(kind(), state=tmp_path / "again") as server, EnvClient(server.address) as client:
            return drawn, after, skipped, mended, (await client.sample()).idx

    assert run(kill()) == ([*range(BAD), 10], [11, 12], 1, 9, 13)


def test_many_at_once_lose_nothing_where_one_fails(broken, tmp_path, monkeypatch):
    """Those that were under way go on; what failed comes to whoever asks next, and each index once."""
    monkeypatch.setattr(DearWobbly, "seconds", 0.2)  # all have asked before one fails, also on a busy machine

    async def draw():
        async with serving(DearWobbly(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            asked = [asyncio.create_task(client.sample()) for _ in range(12)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            shutil.copytree(tmp_path / "state", tmp_path / "killed")
            broken.unlink()
            drawn = [task.idx for task in found if not isinstance(task, ServeError)]
            return sorted(drawn), sorted([(await client.sample()).idx for _ in range(2)])

    assert run(draw()) == ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11], [9, 12])

    async def go_on():
        async with serving(DearWobbly(), state=tmp_path / "killed") as server, EnvClient(server.address) as client:
            return sorted([(await client.sample()).idx for _ in range(2)])

    assert run(go_on()) == [9, 12]


def test_a_kill_while_a_task_is_made_loses_nothing(tmp_path):
    class Stalls(Numbers):
        stalls = False

        def task_at(self, index):
            time.sleep(1.0 if index == 1 and self.stalls else 0.005)
            return super().task_at(index)

    async def kill():
        async with serving(Stalls(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            await client.sample()
            Stalls.stalls = True
            stalled = asyncio.create_task(client.sample())
            await until(lambda: server.streams.cursor() == 2)
            drawn = [(await client.sample()).idx for _ in range(2)]
            shutil.copytree(tmp_path / "state", tmp_path / "killed")
            stalled.cancel()
        Stalls.stalls = False
        async with serving(Stalls(), state=tmp_path / "killed") as server, EnvClient(server.address) as client:
            return drawn, [(await client.sample()).idx for _ in range(2)]

    assert run(kill()) == ([2, 3], [1, 4])


def test_a_disk_that_is_full_gives_the_draw_again(tmp_path):
    from treetune.errors import StorageError

    def fails(*arguments):
        raise StorageError("the disk is full")

    async def fill():
        async with serving(DearWobbly(), state=tmp_path) as server, EnvClient(server.address) as client:
            await client.sample()
            commit, server.order.store.commit = server.order.store.commit, fails
            for _ in range(2):
                with raises_code("failed", "the disk is full"):
                    await client.sample(lease=60.0)
            leased = server.streams.pending.leased
            server.order.store.commit = commit
            return leased, [(await client.sample()).idx for _ in range(2)]

    Wobbly.broken = tmp_path / "no such file"
    assert run(fill()) == (0, [1, 2])


def test_errors_name_the_method_that_the_author_wrote():
    class Odd(list):
        def __getitem__(self, index):
            raise ValueError("odd")

    class Listed(Taskset):
        def load_tasks(self):
            return Odd([Task(prompt="a")])

    class Placed(Taskset):
        def count(self):
            return 1

        def task_at(self, index):
            raise ValueError("odd")

    with raises_code("taskset", "Listed.load_tasks()"):
        Listed()[0]
    for ask in (lambda taskset: taskset[0], list):
        with raises_code("taskset", "Placed.task_at(0)", "ValueError: odd"):
            ask(Placed())


def test_a_state_with_draws_that_cannot_be_is_refused_whole():
    async def restore(**entry):
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                plain = {
                    "streams": {"s": entry, "t": {"index": 3}},
                    "taskset": (await raw.ask(b"1", "state"))["state"]["taskset"],
                }
                return (await raw.ask(b"2", "restore", state=plain))["kind"], server.streams.cursors

    for index in (5, -1):
        assert run(restore(index=5, pending=[{"index": index}])) == ("usage", {})
    assert run(restore(index=5, pending=[{"index": 4}])) == (None, {"s": 5, "t": 3})
