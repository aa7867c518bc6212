"""Tasks: frozen, serialisable, with a uid that names the problem."""

from __future__ import annotations

import pickle
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Outcome, Task, Trace, Turn
from treetune.core.trace import Failure
from treetune.system.digest import canonical

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


class Maze(Task, frozen=True, kw_only=True):
    walls: list[int] = []


def test_a_task_cannot_be_changed():
    with pytest.raises(AttributeError):
        Task(prompt="a").prompt = "b"


def test_position_and_extras_do_not_change_the_uid():
    task = Task(prompt="2 + 2?", reward_spec={"ground_truth": "4"})
    assert task.uid == Task(idx=9, prompt="2 + 2?", reward_spec={"ground_truth": "4"}, extra_info={"index": 9}).uid
    assert task.uid == msgspec.structs.replace(task, ability="math", data_source="sums").uid


@pytest.mark.parametrize(
    "other",
    [
        Task(prompt="2 + 3?", reward_spec={"ground_truth": "4"}),
        Task(prompt="2 + 2?", reward_spec={"ground_truth": 4}),
        Task(prompt="2 + 2?", reward_spec={"ground_truth": "4"}, env_class="gsm8k"),
        Maze(prompt="2 + 2?", reward_spec={"ground_truth": "4"}, walls=[1]),
    ],
)
def test_what_makes_the_problem_changes_the_uid(other):
    assert other.uid != Task(prompt="2 + 2?", reward_spec={"ground_truth": "4"}).uid


def test_a_string_prompt_and_one_user_message_are_the_same_problem():
    assert Task(prompt="hi").uid == Task(prompt=[{"role": "user", "content": "hi"}]).uid


@given(st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_absent_and_null_keys_hash_alike_in_any_order(spec):
    backwards = dict(reversed([*spec.items(), ("added", None)]))
    if "added" not in spec:
        assert Task(reward_spec=spec).uid == Task(reward_spec=backwards).uid


@given(values)
def test_canonical_form_is_a_function_of_the_value(value):
    assert canonical(value) == canonical(value)
    assert b"null" not in canonical({"a": float("nan")})
    assert canonical(float("nan")) != canonical(float("inf"))


def test_two_processes_agree_on_a_uid():
    code = "from treetune import Task; print(Task(prompt='x', reward_spec={'b': {'z': 1, 'y': [2**70]}, 'a': 'ü'}).uid)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": hash_seed}, check=True
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


@given(st.lists(st.integers(-(2**80), 2**80), max_size=3), st.text())
def test_a_subclass_survives_json_as_its_own_type(walls, prompt):
    try:
        maze = Maze(prompt=prompt, walls=walls)
        encoded = msgspec.json.encode(maze)
    except UnicodeEncodeError:
        return
    assert msgspec.json.decode(encoded, type=Maze) == maze


def test_a_task_is_shown_in_a_line_with_what_is_set():
    task = Task(prompt="What is 2 + 3?", reward_spec={"ground_truth": "5"}, data_source="sums")
    assert repr(task) == "Task(prompt='What is 2 + 3?', ground_truth='5', data_source='sums')"
    assert repr(Task()) == "Task()"
    long = Task(prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why " * 100}])
    assert repr(long).startswith("Task(prompt='why why")
    assert len(repr(long)) < 90


def test_a_trace_is_shown_in_a_line():
    task = Task(prompt="What?", idx=4, data_source="sums")
    trace = Trace(task=task, uid=task.uid, rollout=1, reward=0.5, turns=[Turn(), Turn()], answer="42")
    assert repr(trace) == "Trace(task 4 of sums, rollout 1: completed, reward 0.5, 2 turns, '42')"
    trace.fail(Outcome.TIMEOUT, Failure("TimeoutError", "no end after 5 seconds", "step", ""))
    assert repr(trace) == "Trace(task 4 of sums, rollout 1: timeout, no reward, 2 turns, 'no end after 5 seconds')"


def test_a_ground_truth_stands_in_reward_spec() -> None:
    task = Task(prompt="2 + 3?", ground_truth="5", reward_spec={"method": "rule"})
    assert task.ground_truth == "5"
    assert task.reward_spec == {"method": "rule", "ground_truth": "5"}
    written = Task(prompt="2 + 3?", reward_spec={"method": "rule", "ground_truth": "5"})
    assert task == written
    assert task.uid == written.uid
    assert msgspec.json.encode(task) == msgspec.json.encode(written)
    assert pickle.loads(pickle.dumps(task)) == task
    assert Maze(prompt="x", ground_truth=3, walls=[1]).reward_spec == {"ground_truth": 3}
    assert Task(prompt="x", ground_truth=None) == Task(prompt="x")
    assert Task(ground_truth="5", reward_spec={"ground_truth": "5"}).ground_truth == "5"


def test_two_different_ground_truths_are_an_error() -> None:
    with raises_code("usage", "'5'", "'6'", "reward_spec"):
        Task(prompt="2 + 3?", ground_truth="5", reward_spec={"ground_truth": "6"})
