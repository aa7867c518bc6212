"""A generator that is read whole, and one that has no end and does not say so."""

from __future__ import annotations

import pytest
from raising import raises_code

from treetune import ShuffleConfig, Task, Taskset, TasksetConfig
from treetune.core import draws


class Unending(Taskset):
    """A generator without an end that does not say so."""

    def load_tasks(self):
        number = 0
        while True:
            yield Task(prompt=f"{number}", reward_spec={"ground_truth": f"{number}"})
            number += 1

    def reward(self, task, answer):
        return 0.0


class Counted(Unending):
    def count(self):
        return 100


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(draws, "MOST_TASKS", 20_000)
    monkeypatch.setattr(draws, "WARN_SECONDS", 0.0)


def test_a_generator_without_an_end_that_would_be_read_whole_is_named_and_stopped(few):
    with (
        pytest.warns(UserWarning, match="Unending.load_tasks\\(\\) has yielded .* has not ended.* set INFINITE = True"),
        raises_code("taskset", "INFINITE") as stopped,
    ):
        next(shuffled_by(Unending).draw(5))
    assert "set INFINITE = True if it never ends" in stopped.value.remedy
    assert "write count()" in stopped.value.remedy


def test_it_is_stopped_before_memory_runs_out(monkeypatch):
    monkeypatch.setattr(draws, "MOST_OF_MEMORY", 0.0)
    with raises_code("taskset", "Unending.load_tasks"):
        Unending().count()


def test_a_count_says_where_a_generator_ends():
    tasks = [task.prompt for task in shuffled_by(Counted).draw(200)]
    assert sorted(tasks, key=int) == [str(number) for number in range(100)]


def shuffled_by(kind):
    return kind(TasksetConfig(shuffle=ShuffleConfig(seed=1)))


@pytest.mark.parametrize("arguments", [("serve", "--zmq", "tcp://127.0.0.1:0"), ("eval", "-m", "scripted:echo")])
def test_the_command_line_says_what_to_write_for_it(arguments, treetune, tmp_path, few):
    (tmp_path / "unending.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Unending(Taskset):\n"
        "    def load_tasks(self):\n"
        "        while True: yield Task(prompt='?')\n"
        "    def reward(self, task, answer): return 0.0\n"
    )
    verb, *options = arguments
    options += ["-n", 5, "--taskset.shuffle.seed", 1] if verb == "eval" else []
    done = treetune(verb, "unending.py:Unending", *options)
    assert done.code == 3
    assert "set INFINITE = True if it never ends" in done.err
