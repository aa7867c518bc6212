"""Curricula: what is drawn follows the pass rates of a profile, exactly, at any index and after any restart."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pass_rates import gaussian_target, total_variation, write_rates
from raising import raises_code

from treetune import Mixture, Task, Taskset, TasksetConfig, Union, build_taskset
from treetune.config.structs import convert
from treetune.core.interleave import Credits, Staged, normalise
from treetune.core.profile import Gaussian, Pools
from treetune.errors import ConfigError, EmptyTasksetError, UsageError
from treetune.play.streams import State, Streams

POOLS = {"kind": "pools"}
EIGHTHS = [number / 8 for number in range(9)]


class Numbers(Taskset):
    """90 tasks of three sources."""

    COUNT = 90

    def count(self):
        return self.COUNT

    def task_at(self, index):
        return Task(prompt=f"{self.prefix}{index}", data_source=f"{self.prefix}{'abc'[index % 3]}")

    prefix = ""

    def reward(self, task, answer):
        return 1.0


class Others(Numbers):
    prefix = "other "
    COUNT = 30


def rate_of(position):
    return EIGHTHS[position % 9]


@pytest.fixture
def made(tmp_path):
    """Numbers with a profile in which task n has the pass rate n % 9 / 8."""

    def make(kind=Numbers, rates=None, seed=3, **keys):
        rates = {kind()[n].uid: rate_of(n) for n in range(kind.COUNT)} if rates is None else rates
        path = write_rates(tmp_path / f"{kind.__name__}.jsonl", rates)
        profile = {"path": path, **keys}
        node = {"profile": profile, **({} if seed is None else {"shuffle": {"seed": seed}})}
        return kind(convert(node, TasksetConfig))

    return make


def draw(taskset, count, start=0):
    return [taskset.position_at(index, taskset._size()) for index in range(start, start + count)]


# Which tasks


def test_tasks_outside_the_bounds_are_left_out_and_the_others_come_once_an_epoch(made):
    taskset = made(min_solve_rate=0.2, max_solve_rate=0.8)
    kept = [n for n in range(90) if 0.2 <= rate_of(n) <= 0.8]
    assert taskset._size() == len(kept) == 50
    epochs = [draw(taskset, 50, start) for start in (0, 50)]
    assert [sorted(epoch) for epoch in epochs] == [kept, kept]
    assert epochs[0] != epochs[1]
    assert [task.idx for task in taskset.draw()] == epochs[0]
    assert [task.idx for task in made(seed=None, min_solve_rate=0.2, max_solve_rate=0.8).draw()] == kept
    assert taskset._curriculum.dropped == {"pass rate": 40}


def test_solved_tasks_and_those_without_a_rate_are_dropped_or_kept(made):
    some = {Numbers()[n].uid: rate_of(n) for n in range(45)}
    taskset = made(rates=some, drop_solved=True)
    with pytest.warns(UserWarning, match="45 of 90 tasks of Numbers have no pass rate"):
        assert taskset._size() == 40
    assert taskset._curriculum.dropped == {"pass rate": 5, "no pass rate": 45}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(rates=some, drop_solved=True, unrated=0.5)._size() == 85


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"model": "n"}, "has no 'n'; it has: m"),
        ({"model": "avg@9_m"}, "did you mean 'avg@8_m'"),
        ({"min_solve_rate": 0.9, "max_solve_rate": 0.95}, "the profile drops every task of Numbers: 90"),
        ({"rates": {"another": 0.5}}, "has no pass rate for any task of Numbers"),
        ({"rates": {"another": 7}}, "avg@8_m is 7, not a number from 0 to 1"),
        ({"schedule": {**POOLS, "easy": 1, "hard": 0, "normal": 0}, "max_solve_rate": 0.5}, "that the schedule draws"),
        ({"schedule": POOLS, "shares": {"a": 1, "b": 1, "cc": 1}}, "'cc' has no tasks; did you mean 'c'?"),
        ({"schedule": POOLS, "shares": {"a": 1, "b": 1}}, "'c' has no share"),
    ],
)
def test_a_profile_that_does_not_fit_is_told(made, keys, problem):
    with pytest.raises((ConfigError, EmptyTasksetError, UsageError)) as caught:
        made(**keys).at(0)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ({}, "path is required"),
        ({"path": "x", "min_solve_rate": 0.9, "max_solve_rate": 0.1}, "is above max_solve_rate"),
        ({"path": "x", "online": 0.1}, "online goes with a schedule"),
        (
            {"path": "x", "schedule": {"kind": "pool"}},
            "expected one of pools, gaussian, got 'pool'; did you mean 'pools'?",
        ),
        ({"path": "x", "schedule": {"kind": "gaussian", "widht": 1}}, "did you mean 'width'?"),
        ({"path": "x", "schedule": {"kind": "pools", "hard_to": 0.8}}, "is above easy_above"),
        ({"path": "x", "parameter": "level"}, "parameter and values go together"),
        ({"parameter": "level", "values": [1, 9]}, "profile.values: expected int <= 5 (9)"),
        ({"parameter": "levl", "values": [1]}, "Arithmetic has no key 'levl'; did you mean 'level'?"),
    ],
)
def test_every_fault_of_the_key_is_told(profile, problem):
    with pytest.raises(ConfigError) as caught:
        build_taskset({"id": "arithmetic", "profile": profile})
    assert problem in str(caught.value)


def test_a_profile_that_is_no_file_or_none_is_told(tmp_path):
    for text, problem in ((None, "cannot read"), ("{", "is not a profile"), ('{"uid": 1}\n', "line 1 has no uid")):
        if text is not None:
            (tmp_path / "rates.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            Numbers(convert({"profile": {"path": str(tmp_path / "rates.jsonl")}}, TasksetConfig)).at(0)


def test_a_taskset_that_never_ends_needs_a_parameter_and_a_finite_one_takes_none(tmp_path):
    write_rates(tmp_path / "rates.jsonl", {"x": 0.5})
    with raises_code("usage", "arithmetic", "parameter: level"):
        build_taskset({"id": "arithmetic", "profile": {"path": str(tmp_path / "rates.jsonl")}}).at(0)
    with raises_code("config", "taskset.profile.parameter", "ReverseText"):
        build_taskset({"id": "reverse-text", "profile": {"parameter": "shuffle", "values": [1]}})


# Schedules


def test_what_a_gaussian_draws_is_its_target_at_every_stretch(made):
    keys = {"start": 0.8, "end": 0.2, "width": 0.15, "over": 10_000}
    taskset = made(schedule={"kind": "gaussian", **keys})
    drawn = [rate_of(position) for position in draw(taskset, 12_000)]
    assert total_variation(drawn[:10_000], gaussian_target(EIGHTHS, 10_000, **keys)) < 0.005
    still = {**keys, "start": 0.2}
    assert total_variation(drawn[10_000:], gaussian_target(EIGHTHS, 2_000, **still)) < 0.01


def test_pools_have_their_weights_as_shares_however_many_tasks_they_have(made):
    drawn = [rate_of(position) for position in draw(made(schedule=POOLS), 10_000)]
    pools = ["hard" if rate <= 0.25 else "easy" if rate > 0.75 else "normal" for rate in drawn]
    assert total_variation(pools, {"hard": 0.2 / 1.4, "normal": 1 / 1.4, "easy": 0.2 / 1.4}) < 0.001


def test_sources_keep_their_shares_while_the_mean_falls(made):
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    taskset = made(schedule={"kind": "gaussian", "over": 10_000}, shares=shares)
    drawn = draw(taskset, 10_000)
    for start in range(0, 10_000, 1_000):
        assert total_variation(["abc"[n % 3] for n in drawn[start : start + 1_000]], shares) < 0.02
    # Of each source only every third pass rate exists here, and those follow the Gaussian.
    own = [rate_of(position) for position in drawn if position % 3 == 1]
    keys = {"start": 0.8, "end": 0.2, "width": 0.15, "over": len(own)}
    assert total_variation(own, gaussian_target([1 / 8, 4 / 8, 7 / 8], len(own), **keys)) < 0.01


@given(st.integers(0, 30_000), st.integers(0, 3))
def test_any_index_of_a_schedule_is_reached_without_those_before_it(start, seed):
    schedule = Gaussian(over=5_000)
    shares = [normalise([schedule.weight(bin, stage) for bin in range(0, 81, 10)]) for stage in range(101)]
    walked, jumped = (Staged(schedule.starts(), shares.__getitem__, seed) for _ in range(2))
    for index in range(max(0, start - 3), start):
        walked.at(index)
    assert [walked.at(index) for index in range(start, start + 20)] == [
        jumped.at(index) for index in reversed(range(start, start + 20))
    ][::-1]


def test_every_arm_of_a_schedule_is_drawn_in_order_without_a_gap():
    schedule = Gaussian(over=700)
    shares = [normalise([schedule.weight(bin, stage) for bin in (10, 30, 60)]) for stage in range(101)]
    staged, drawn = Staged(schedule.starts(), shares.__getitem__, 5), Counter()
    for index in range(2_000):
        arm, within = staged.at(index)
        assert within == drawn[arm]
        drawn[arm] += 1


def test_many_threads_draw_the_same(made):
    alone, shared = (made(schedule={"kind": "gaussian", "over": 400}) for _ in range(2))
    expected = draw(alone, 400)
    shared._size()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda index: shared.position_at(index, None), range(400))) == expected


def test_a_pool_is_passed_through_before_it_begins_again(made):
    taskset = made(schedule=POOLS)
    easy = [position for position in draw(taskset, 600) if rate_of(position) > 0.75]
    whole = sorted(n for n in range(90) if rate_of(n) > 0.75)
    assert sorted(easy[: len(whole)]) == sorted(easy[len(whole) : 2 * len(whole)]) == whole
    assert easy[: len(whole)] != easy[len(whole) : 2 * len(whole)]


def test_a_draw_of_a_schedule_needs_an_end(made):
    taskset = made(schedule=POOLS)
    with raises_code("usage", "--num-tasks"):
        taskset.draw()
    assert len(taskset.select_tasks(200)) == 200
    assert taskset[taskset.at(150).idx] == taskset.at(150)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any))
def test_credits_stay_within_a_few_draws_of_the_shares(weights):
    shares = normalise(weights)
    credits, drawn = Credits(len(shares)), Counter()
    for count in range(1, 200):
        drawn[credits.draw(shares)] += 1
        assert all(abs(drawn[arm] - share * count) < len(shares) for arm, share in enumerate(shares))


def test_pools_tell_rates_apart_as_prime_rl_does():
    assert [Pools().bin_of(rate) for rate in (0, 0.25, 0.26, 0.75, 0.76, 1)] == [0, 0, 1, 1, 2, 2]


# Learning


def play(streams, draws, strength):
    """Draws, and observes for each task what a policy of that strength earns."""
    positions = []
    for _ in range(draws):
        task = streams.task(streams.advance())
        positions.append(task.idx)
        streams.observe(task, strength(task.idx))
    return positions


def streams_of(taskset):
    streams = Streams(taskset)
    streams.load()
    return streams


def travel(state):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)


def test_observed_rewards_move_the_pass_rates_of_tasks(made):
    taskset = made(schedule=POOLS, online=0.3)
    streams = streams_of(taskset)
    # The policy has become strong: even tasks are always solved now, odd ones as in the profile.
    play(streams, 4_000, lambda n: 1.0 if n % 2 == 0 else rate_of(n))
    drawn = play(streams, 4_000, lambda n: 1.0 if n % 2 == 0 else rate_of(n))
    pools = ["easy" if n % 2 == 0 or rate_of(n) > 0.75 else "hard" if rate_of(n) <= 0.25 else "normal" for n in drawn]
    assert total_variation(pools, {"hard": 0.2 / 1.4, "normal": 1 / 1.4, "easy": 0.2 / 1.4}) < 0.02
    assert set(drawn) == set(range(90)), "none is lost on the way from pool to pool"


def test_without_rewards_a_learning_stream_draws_the_shares_of_the_profile(made):
    keys = {"start": 0.8, "end": 0.2, "width": 0.15, "over": 5_000}
    streams = streams_of(made(schedule={"kind": "gaussian", **keys}, online=0.1))
    drawn = [rate_of(streams.advance().position) for _ in range(5_000)]
    assert total_variation(drawn, gaussian_target(EIGHTHS, 5_000, **keys)) < 0.01


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("schedule", [POOLS, {"kind": "gaussian", "over": 300}], ids=lambda one: one["kind"])
def test_what_a_stream_learned_goes_on_exactly_where_it_was(made, schedule, seed):
    keys = {"schedule": schedule, "online": 0.4, "drop_solved": True, "shares": {"a": 1, "b": 1, "c": 2}, "seed": seed}
    streams, other = streams_of(made(**keys)), streams_of(made(**keys))
    play(streams, 250, lambda n: n % 7 / 6)
    state = travel(streams.state())
    other.restore(state)
    assert play(other, 250, lambda n: n % 5 / 4) == play(streams, 250, lambda n: n % 5 / 4)
    assert travel(other.state()) == travel(streams.state())
    assert len(msgspec.msgpack.encode(state.streams[""].curriculum)) < 4_000


def test_what_is_always_solved_is_no_longer_drawn_unless_all_is(made):
    streams = streams_of(made(schedule=POOLS, online=0.5, drop_solved=True))
    strength = {n: float(n >= 10) for n in range(90)}
    play(streams, 3_000, strength.__getitem__)
    assert set(play(streams, 100, strength.__getitem__)) == {n for n in range(10) if n != 8}
    play(streams, 3_000, lambda n: 1.0)
    assert len(set(play(streams, 300, lambda n: 1.0))) > 50


def test_streams_learn_each_for_itself(made):
    streams = streams_of(made(schedule=POOLS, online=0.5))
    for _ in range(200):
        streams.observe(streams.task(streams.advance("one")), 1.0, "one")
    untouched = streams_of(made(schedule=POOLS, online=0.5))
    assert [streams.advance("two").position for _ in range(50)] == [untouched.advance().position for _ in range(50)]


def test_another_profile_is_noticed_and_another_model_beside_it_is_not(made, tmp_path):
    streams = streams_of(made(schedule=POOLS, model="m"))
    state = travel(streams.state())
    file = tmp_path / "Numbers.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "avg@4_another": 1}) + "\n" for line in lines))
    streams_of(Numbers(streams.taskset.config)).restore(state)
    lines[0]["avg@8_m"] = 0.75
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with raises_code("cannot-resume"):
        streams_of(Numbers(streams.taskset.config)).restore(state)


# Parameters


@pytest.fixture
def levels(tmp_path):
    """Arithmetic by level, of which level n has the pass rate 1 - n / 5."""

    def make(values=(1, 2, 3, 4, 5), **keys):
        lines = [{"uid": str(n), "level": n % 5 + 1, "avg@8_m": 1 - (n % 5 + 1) / 5} for n in range(50)]
        (tmp_path / "levels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        profile = {"parameter": "level", "values": list(values), "path": str(tmp_path / "levels.jsonl"), **keys}
        return build_taskset({"id": "arithmetic", "seed": 4, "profile": profile})

    return make


def test_a_schedule_picks_the_parameter_of_an_endless_taskset(levels):
    keys = {"start": 0.8, "end": 0.2, "width": 0.15, "over": 2_000}
    taskset = levels(schedule={"kind": "gaussian", **keys})
    tasks = taskset.select_tasks(2_000)
    drawn = [1 - task.extra_info["level"] / 5 for task in tasks]
    target = gaussian_target([1 - n / 5 for n in range(1, 6)], 2_000, **keys)
    assert total_variation([round(rate, 9) for rate in drawn], {round(k, 9): v for k, v in target.items()}) < 0.01
    # Each level has the tasks that it has alone, in their order, and a task is found again by its idx.
    alone = build_taskset({"id": "arithmetic", "seed": 4, "level": 3})
    third = [task for task in tasks if task.extra_info["level"] == 3]
    assert [task.uid for task in third] == [task.uid for task in alone.draw(len(third))]
    assert all(taskset[task.idx] == task for task in tasks[:100])
    assert taskset.reward(tasks[7], taskset.gold(tasks[7])).reward == 1.0


def test_a_value_without_a_pass_rate_is_told_or_given_one(levels, tmp_path):
    path = levels().config.profile.path
    with open(path) as file:
        some = [line for line in file if '"level": 4' not in line]
    (tmp_path / "some.jsonl").write_text("".join(some))
    keys = {"path": str(tmp_path / "some.jsonl"), "schedule": POOLS}
    with raises_code("usage", "level 4", "has: 1, 2, 3, 5"):
        levels(**keys).at(0)
    assert {task.extra_info["level"] for task in levels(**keys, unrated=0.5).draw(100)} == {1, 2, 3, 4, 5}


def test_values_that_are_solved_or_outside_the_bounds_are_not_drawn(levels):
    taskset = levels(min_solve_rate=0.3, schedule=POOLS)
    assert {task.extra_info["level"] for task in taskset.draw(200)} == {1, 2, 3}


# Mixtures


def test_a_mixture_hands_rewards_on_to_sources_that_learn(made):
    def mix():
        return Mixture.of([made(schedule=POOLS, online=0.5), Others()], weights=[1, 1], seed=2)

    streams = streams_of(mix())
    tasks = []
    for _ in range(2_000):
        tasks.append(streams.task(streams.advance()))
        streams.observe(tasks[-1], float(tasks[-1].prompt < "5"))
    assert total_variation(["other" in task.prompt for task in tasks], {True: 0.5, False: 0.5}) < 0.01
    late = [int(task.prompt) for task in tasks[-600:] if "other" not in task.prompt]
    # What begins with 0 to 4 is easy by now, all else is hard: both have the same weight.
    assert total_variation([str(n) < "5" for n in late], {True: 0.5, False: 0.5}) < 0.02
    other = streams_of(mix())
    other.restore(travel(streams.state()))
    assert [other.advance() for _ in range(200)] == [streams.advance() for _ in range(200)]
    assert mix()[tasks[5].idx] == tasks[5]


def test_the_shares_of_a_mixture_follow_the_pass_rates_of_its_sources(tmp_path):
    lines = [{"uid": f"{n}", "source": name, "avg@8_m": rate} for n, (name, rate) in enumerate(SOURCES.items())]
    (tmp_path / "rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    node = {
        "id": "mixture",
        "sources": [{"id": "arithmetic", "weight": 2}, {"id": "reverse-text"}],
        "profile": {"path": str(tmp_path / "rates.jsonl"), "schedule": POOLS},
    }
    drawn = [task.data_source for task in build_taskset(node).draw(7_000)]
    assert total_variation(drawn, {"arithmetic": 2 / 2.2, "reverse-text": 0.2 / 2.2}) < 0.001
    node["profile"] |= {"online": 0.05}
    streams = streams_of(build_taskset(node))
    for _ in range(300):  # sums are solved now, and reversing is half done
        task = streams.task(streams.advance())
        streams.observe(task, 1.0 if task.data_source == "arithmetic" else 0.5)
    drawn = [streams.task(streams.advance()).data_source for _ in range(2_800)]
    assert total_variation(drawn, {"arithmetic": 0.4 / 1.4, "reverse-text": 1 / 1.4}) < 0.01


SOURCES = {"arithmetic": 0.5, "reverse-text": 0.9}


def test_a_mixture_draws_a_profiled_source_by_its_own_schedule(made):
    alone = made(schedule={"kind": "gaussian", "over": 200})
    mixed = Mixture.of([alone, Others()], weights=[1, 2], seed=1)
    own = [task.prompt for task in mixed.draw(900) if "other" not in task.prompt]
    assert own == [task.prompt for task in alone.draw(len(own))]


def test_a_union_has_the_tasks_that_its_sources_keep(made):
    for shuffle in (None, {"seed": 5}):
        sources = [made(min_solve_rate=0.6), Others()]
        union = Union(convert({"shuffle": shuffle}, Union.config_type), sources=sources)
        kept = {f"{n}" for n in range(90) if rate_of(n) >= 0.6}
        prompts = [task.prompt for task in union.draw()]
        assert len(prompts) == len(set(prompts)) == len(kept) + 30
        assert {prompt for prompt in prompts if "other" not in prompt} == kept
        assert union._size() == len(prompts)
    with raises_code("usage", "Numbers", "mixture"):
        Union.of([made(schedule=POOLS)])


def test_a_union_is_scheduled_over_all_its_sources(made, tmp_path):
    sources = [Numbers(), Others()]
    rates = {task.uid: rate_of(n) for source in sources for n, task in enumerate(source)}
    path = write_rates(tmp_path / "all.jsonl", rates)
    config = convert({"profile": {"path": path, "schedule": POOLS}}, Union.config_type)
    drawn = [rates[task.uid] for task in islice(Union(config, sources=sources).draw(1_400), 1_400)]
    pools = ["hard" if rate <= 0.25 else "easy" if rate > 0.75 else "normal" for rate in drawn]
    assert total_variation(pools, {"hard": 0.2 / 1.4, "normal": 1 / 1.4, "easy": 0.2 / 1.4}) < 0.005


def test_a_host_knows_that_a_schedule_has_no_end_and_an_index_moves_no_rate(made):
    from treetune.play.host import LocalHost, always

    async def ask():
        host = await LocalHost.open(made(schedule=POOLS, online=0.5), always(None))
        first = [(await host.sample(index)).idx for index in range(5)]
        info = await host.info()
        return info.num_tasks, first, [(await host.sample(index)).idx for index in range(5)], info.cursor

    count, first, again, cursor = asyncio.run(ask())
    assert (count, first, cursor) == (None, again, 0)


def test_the_config_of_a_run_finds_its_profile_from_anywhere(levels, tmp_path, monkeypatch):
    from treetune.core.from_config import node_of

    levels()
    monkeypatch.chdir(tmp_path)
    node = {"id": "arithmetic", "seed": 4, "profile": {"path": "levels.jsonl", "parameter": "level", "values": [1, 2]}}
    described = node_of(build_taskset(node), node)
    assert described["profile"] == {**node["profile"], "path": str(tmp_path / "levels.jsonl")}
    monkeypatch.chdir("/")
    assert [task.uid for task in build_taskset(described).draw(5)] == [task.uid for task in levels((1, 2)).draw(5)]
