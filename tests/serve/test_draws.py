"""A draw that fails is not drawn: it is tried again, and after so many tries it is skipped, named and counted."""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest
from http_playing import playing
from serving import Numbers, Raw, run, serving, until

from treetune import Mixture, Task, Taskset
from treetune.errors import TasksetError, TreetuneError
from treetune.host import LocalHost, always
from treetune.policies import load_policy
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
    """Nine good ones, one that fails twice and then comes, and the next."""
    drawn = [await sample() for _ in range(BAD)]
    for _ in range(2):
        with pytest.raises((TreetuneError, AssertionError), match="the disk is away"):
            await sample()
    broken.unlink()
    return drawn + [await sample() for _ in range(2)]


KINDS = {"cheap": Wobbly, "dear": DearWobbly, "generator": WobblyStream}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_in_process(kind, broken):
    async def draw():
        host = await LocalHost.open(taskset := kind(), always(load_policy("scripted:gold", taskset)))

        async def sample():
            return (await host.sample()).idx

        return await draw_until_mended(sample, broken)

    assert run(draw()) == list(range(BAD + 2))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_in_a_server(kind, broken):
    async def draw():
        async with serving(kind()) as server, EnvClient(server.address) as client:

            async def sample():
                return (await client.sample()).idx

            return await draw_until_mended(sample, broken), server.streams.pending.skipped

    assert run(draw()) == (list(range(BAD + 2)), 0)


def test_where_a_worker_makes_the_tasks(broken, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_BROKEN", str(broken))

    async def draw():
        async with serving(InWorkers(), workers=1) as server, EnvClient(server.address) as client:

            async def sample():
                return (await client.sample()).idx

            return server.streams.cheap, await draw_until_mended(sample, broken)

    assert run(draw()) == (False, list(range(BAD + 2)))


class InWorkers(Numbers):
    def task_at(self, index):
        import os

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

    assert run(draw()) == list(range(BAD + 2))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_after_so_many_tries_an_index_is_skipped_and_counted(kind, broken, caplog):
    async def draw():
        async with serving(kind(), draw_tries=2) as server, EnvClient(server.address) as client:
            for _ in range(BAD):
                await client.sample()
            told = []
            for _ in range(2):
                with pytest.raises(ServeError) as failed:
                    await client.sample()
                told.append(str(failed.value))
            stats = (
                (await client.stats())["skipped_draws"],
                "treetune_skipped_draws 1.0" in str(server.metrics.render()),
            )
            broken.unlink()  # a generator gives nothing beyond it
            return told, stats, (await client.sample()).idx

    method = "load_tasks()" if kind is WobblyStream else "task_at(9)"
    (first, last), stats, after = run(draw())
    assert f"{kind.__name__}.{method} failed: OSError: the disk is away" in first
    assert "tried 1 of 2" in first
    assert "index 9 is skipped after 2 tries" in last
    assert (stats, after) == ((1, True), 10)
    assert "index 9 is skipped, after 2 tries" in caplog.text


def test_a_generator_that_raised_is_read_anew_and_burns_no_index(broken):
    async def draw():
        WobblyStream.read = 0
        host = await LocalHost.open(taskset := WobblyStream(), always(load_policy("scripted:gold", taskset)), tries=9)
        for _ in range(BAD):
            await host.sample()
        for _ in range(4):
            with pytest.raises(TasksetError):
                await host.sample()
        state, read = await host.state(), WobblyStream.read
        broken.unlink()
        return state.streams[""], read, [(await host.sample()).idx for _ in range(3)]

    state, read, drawn = run(draw())
    assert (state.index, [(one.index, one.tries) for one in state.pending]) == (10, [(9, 4)])
    assert (read, drawn) == (4, [9, 10, 11])


def test_a_source_of_a_mixture_that_is_dead_does_not_block_the_others(broken):
    async def draw():
        taskset = Mixture.of([WobblyStream(), Numbers()], [1, 1])
        async with serving(taskset, draw_tries=1) as server, EnvClient(server.address) as client:
            found = []
            for _ in range(30):
                try:
                    found.append((await client.sample()).idx)
                except ServeError:
                    found.append(None)
            return found

    found = run(draw())
    place = Mixture.of([WobblyStream(), Numbers()], [1, 1]).place
    assert found == [None if place(index)[0] == 0 and place(index)[1] >= BAD else index for index in range(30)]


@pytest.mark.parametrize("kind", [Wobbly, DearWobbly])
def test_what_failed_is_given_by_the_next_server_after_a_kill(kind, broken, tmp_path):
    async def kill():
        async with serving(kind(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            drawn = [(await client.sample()).idx for _ in range(BAD)]
            with pytest.raises(ServeError, match="tried 1 of 3"):
                await client.sample()
            with pytest.raises(ServeError, match="tried 2 of 3"):
                await client.sample()
            shutil.copytree(tmp_path / "state", tmp_path / "killed")
        async with serving(kind(), state=tmp_path / "killed") as server, EnvClient(server.address) as client:
            with pytest.raises(ServeError, match="skipped after 3"):
                await client.sample()
            shutil.copytree(tmp_path / "killed", tmp_path / "again")
            after = (await client.sample()).idx
        broken.unlink()
        async with serving(kind(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            mended = (await client.sample()).idx
        async with serving(kind(), state=tmp_path / "again") as server, EnvClient(server.address) as client:
            return drawn, after, mended, (await client.sample()).idx

    assert run(kill()) == (list(range(BAD)), 10, 9, 10)


def test_many_at_once_lose_nothing_where_one_fails(broken, tmp_path):
    """Those that were under way go on; what failed comes to whoever asks next, and each index once."""

    async def draw():
        async with serving(DearWobbly(), state=tmp_path / "state") as server, EnvClient(server.address) as client:
            asked = [asyncio.create_task(client.sample()) for _ in range(12)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            shutil.copytree(tmp_path / "state", tmp_path / "killed")
            broken.unlink()
            drawn = [task.idx for task in found if not isinstance(task, ServeError)]
            return sorted(drawn), [(await client.sample()).idx for _ in range(2)]

    assert run(draw()) == ([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11], [9, 12])

    async def go_on():
        async with serving(DearWobbly(), state=tmp_path / "killed") as server, EnvClient(server.address) as client:
            return [(await client.sample()).idx for _ in range(2)]

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
                with pytest.raises(ServeError, match="disk is full"):
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

    with pytest.raises(TasksetError, match=r"Listed\.load_tasks\(\)"):
        Listed()[0]
    for ask in (lambda taskset: taskset[0], list):
        with pytest.raises(TasksetError, match=r"Placed\.task_at\(0\) failed: ValueError: odd"):
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
