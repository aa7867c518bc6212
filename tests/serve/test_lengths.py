"""A taskset that has not the tasks it says, and an index that no task has, are told alike by eval and every server."""

from __future__ import annotations

import asyncio

import pytest
from http_playing import playing
from raising import raises_code
from serving import Numbers, served

from treetune import Mixture, Task, Taskset, Union
from treetune.core.taskset_config import ShuffleConfig, TasksetConfig
from treetune.errors import TasksetError, UsageError
from treetune.models import load_policy
from treetune.play import reader
from treetune.play.host import LocalHost, always
from treetune.serve.errors import Misused, ServeError


class Base(Taskset):
    def reward(self, task, answer):
        return 1.0

    def gold(self, task):
        return "yes"


class EndsEarly(Base):
    INFINITE = True

    def load_tasks(self):
        return (Task(prompt=str(number)) for number in range(3))


class EndsAtOnce(Base):
    INFINITE = True

    def load_tasks(self):
        return []


class EndsEarlyByIndex(Base):
    INFINITE = True

    def task_at(self, index):
        return [Task(prompt="a"), Task(prompt="b"), Task(prompt="c")][index]


class BreaksEarly(Base):
    INFINITE = True

    def load_tasks(self):
        yield Task(prompt="a")
        raise KeyError("b")


class CountsTooMany(Base):
    def load_tasks(self):
        return (Task(prompt=str(number)) for number in range(3))

    def count(self):
        return 4


class CountsTooManyByIndex(Base):
    def task_at(self, index):
        return [Task(prompt="a"), Task(prompt="b"), Task(prompt="c")][index]

    def count(self):
        return 4


class Miscounts(CountsTooManyByIndex):
    said = None

    def count(self):
        return self.said


class CountsBelowNothing(Miscounts):
    said = -3


class CountsText(Miscounts):
    said = "three"


class CountsInHalves(Miscounts):
    said = 3.5


class EndlessAndCounted(EndsEarlyByIndex):
    def count(self):
        return 3


def shuffled(cls):
    return lambda: cls(TasksetConfig(shuffle=ShuffleConfig(seed=1)))


BROKEN = {
    EndsEarly: (TasksetError, "EndsEarly declares INFINITE = True, but it ended after 3 tasks"),
    EndsAtOnce: (TasksetError, "EndsAtOnce declares INFINITE = True, but it ended after 0 tasks"),
    EndsEarlyByIndex: (
        TasksetError,
        "EndsEarlyByIndex declares INFINITE = True, but task_at(3) failed: IndexError: list index out of range",
    ),
    BreaksEarly: (TasksetError, "BreaksEarly.load_tasks() failed: KeyError: 'b'"),
    CountsTooMany: (TasksetError, "CountsTooMany.count() says 4, but it ended after 3 tasks"),
    shuffled(CountsTooMany): (TasksetError, "CountsTooMany.count() says 4, but it ended after 3 tasks"),
    CountsTooManyByIndex: (
        TasksetError,
        "CountsTooManyByIndex.count() says 4, but task_at(3) failed: IndexError: list index out of range",
    ),
    shuffled(CountsTooManyByIndex): (
        TasksetError,
        "CountsTooManyByIndex.count() says 4, but task_at(3) failed: IndexError: list index out of range",
    ),
    Miscounts: (TasksetError, "Miscounts.count() returned None"),
    shuffled(Miscounts): (TasksetError, "Miscounts.count() returned None"),
    CountsBelowNothing: (TasksetError, "CountsBelowNothing.count() returned -3"),
    CountsText: (TasksetError, "CountsText.count() returned 'three'"),
    CountsInHalves: (TasksetError, "CountsInHalves.count() returned 3.5"),
    EndlessAndCounted: (TasksetError, "EndlessAndCounted.count() returned 3"),
    lambda: Mixture.of([CountsTooMany()], [1]): (
        TasksetError,
        "CountsTooMany.count() says 4, but it ended after 3 tasks",
    ),
    lambda: Mixture.of([EndsEarly()], [1]): (
        TasksetError,
        "EndsEarly declares INFINITE = True, but it ended after 3 tasks",
    ),
    lambda: Union.of([CountsTooMany()]): (TasksetError, "CountsTooMany.count() says 4, but it ended after 3 tasks"),
    lambda: Union.of([Miscounts()]): (TasksetError, "Miscounts.count() returned None"),
}


async def by_draw(make):
    make().select_tasks(6)


async def by_host(make):
    taskset = make()
    host = await LocalHost.open(taskset, always(load_policy("scripted:gold", taskset)))
    for _ in range(6):
        await host.sample()


async def by_zmq(make):
    async with served(make()) as client:
        for _ in range(6):
            await client.sample()


async def by_http(make):
    async with playing(make()) as client:
        for _ in range(6):
            await client.good("start", {})


@pytest.mark.parametrize("way", [by_draw, by_host, by_zmq, by_http], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("make", "told"), BROKEN.items(), ids=[message for _, message in BROKEN.values()])
def test_a_taskset_without_the_tasks_it_says_is_told_alike(make, told, way, monkeypatch):
    monkeypatch.setattr(reader, "FIRST_WAIT", 0.01)
    kind, message = told
    # An HTTP client has the answer alone; the others raise an error of the same class, or what stands for it.
    with pytest.raises((kind, ServeError, AssertionError)) as caught:
        asyncio.run(asyncio.wait_for(way(make), 60))
    assert message in str(caught.value)


def test_eval_tells_it_as_a_server_does(tmp_path, treetune):
    (tmp_path / "early.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Early(Taskset):\n"
        "    INFINITE = True\n"
        "    def load_tasks(self): return [Task(prompt='a'), Task(prompt='b')]\n"
        "    def reward(self, task, answer): return 1.0\n"
        "    def gold(self, task): return 'yes'\n"
    )
    result = treetune("eval", "early.py:Early", "-m", "scripted:gold", "-n", "5", "-o", "run", "--json")
    assert result.code == 3
    assert "Early declares INFINITE = True, but it ended after 2 tasks" in result.json["error"]
    assert treetune("eval", "early.py:Early", "-m", "scripted:gold", "-n", "2", "-o", "two").code == 0


def test_a_position_beyond_the_last_task_is_wrong_usage():
    class Few(CountsTooManyByIndex):
        def count(self):
            return 3

    class FewLoaded(CountsTooMany):
        def count(self):
            return 3

    for taskset in (Few(), FewLoaded()):
        with raises_code("usage", "task 3", "0 to 2"):
            taskset[3]


def test_counting_fewer_than_there_are_gives_so_many():
    class Fewer(CountsTooMany):
        def count(self):
            return 2

    assert [task.prompt for task in Fewer().select_tasks()] == ["0", "1"]
    assert [Fewer().at(index).prompt for index in range(3)] == ["0", "1", "0"]


WRONG = [-1, 2**62, 2**70, "3", 1.5]


@pytest.mark.parametrize("index", WRONG, ids=repr)
def test_an_index_that_no_task_has_is_refused_alike(index):
    message = f"an index is a number from 0 to 2**62, got {index!r}"

    async def ask():
        taskset = Numbers()
        host = await LocalHost.open(taskset, always(load_policy("scripted:gold", taskset)))
        with pytest.raises(UsageError) as here:
            await host.sample(index)
        told = [here.value]
        if isinstance(index, int):
            async with served(Numbers()) as client:
                with pytest.raises(Misused) as there:
                    await client.sample(index)
            told.append(there.value)
            async with playing(Numbers()) as client:
                status, answer = await client.post("start", {"task_index": index})
            assert (status, answer["kind"], answer["path"]) == (422, "usage", "$.task_index")
            told.append(answer["error"])
        return told

    assert [str(error) for error in asyncio.run(ask())] == [message] * (3 if isinstance(index, int) else 1)
    for taskset in (Numbers(), Mixture.of([Numbers()], [1]), Union.of([CountsTooMany()])):
        for ask_for in (taskset.at, taskset.__getitem__) if index not in (2**62, 2**70) else (taskset.at,):
            with pytest.raises(UsageError) as caught:
                ask_for(index)
            assert str(caught.value) == message


def test_no_index_is_no_position():
    with raises_code("usage", "2**62", "None"):
        Numbers()[None]
    with raises_code("usage", "2**62", "None"):
        Numbers().at(None)
