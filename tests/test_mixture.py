"""Mixtures: several tasksets by weight, as one."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Mixture, Task, Taskset, TasksetConfig, Union, build_taskset
from treetune.core.from_config import node_of
from treetune.core.interleave import Interleave, Spread
from treetune.core.taskset_config import ShuffleConfig
from treetune.errors import ConfigError, UsageError
from treetune.play.streams import Draw, Streams

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


class Letters(Taskset):
    def __init__(self, letters: str, seed: int | None = None, name: str = "letters"):
        super().__init__(TasksetConfig(shuffle=None if seed is None else ShuffleConfig(seed=seed)))
        self.letters, self.name = letters, name

    def load_tasks(self):
        return [Task(prompt=letter) for letter in self.letters]

    def reward(self, task, answer):
        return len(self.letters)


class Numbers(Taskset):
    INFINITE = True

    def __init__(self, config=None):
        super().__init__(config)
        self.built = 0

    def load_tasks(self):
        number = 0
        while True:
            self.built += 1
            yield Task(prompt=str(number))
            number += 1


@given(weights, st.none() | st.integers(), st.integers(0, 10**12))
def test_any_index_is_reached_directly_as_by_counting(parts, seed, start):
    walked, jumped = Interleave(parts, seed), Interleave(parts, seed)
    draws = [walked.at(index) for index in range(start, start + 30)]
    assert [jumped.at(index) for index in reversed(range(start, start + 30))] == draws[::-1]


@given(weights, st.none() | st.integers())
def test_each_stream_is_drawn_in_order_without_a_gap(parts, seed):
    mix = Interleave(parts, seed)
    drawn: Counter[int] = Counter()
    for index in range(400):
        stream, within = mix.at(index)
        assert within == drawn[stream]
        drawn[stream] += 1


@given(weights, st.none() | st.integers())
def test_shares_converge_to_the_weights(parts, seed):
    mix = Interleave(parts, seed)
    drawn = Counter(mix.at(index)[0] for index in range(2000))
    for stream, weight in enumerate(parts):
        # Evenly spread: never more than a handful of draws away from the exact share.
        assert abs(drawn[stream] - 2000 * weight / sum(parts)) < 8


def test_seeds_change_the_interleaving():
    assert [Interleave([1, 2], 7).at(i) for i in range(50)] != [Interleave([1, 2], 8).at(i) for i in range(50)]


@pytest.mark.parametrize("bad", [[], [0], [1, -1], [float("nan")], [float("inf")], [1, 1e-15]])
def test_impossible_weights_are_refused(bad):
    with pytest.raises(UsageError):
        Interleave(bad)


@given(st.integers(0, 10**6), st.sampled_from([None, 0, 7]))
def test_resuming_at_any_index_equals_never_having_stopped(start, seed):
    def mixture():
        return Mixture.of([Letters("abcde", seed), Letters("XYZ", seed)], [2, 1])

    unbroken = mixture()
    expected = [unbroken.at(index) for index in range(start, start + 20)]
    for stop in (1, 7, 19):
        resumed = mixture()
        assert [resumed.at(index) for index in range(start + stop, start + 20)] == expected[stop:]


@given(st.sampled_from([None, 0, 7, 8]))
def test_every_task_of_a_finite_source_appears_once_per_pass(seed):
    mixture = Mixture.of([Letters("abcdefg", seed), Letters("XYZ", seed)], [1, 2])
    drawn = [mixture.at(index).prompt for index in range(300)]
    for letters in ("abcdefg", "XYZ"):
        own = [prompt for prompt in drawn if prompt in letters]
        passes = [own[start : start + len(letters)] for start in range(0, len(own), len(letters))]
        for one_pass in passes[:-1]:
            assert sorted(one_pass) == sorted(letters)
        if seed is not None:
            assert len({tuple(one_pass) for one_pass in passes[:-1]}) > 1


def test_an_infinite_source_is_drawn_lazily():
    numbers = Numbers()
    mixture = Mixture.of([numbers, Letters("abc")], [1, 1])
    prompts = [task.prompt for task in mixture.draw(20)]
    own = [prompt for prompt in prompts if prompt.isdigit()]
    assert own == [str(number) for number in range(len(own))]
    assert numbers.built == len(own)


def test_a_task_is_scored_by_the_source_it_came_from_also_when_nested():
    inner = Mixture.of([Letters("ab"), Letters("vwxyz")], [1, 1])
    outer = Mixture.of([inner, Letters("QRS")], [2, 1])
    for index in range(60):
        task = outer.at(index)
        assert outer[task.idx] == task
        assert outer.reward(task, "") == {"a": 2, "b": 2, **dict.fromkeys("vwxyz", 5)}.get(task.prompt, 3)


def test_a_union_has_every_task_once():
    union = Union.of([Letters("abc"), Letters("XY")])
    assert [union[position].prompt for position in range(5)] == list("abcXY")
    assert [task.prompt for task in union.select_tasks()] == list("aXbYc")
    assert [task.idx for task in union.select_tasks()] == [0, 3, 1, 4, 2]
    assert union.reward(union[4], "") == 2
    with raises_code("usage", "Numbers", "mixture"):
        Union.of([Numbers()])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_the_first_items_of_a_spread_are_some_of_each_in_proportion(sizes):
    spread, total = Spread(sizes), sum(sizes)
    order = [spread.at(index) for index in range(total)]
    assert sorted(order) == [(stream, item) for stream, size in enumerate(sizes) for item in range(size)]
    for end in range(1, total + 1):
        counts = Counter(stream for stream, _ in order[:end])
        assert all(abs(counts[stream] - end * size / total) < len(sizes) for stream, size in enumerate(sizes))
        assert end < sum(map(bool, sizes)) or all(counts[stream] for stream, size in enumerate(sizes) if size)
    with pytest.raises(IndexError):
        spread.at(total)


def test_some_tasks_of_a_union_are_of_all_its_sources():
    union = Union.of([Letters("a" * 400), Letters("b" * 200), Letters("c" * 3)])
    assert Counter(task.prompt for task in union.draw(100)) == {"a": 66, "b": 33, "c": 1}


def test_a_mixture_is_declared_in_config():
    mixture = build_taskset(
        {
            "id": "mixture",
            "shuffle": {"seed": 3},
            "sources": [{"id": "arithmetic", "level": 2, "weight": 3}, {"id": "reverse-text"}],
        }
    )
    sources = Counter(task.data_source for task in mixture.draw(400))
    assert abs(sources["arithmetic"] - 300) < 6
    assert mixture.sources[1].order_seed is not None


def test_sources_of_a_shuffled_mixture_never_become_copies_of_each_other():
    def distinct(*sources):
        mixture = build_taskset({"id": "mixture", "shuffle": {"seed": 1}, "sources": list(sources)})
        return len({task.uid for task in mixture.draw(200)})

    level = {"id": "arithmetic", "level": 5}
    assert distinct({**level, "seed": 1}, {**level, "seed": 2}) > 195
    assert distinct(level, level) > 195
    assert distinct({"id": "mixture", "sources": [level]}, {"id": "mixture", "sources": [level]}) > 195


def test_a_sources_own_seed_and_shuffle_are_kept():
    mixture = build_taskset(
        {
            "id": "mixture",
            "shuffle": {"seed": 1},
            "sources": [
                {"id": "arithmetic", "seed": 5},
                {"id": "arithmetic", "shuffle": {"seed": 6}},
                {"id": "alphabet-sort", "seed": 7},
                {"id": "reverse-text", "shuffle": None},
            ],
        }
    )
    arithmetic, shuffled, finite, unshuffled = mixture.sources
    assert (arithmetic.seed, shuffled.seed, finite.seed) == (5, 6, 7)
    assert finite.order_seed is not None
    assert unshuffled.order_seed is None


def test_a_described_mixture_draws_the_same_tasks():
    node = {"id": "mixture", "shuffle": {"seed": 1}, "sources": [{"id": "arithmetic"}, {"id": "alphabet-sort"}]}
    mixture = build_taskset(node)
    described = node_of(mixture, node)
    assert described["sources"][0]["level"] == 1
    again = build_taskset(described)
    assert [task.uid for task in again.draw(50)] == [task.uid for task in mixture.draw(50)]
    assert node_of(again, described) == described


def test_a_union_keeps_the_order_of_its_sources():
    alone = build_taskset({"id": "reverse-text", "shuffle": {"seed": 3}})
    union = build_taskset({"id": "union", "sources": [{"id": "reverse-text", "shuffle": {"seed": 3}}]})
    assert [task.prompt for task in union.draw()] == [task.prompt for task in alone.draw()]
    assert all(union[task.idx] == task for task in union.draw())
    mixture = build_taskset({"id": "mixture", "sources": [{"id": "reverse-text", "shuffle": {"seed": 3}}]})
    assert [mixture.at(index).prompt for index in range(40)] == [alone.at(index).prompt for index in range(40)]
    with raises_code("taskset", "task 8"):
        union.reward(Task(idx=8), "")


finite = st.builds(Letters, st.text("abcdefghijk", min_size=1, max_size=9), st.none() | st.integers(0, 3))
nested = st.recursive(finite, lambda inner: st.lists(inner, min_size=1, max_size=3).map(Union.of), max_leaves=6)


def streamed(taskset, start, number):
    """The prompts of a stream, as a server draws them."""
    streams = Streams(taskset)
    streams.load()
    return [streams.task(Draw("", index)).prompt for index in range(start, start + number)]


@given(nested, st.integers(0, 50))
def test_a_mixture_or_union_of_one_source_has_its_order_in_every_epoch(source, start):
    alone = [source.at(index) for index in range(start, start + 40)]
    for whole in (Mixture.of([source], [2.5]), Union.of([source]), Union.of([Union.of([source])])):
        drawn = [whole.at(index) for index in range(start, start + 40)]
        assert [task.prompt for task in drawn] == [task.prompt for task in alone]
        assert [whole[task.idx] for task in drawn] == drawn
        assert streamed(whole, start, 40) == [task.prompt for task in alone]


@given(st.lists(nested, min_size=1, max_size=4), st.integers(0, 4))
def test_in_each_epoch_of_a_union_every_source_goes_through_its_own_epoch(sources, epoch):
    union, sizes = Union.of(sources), [source.count() for source in sources]
    count = sum(sizes)
    drawn = [union.at(index) for index in range(epoch * count, (epoch + 1) * count)]
    own = [
        [source.at(epoch * size + at).prompt for at in range(size)] for source, size in zip(sources, sizes, strict=True)
    ]
    places = [(union.place(task.idx)[0], task.prompt) for task in drawn]
    assert [[prompt for place, prompt in places if place == number] for number in range(len(sources))] == own
    assert sorted(task.idx for task in drawn) == list(range(count))
    if epoch == 0:
        assert [task.prompt for task in union.draw()] == [task.prompt for task in drawn]


@given(st.lists(nested, min_size=1, max_size=3), st.lists(nested, min_size=1, max_size=3))
def test_every_source_of_a_mixture_comes_in_the_order_that_it_has_alone(one, other):
    sources = [Union.of(one), Union.of(other)]
    mixture = Mixture.of(sources, [1, 2])
    drawn = [(mixture.place(index)[0], mixture.at(index).prompt) for index in range(90)]
    for number, source in enumerate(sources):
        own = [prompt for which, prompt in drawn if which == number]
        assert own == [source.at(index).prompt for index in range(len(own))]


def test_a_shuffled_source_of_a_union_has_a_new_order_in_every_epoch():
    union = Union.of([Letters("abcdefgh", 7), Letters("XYZ")])
    epochs = [[union.at(index).prompt for index in range(at * 11, at * 11 + 11)] for at in range(4)]
    assert len({"".join(filter(str.islower, epoch)) for epoch in epochs}) == 4
    assert {"".join(filter(str.isupper, epoch)) for epoch in epochs} == {"XYZ"}


def test_a_shuffle_of_the_union_itself_mixes_its_sources():
    union = build_taskset({"id": "union", "shuffle": {"seed": 1}, "sources": [{"id": "reverse-text"}] * 2})
    epochs = [[union.at(index).idx for index in range(at * 16, at * 16 + 16)] for at in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert min(epochs[0][8:]) < 8


def test_a_source_that_reads_no_seed_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixture = Mixture.of([Numbers(TasksetConfig(shuffle=ShuffleConfig(seed=1)))], [1])
        mixture.draw(2)
        mixture.draw(2)
    assert len([warning for warning in caught if "reads no seed" in str(warning.message)]) == 1


def test_faults_in_sources_are_reported_together_with_their_paths():
    with pytest.raises(ConfigError) as caught:
        build_taskset(
            {"id": "mixture", "sources": [{"id": "arithmetic", "levl": 2}, {"id": "arithmetic", "level": "x"}]}
        )
    assert [path for path, _ in caught.value.faults] == ["taskset.sources[0].levl", "taskset.sources[1].level"]
