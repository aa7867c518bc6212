"""The in-process host: one order, named cursors, groups, live episodes, state that refuses what changed."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from command_line import ROOT
from raising import raises_code
from serving import until

from treetune import Environment, Mixture, Outcome, ShuffleConfig, Step, Task, Taskset, TasksetConfig
from treetune.core.contract import Limits
from treetune.errors import EmptyTasksetError
from treetune.models import load_policy
from treetune.play import reader
from treetune.play.episode_table import SessionLimits
from treetune.play.host import LocalHost, always
from treetune.play.streams import State
from treetune.tasksets.arithmetic import Arithmetic


class Letters(Taskset):
    def load_tasks(self):
        for letter in "abcdefgh":
            yield Task(prompt=letter, reward_spec={"ground_truth": letter})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


class Endless(Letters):
    """Only a generator, and one that counts how often it is started."""

    INFINITE = True
    started = 0

    def load_tasks(self):
        type(self).started += 1
        number = 0
        while True:
            yield Task(prompt=str(number), reward_spec={"ground_truth": str(number)})
            number += 1


class Ranked(Letters):
    def score_group(self, task, traces):
        return [float(number) for number, _ in enumerate(traces)]


class Counting(Environment):
    closed: list[int] = []

    def step(self, action):
        return Step(f"you said {action.text}", reward=1.0, done=action.text == "stop")

    def close(self):
        self.closed.append(self.task.idx)


class Talks(Letters):
    def environment(self, task):
        return Counting(task)


def host_of(taskset, model="scripted:gold", **options):
    return LocalHost.open(taskset, always(load_policy(model, taskset)), **options)


def shuffled(cls, seed=3):
    return cls(TasksetConfig(shuffle=ShuffleConfig(seed=seed)))


def run(coroutine):
    return asyncio.run(coroutine)


def drawn(taskset, number, stream=""):
    async def draw():
        host = await host_of(taskset)
        return [await host.sample(stream=stream) for _ in range(number)]

    return run(draw())


@pytest.mark.parametrize(
    "make", [Letters, lambda: shuffled(Letters), Arithmetic, Endless], ids=["list", "shuffled", "infinite", "reader"]
)
def test_epoch_0_is_the_order_of_select_tasks(make):
    assert drawn(make(), 8) == make().select_tasks(8)


def test_every_task_comes_once_in_each_epoch_in_an_order_of_its_own():
    tasks = [task.prompt for task in drawn(shuffled(Letters), 24)]
    epochs = [tasks[:8], tasks[8:16], tasks[16:]]
    assert [sorted(epoch) for epoch in epochs] == [sorted("abcdefgh")] * 3
    assert epochs[0] != epochs[1]


def test_a_mixture_is_served_like_any_other():
    def mixture():
        return Mixture.of([shuffled(Letters), Arithmetic()], [1, 2], seed=5)

    assert drawn(mixture(), 50) == mixture().select_tasks(50)


def test_named_streams_have_cursors_of_their_own():
    async def draw(taskset):
        host = await host_of(taskset)
        a = [(await host.sample(stream="a")).idx for _ in range(5)]
        b = [(await host.sample(stream="b")).idx for _ in range(3)]
        a += [(await host.sample(stream="a")).idx for _ in range(2)]
        return a, b, (await host.info()).cursors

    for taskset in (Letters(), Endless()):
        assert run(draw(taskset)) == ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2], {"a": 7, "b": 3})


def test_an_index_gives_its_task_and_moves_no_cursor():
    async def draw():
        host = await host_of(shuffled(Letters))
        there = [await host.sample(index) for index in (3, 11)]
        return there, [await host.sample() for _ in range(12)]

    there, ordered = run(draw())
    assert there == [ordered[3], ordered[11]]


def test_a_generator_is_read_once_in_order_and_by_many_at_once():
    async def draw():
        Endless.started = 0
        host = await host_of(Endless())
        tasks = await asyncio.gather(*(host.sample() for _ in range(500)))
        with raises_code("usage", "task_at"):
            await host.sample(3)
        return [task.idx for task in tasks], Endless.started

    assert run(draw()) == (list(range(500)), 1)


def test_a_generator_gives_its_latest_tasks_again():
    async def draw():
        host = await host_of(Endless())
        for _ in range(reader.KEPT + 500):
            draw = host.streams.advance()
            task = await host.streams.fetch(draw)
            assert task.idx == draw.index
        Endless.started = 0
        again = await host.streams.fetch(msgspec.structs.replace(draw, index=draw.index - 1000))
        return again.idx, draw.index - 1000, Endless.started

    again, wanted, started = run(draw())
    assert (again, started) == (wanted, 0)


def test_a_generator_that_fails_says_so_and_gives_what_came_before(monkeypatch):
    monkeypatch.setattr(reader, "FIRST_WAIT", 0.01)

    class Breaks(Endless):
        def load_tasks(self):
            yield from [Task(prompt="a"), Task(prompt="b")]
            raise ValueError("the well is dry")

    async def draw():
        host = await host_of(Breaks())
        tasks = [(await host.sample()).prompt for _ in range(2)]
        with raises_code("stream-ended", "the well is dry"):
            await host.sample()
        return tasks

    assert run(draw()) == ["a", "b"]


def test_an_empty_taskset_is_refused_when_the_host_opens():
    class Nothing(Letters):
        def load_tasks(self):
            return []

    with pytest.raises(EmptyTasksetError):
        run(host_of(Nothing()))


@pytest.mark.parametrize("make", [lambda: shuffled(Letters), Arithmetic, Endless], ids=["finite", "infinite", "reader"])
def test_a_restored_host_goes_on_where_the_state_was_taken(make):
    async def draw():
        first = await host_of(make())
        for _ in range(13):
            await first.sample(stream="s")
        saved = msgspec.msgpack.encode(await first.state())
        expected = [await first.sample(stream="s") for _ in range(20)]
        second = await host_of(make())
        await second.restore(msgspec.msgpack.decode(saved, type=State))
        restored = [await second.sample(stream="s") for _ in range(20)]
        await first.restore(msgspec.msgpack.decode(saved, type=State))
        assert [await first.sample(stream="s") for _ in range(20)] == expected
        return len(saved), expected, restored

    size, expected, restored = run(draw())
    assert restored == expected
    assert size < 2000


def test_a_state_of_other_tasks_is_refused_with_what_changed():
    class Fewer(Letters):
        letters = "abcdefgh"

        def load_tasks(self):
            return [Task(prompt=letter) for letter in self.letters]

    async def restore(**changed):
        state = await (await host_of(Fewer())).state()
        other = await host_of(Fewer(changed.get("config")))
        await other.restore(state)

    run(restore())
    with raises_code("cannot-resume", "shuffle", "-> {'seed': 1}"):
        run(restore(config=TasksetConfig(shuffle=ShuffleConfig(seed=1))))

    async def other_data(letters):
        host = await host_of(Fewer())
        state = await host.state()
        Fewer.letters = letters
        try:
            await (await host_of(Fewer())).restore(state)
        finally:
            Fewer.letters = "abcdefgh"

    with raises_code("cannot-resume", "number of tasks: 8 -> 7"):
        run(other_data("abcdefg"))
    with raises_code("cannot-resume"):
        run(other_data("abcdefgx"))


def test_a_rollout_of_a_group_scored_taskset_is_refused_with_the_remedy():
    async def both():
        host = await host_of(Ranked())
        assert (await host.info()).requires_group_scoring
        task = await host.sample()
        with raises_code("usage", "run_group"):
            await host.run_rollout(task)
        return await host.run_group(task, 3)

    traces = run(both())
    assert [trace.reward for trace in traces] == [0.0, 1.0, 2.0]
    assert [trace.rollout for trace in traces] == [0, 1, 2]


def test_a_stepped_episode_is_scored_alone_and_the_host_says_so_once():
    class AlsoRanked(Letters):
        def score_group(self, task, traces):
            return [2.0] * len(traces)

    async def play():
        host = await host_of(AlsoRanked())
        for _ in range(2):
            started = await host.start(await host.sample())
            await host.cancel(started.episode)

    with pytest.warns(UserWarning, match="score_group") as said:
        run(play())
    assert [str(one.message) for one in said if "score_group() of AlsoRanked" in str(one.message)] == [
        "score_group() of AlsoRanked is not called for episodes that a client steps: each is scored alone "
        "(run_group() plays and scores a whole group)"
    ]


def test_a_named_request_can_be_cancelled():
    class Waits(Letters):
        begun = ended = False

        async def reward(self, task, answer):
            type(self).begun = True
            try:
                await asyncio.sleep(60)
            finally:
                type(self).ended = True

    async def cancel():
        host = await host_of(Waits())
        rollout = asyncio.create_task(host.run_rollout(await host.sample(), request="r1"))
        await until(lambda: Waits.begun)
        assert await host.cancel("r1")
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert not await host.cancel("r1")
        return Waits.ended, (await host.health()).in_flight

    assert run(cancel()) == (True, 0)


def test_an_episode_is_stepped_by_turn_and_a_repeated_turn_repeats_its_answer():
    async def play():
        Counting.closed.clear()
        host = await host_of(Talks())
        started = await host.start(await host.sample())
        assert started.observation.messages() == [{"role": "user", "content": "a"}]
        first = await host.step(started.episode, "hello", 0)
        assert await host.step(started.episode, "hello", 0) is first
        with raises_code("wrong-turn", "turn 1", "not 5"):
            await host.step(started.episode, "x", 5)
        last = await host.step(started.episode, "stop", 1)
        assert await host.step(started.episode, "stop", 1) == last
        with raises_code("episode-over"):
            await host.step(started.episode, "x", 2)
        other = await host.start(await host.sample())
        assert await host.cancel(other.episode)
        with raises_code("episode-over"):
            await host.step(other.episode, "x", 0)
        return first.observation.content, last.done, Counting.closed

    assert run(play()) == ("you said hello", True, [0, 1])


def test_a_request_can_narrow_the_hosts_limits_but_not_widen_them():
    class Slow(Letters):
        async def reward(self, task, answer):
            await asyncio.sleep(30)

    async def outcomes():
        host = await host_of(Slow(), limits=Limits(timeout=0.1))
        task = await host.sample()
        return [(await host.run_rollout(task, limits=limits)).outcome for limits in (None, Limits(timeout=20.0))]

    assert run(outcomes()) == [Outcome.TIMEOUT] * 2


def test_a_curriculum_follows_observed_rewards_and_its_state_goes_on():
    from treetune import load_taskset

    strength = {1: 1.0, 2: 1.0, 3: 0.6, 4: 0.0, 5: 0.0}

    async def learn():
        host = await host_of(load_taskset(f"{ROOT}/examples/curriculum.yaml"))
        levels = []
        for _ in range(400):
            task = await host.sample()
            levels.append(task.extra_info["level"])
            await host.observe(task, strength[levels[-1]])
        state = await host.state()
        expected = [await host.sample() for _ in range(50)]
        other = await host_of(load_taskset(f"{ROOT}/examples/curriculum.yaml"))
        await other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State))
        return levels, expected, [await other.sample() for _ in range(50)]

    levels, expected, restored = run(learn())
    assert set(levels[:5]) == {1, 2, 3, 4, 5}, "nothing is known yet"
    assert levels[-100:].count(3) > 80, "what is solved six times in ten"
    assert restored == expected


def test_an_episode_is_not_idle_while_a_step_runs():
    class Patient(Environment):
        closed = False

        async def step(self, action):
            await asyncio.sleep(1.0)
            return Step("closed" if Patient.closed else "open", done=action.text == "stop")

        def close(self):
            Patient.closed = True

    class Patience(Letters):
        def environment(self, task):
            return Patient(task)

    async def play():
        host = await LocalHost.open(Patience(), always(None))
        terms = SessionLimits(idle_seconds=0.6)
        episode = (await host.start(await host.sample(), terms=terms)).episode
        seen = [(await host.step(episode, word, terms=terms)).observation.content for word in ("go", "on")]
        while not Patient.closed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return seen, list(host.episodes.live)

    assert run(play()) == (["open", "open"], [])


class Large(Endless):
    """Counts the copies that are made of it."""

    copies = 0

    def __deepcopy__(self, memo):
        type(self).copies += 1
        return Large()


def test_streams_over_a_generator_share_a_reader_while_they_are_near_each_other():
    async def draw():
        Large.copies = 0
        host = await host_of(Large())
        for number in range(200):
            for stream in "abcd":
                assert (await host.sample(stream=stream)).idx == number
        near = Large.copies
        for number in range(200, reader.KEPT + 400):
            assert (await host.sample(stream="a")).idx == number
        for number in range(200, 300):  # the task was read too long ago
            assert (await host.sample(stream="b")).idx == number
            assert (await host.sample(stream="c")).idx == number
        apart, readers = Large.copies, len(host.streams.readers)
        for stream in "bcd":  # which catch up
            for _ in range(reader.KEPT):
                await host.sample(stream=stream)
        assert (await host.sample(stream="d")).idx == reader.KEPT + 200
        return near, apart, readers, Large.copies, len(host.streams.readers)

    assert run(draw()) == (0, 1, 2, 2, 1)
