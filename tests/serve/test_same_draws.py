"""A draw gives the same task wherever it is made: in this process, in a server, by the workers of a pool, over HTTP."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from http_playing import playing
from packing import MANY
from raising import raises_code
from serving import Dear, Numbers, Stream, run, serving, shuffled

from treetune import Mixture, Task, Taskset
from treetune.config.structs import convert
from treetune.core.mixture import Union
from treetune.models import load_policy
from treetune.play.host import LocalHost, always
from treetune.serve.zmq.client import EnvClient

DRAWS = 2_000 if MANY else 300
BATCH = 500


class Loaded(Taskset):
    """Finite, without `task_at`."""

    size = 70

    def load_tasks(self):
        for number in range(self.size):
            yield Task(prompt=f"{type(self).__name__} {number}", reward_spec={"ground_truth": f"{number}"})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


class Few(Loaded):
    size = 9


class Placed(Loaded):
    """Finite, with `task_at`."""

    def count(self):
        return 130

    def task_at(self, index):
        return Task(prompt=f"placed {index}", reward_spec={"ground_truth": f"{index}"})

    load_tasks = Taskset.load_tasks


def learning(*sources, weights=(3, 1), seed=5):
    profile = {"schedule": {"kind": "pools"}, "online": 0.1}
    return Mixture(convert({"profile": profile}, Mixture.config_type), sources, weights, seed)


KINDS = {
    "finite, loaded": lambda: shuffled(Loaded),
    "finite, task_at": lambda: shuffled(Placed),
    "generator": Stream,
    "infinite, task_at": Numbers,
    "union": lambda: Union.of([shuffled(Loaded), Placed()]),
    "mixture": lambda: Mixture.of([shuffled(Loaded), Few(), Numbers()], [3, 1, 2], seed=4),
    "mixture of a generator": lambda: Mixture.of([shuffled(Loaded), Stream()], [1, 2], seed=4),
    "learning mixture": lambda: learning(shuffled(Loaded), Few()),
    "mixture of mixtures": lambda: Mixture.of(
        [Mixture.of([shuffled(Loaded), Numbers()], [1, 1], seed=1), Union.of([Few(), Placed()])], [2, 1]
    ),
    "mixture of a learning mixture": lambda: Mixture.of(
        [learning(shuffled(Loaded), Few()), Mixture.of([Few(), Numbers()], [1, 1], seed=7)], [2, 1], seed=3
    ),
    "learning mixture of a mixture": lambda: learning(Union.of([shuffled(Loaded), Few()]), Numbers()),
}
WITHOUT_INDEX = {"generator", "mixture of a generator"}


def reward_of(task):
    """What a trainer observes: one source is half solved, the others are solved."""
    return 0.5 if task.data_source == "Loaded" else 1.0


async def draw(host, number=DRAWS):
    """The tasks of a stream, whose rewards are observed as they come."""
    drawn = []
    for _ in range(number):
        task = await host.sample()
        drawn.append((task.idx, task.prompt))
        await host.observe(task, reward_of(task))
    return drawn


async def draw_here(make, number=DRAWS):
    taskset = make()
    return await draw(await LocalHost.open(taskset, always(load_policy("scripted:gold", taskset))), number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1], ids=["server", "pool"])
@pytest.mark.quick_cases(6)
def test_a_server_and_a_pool_give_the_tasks_that_this_process_gives(kind, workers):
    make = KINDS[kind]
    taskset = make()
    indices = range(min(taskset._size() or DRAWS, DRAWS))

    async def play():
        async with (
            playing(make(), workers=workers, address="tcp://127.0.0.1:0", capacity=2 * BATCH) as played,
            EnvClient(played.server.address) as client,
        ):
            if workers and not played.server.streams.sequential:
                played.server.streams.cheap = False  # the workers make the tasks
            return await draw(client), await start_each(played, indices)

    drawn, started = run(play())
    assert drawn == run(draw_here(make))
    if kind in WITHOUT_INDEX:
        assert started is None
        with raises_code("usage", "task_at"):
            run(_sample_at(taskset, 0))
    else:
        assert started == [taskset.at(index).prompt for index in indices]


async def start_each(played, indices):
    """What episodes that are started by their index show first, over HTTP; None where it has no index."""
    info = (await played.get("/api/task/info"))[1]
    if not info["by_index"]:
        assert (await played.post("start", {"task_index": 0}))[0] == 422
        return None
    shown = []
    for first in range(0, len(indices), BATCH):
        asked = [{"task_index": index} for index in indices[first : first + BATCH]]
        begun = (await played.good("start_batch", {"episodes": asked}))["episodes"]
        assert [one["info"]["task_index"] for one in begun] == [one["task_index"] for one in asked]
        shown += [_text(one["observation"]) for one in begun]
        await played.good("step_batch", {"steps": [{"episode_id": one["episode_id"], "action": "x"} for one in begun]})
    return shown


def _text(observation):
    content = observation["content"]
    return content if isinstance(content, str) else content[0]["content"]


async def _sample_at(taskset, index):
    host = await LocalHost.open(taskset, always(load_policy("scripted:gold", taskset)))
    return await host.sample(index)


@pytest.mark.parametrize("workers", [0, 1], ids=["server", "pool"])
def test_the_shares_of_a_served_mixture_follow_what_was_observed(workers):
    async def draw_there():
        taskset = learning(shuffled(Loaded), Few())
        async with serving(taskset, workers=workers) as server, EnvClient(server.address) as client:
            drawn, state = await draw(client), await client.state()
            return drawn, state.streams[""].curriculum["drawn"]

    drawn, counted = run(draw_there())
    sources = Counter(prompt.split()[0] for _, prompt in drawn)
    assert [sources["Loaded"], sources["Few"]] == counted
    assert sources["Few"] < 0.15 * DRAWS  # it is solved: without observations it has a quarter
    assert len({prompt for _, prompt in drawn}) == Loaded.size + Few.size


class Here(Loaded):
    """Says in which process it was loaded."""

    def load_tasks(self):
        for number in range(50):
            yield Task(prompt=str(number), extra_info={"pid": os.getpid()})


def test_the_workers_of_a_pool_do_not_load_what_the_broker_has():
    async def draw_there():
        taskset = Mixture.of([Here(), Dear()], [1, 1])
        async with serving(taskset, workers=1) as server, EnvClient(server.address) as client:
            server.streams.cheap = False
            tasks = [await client.sample() for _ in range(40)]
            return {(task.data_source, task.extra_info["pid"] == os.getpid()) for task in tasks}

    assert run(draw_there()) == {("Here", True), ("Dear", False)}
