"""Tasksets: lazy, counted, ordered, refused where they cannot be drawn."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import warnings

import pytest
from raising import raises_code

from treetune import Mixture, Score, ShuffleConfig, Task, Taskset, TasksetConfig, load_taskset, run_rollout
from treetune.core.fingerprint import taskset_fingerprint
from treetune.errors import UsageError
from treetune.models import load_policy

SHUFFLED = TasksetConfig(shuffle=ShuffleConfig(seed=7))


class Counted(Taskset):
    built = 0
    size = 1000

    def load_tasks(self):
        for number in range(self.size):
            type(self).built += 1
            yield Task(prompt=str(number))


class Endless(Taskset):
    INFINITE = True

    def load_tasks(self):
        number = 0
        while True:
            yield Task(prompt=f"{number}")
            number += 1


class Seeded(Endless):
    def load_tasks(self):
        return (Task(prompt=f"{self.seed}:{number}") for number in range(10**9))


@pytest.fixture(autouse=True)
def _reset():
    Counted.built = 0


def test_an_unshuffled_draw_builds_what_it_takes_and_no_more():
    tasks = Counted().select_tasks(5)
    assert [task.prompt for task in tasks] == ["0", "1", "2", "3", "4"]
    assert Counted.built == 5


def test_a_finite_generator_has_a_real_count():
    assert Counted().count() == 1000


def test_a_draw_never_wraps():
    class Three(Counted):
        size = 3

    assert len(Three().select_tasks(10)) == 3
    assert sorted(task.prompt for task in Three(SHUFFLED).select_tasks(10)) == ["0", "1", "2"]


def test_a_shuffled_draw_is_the_first_epoch_of_the_endless_order():
    taskset = Counted(SHUFFLED)
    drawn = taskset.select_tasks(50)
    assert drawn == [taskset.at(index) for index in range(50)]
    assert [task.idx for task in drawn] != list(range(50))
    assert sorted(task.idx for task in taskset.select_tasks()) == list(range(1000))


def test_a_task_knows_its_place():
    taskset = Counted(SHUFFLED)
    assert all(taskset[task.idx] == task for task in taskset.draw(20))


def test_infinite_without_a_cap_is_refused_by_naming_the_flag():
    with raises_code("usage", "--num-tasks"):
        Endless().select_tasks()


def test_an_infinite_generator_can_be_read_at_any_index():
    taskset = Endless()
    assert [taskset.at(index).prompt for index in (3, 4, 10, 2, 0)] == ["3", "4", "10", "2", "0"]


def test_shuffle_seed_seeds_the_generation_of_an_infinite_taskset():
    assert Seeded(SHUFFLED).select_tasks(1)[0].prompt == "7:0"
    assert load_taskset("arithmetic", {"taskset.seed": "5"}).seed == 5
    assert load_taskset("arithmetic", {"taskset.seed": "5", "taskset.shuffle.seed": "6"}).seed == 6


def test_it_warns_only_where_no_seed_is_read():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Seeded(SHUFFLED).select_tasks(1)
        load_taskset("arithmetic", {"taskset.shuffle.seed": "6"}).select_tasks(1)
        Endless().select_tasks(1)
        Counted(SHUFFLED).select_tasks(1)
    with pytest.warns(UserWarning, match="reads no seed"):
        Endless(SHUFFLED).select_tasks(1)


def helper(config):
    return config.shuffle.seed


def test_a_seed_read_in_a_function_of_the_module_counts():
    class Indirect(Endless):
        def load_tasks(self):
            yield Task(prompt=str(helper(self.config)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Indirect(SHUFFLED).select_tasks(1)


def test_an_empty_taskset_is_a_clear_error():
    class Empty(Counted):
        size = 0

    for draw in (lambda: Empty().select_tasks(), lambda: Empty(SHUFFLED).select_tasks(3), lambda: Empty().at(0)):
        with raises_code("no-tasks", "load_tasks"):
            draw()


def test_less_than_one_task_is_wrong_usage():
    with pytest.raises(UsageError):
        Counted().select_tasks(0)


def test_random_access_needs_a_length_or_infinity():
    class Indexed(Taskset):
        def task_at(self, index):
            return Task(prompt=str(index))

    with raises_code("taskset", "count()"):
        Indexed()

    class Sized(Indexed):
        def count(self):
            return 100_000_000

    tasks = Sized(SHUFFLED).select_tasks(3)
    assert len({task.idx for task in tasks}) == 3


def test_a_taskset_that_says_infinite_and_ends_is_told():
    class Liar(Endless):
        def load_tasks(self):
            return [Task(prompt="only")]

    with raises_code("stream-ended", "after 1"):
        Liar().at(5)


def test_an_undeclared_task_type_is_told_how_to_declare_it():
    class Special(Task, frozen=True):
        pass

    class Undeclared(Taskset):
        def load_tasks(self):
            return [Special(prompt="x")]

    with raises_code("taskset", "Undeclared", "Taskset[Special"):
        Undeclared().select_tasks()


@pytest.mark.parametrize(
    ("task", "fact"),
    [
        (Task(prompt=5), "prompt"),
        (Task(prompt=["a"]), "prompt"),
        (Task(reward_spec="4"), "reward_spec"),
        (Task(extra_info={"x": object()}), "object"),
        (Task(prompt="\ud800"), "surrogates"),
        ({"prompt": "x"}, "dict"),
        ("a question", "str"),
    ],
)
def test_a_task_that_cannot_be_saved_is_refused_when_it_is_drawn(task, fact):
    class Wrong(Taskset):
        def load_tasks(self):
            return [task]

    with raises_code("taskset", fact):
        Wrong().select_tasks()
    with raises_code("taskset", fact):
        Wrong().at(0)


def test_tasksets_can_be_pickled_at_any_moment():
    for taskset in (Endless(), Counted(SHUFFLED), Mixture.of([Endless(), Counted()], [1, 1])):
        drawn = [taskset.at(index) for index in range(3)]
        again = pickle.loads(pickle.dumps(taskset))
        assert [again.at(index) for index in range(3)] == drawn
    assert len(pickle.dumps(taskset)) < 1000, "what can be loaded again stays behind"


def test_gold_may_be_async_and_its_type_is_checked():
    class Golden(Counted):
        async def gold(self, task):
            return task.reward_spec.get("gold", ("a", "b"))

    taskset = Golden()
    assert asyncio.run(taskset.gold_of(taskset[0])) == ["a", "b"]
    with raises_code("taskset", "Golden.gold"):
        asyncio.run(taskset.gold_of(Task(reward_spec={"gold": 5})))


def test_a_reward_is_a_number_not_text():
    assert Score.of(True).reward == 1.0
    with raises_code("environment", "'0.7'"):
        Score.of("0.7")


def test_importing_a_taskset_is_light():
    code = "import treetune.core.taskset, sys; print({'asyncio', 'importlib.metadata'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_fingerprint_says_what_changed():
    before = taskset_fingerprint(load_taskset("arithmetic"))
    after = taskset_fingerprint(load_taskset("arithmetic", {"taskset.level": "3"}))
    assert before != after
    assert before.differences(after) == ["level: 1 -> 3"]
    assert before.differences(taskset_fingerprint(load_taskset("arithmetic"))) == []
    assert "Arithmetic -> ReverseText" in before.differences(taskset_fingerprint(load_taskset("reverse-text")))[0]


@pytest.mark.parametrize("seed", [0, 7, -3])
def test_arithmetic_streams_of_nearby_seeds_share_nothing_systematic(seed):
    def prompts(seed, level=5):
        taskset = load_taskset("arithmetic", {"taskset.seed": str(seed), "taskset.level": str(level)})
        return [task.prompt for task in taskset.select_tasks(200)]

    assert len(set(prompts(seed)) & set(prompts(seed + 1))) <= 2
    assert prompts(seed) == prompts(seed)


@pytest.mark.parametrize(
    ("methods", "facts"),
    [
        ({"reward": lambda self, answer: 1.0}, ["Wrong.reward(self, answer)", "reward(task, answer)"]),
        ({"gold": lambda self: "x"}, ["def gold(self, task)"]),
        ({"gold": "42"}, ["Wrong.gold", "str"]),
        ({"load_tasks": lambda self, split: []}, ["'split'"]),
        ({"task_at": lambda self: None, "count": lambda self: 1}, ["def task_at(self, index)"]),
    ],
)
def test_a_method_that_takes_something_else_is_told_before_anything_is_played(methods, facts):
    wrong = type("Wrong", (Taskset,), {"load_tasks": lambda self: [Task(prompt="?")], **methods})
    with raises_code("taskset", *facts):
        wrong()


def test_a_method_may_take_more_than_it_is_given():
    class Right(Taskset):
        def load_tasks(self, limit=3):
            return [Task(prompt="?")] * limit

        @staticmethod
        def gold(task):
            return "x"

        async def reward(self, *given):
            return 1.0

    assert len(Right().select_tasks()) == 3


def test_a_method_may_be_a_property_of_what_is_set_later():
    class Late(Taskset):
        def __init__(self):
            super().__init__()
            self.paid = 0.5

        def load_tasks(self):
            return [Task(prompt="?")]

        @property
        def reward(self):
            return lambda task, answer: self.paid

    taskset = Late()
    assert asyncio.run(run_rollout(taskset, taskset[0], load_policy("scripted:echo", taskset))).reward == 0.5


class Levelled(Task):
    level: int = 0


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Task(prompt="hi", target="3"), "write ground_truth=..."),
        (lambda: Task(prompt="hi", answer="3"), "write ground_truth=..."),
        (lambda: Task(question="hi"), "write prompt=..."),
        (lambda: Task(prompt="hi", extrainfo={}), "a Task has no field 'extrainfo'; did you mean 'extra_info'?"),
        (lambda: Levelled(prompt="hi", levle=3), "a Levelled has no field 'levle'; did you mean 'level'?"),
        (lambda: Task(prompt="hi", zzz=3), "a Task has no field 'zzz'; write extra_info={'zzz': ...}"),
        (lambda: Task("hi", "3"), "name its fields: Task(prompt=..., ground_truth=...)"),
        (lambda: int("hi", base=10, of=3), None),
        (lambda: int("hi"), None),
    ],
)
@pytest.mark.parametrize("method", ["load_tasks", "task_at"])
def test_a_task_made_of_fields_that_it_does_not_have_is_told_what_to_write(make, remedy, method):
    class Lists(Taskset):
        def load_tasks(self):
            return [make()]

    class Gives(Taskset):
        def count(self):
            return 1

        def task_at(self, index):
            return make()

    taskset = (Lists if method == "load_tasks" else Gives)()
    taskset.task_type = Levelled if "Levelled" in str(remedy) else Task
    for draw in (lambda: taskset[0], lambda: taskset.select_tasks(1)):
        with raises_code("taskset", f"{method}(") as raised:
            draw()
        assert raised.value.remedy == remedy
