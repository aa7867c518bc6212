"""reasoning-gym behind a taskset: one line of tasks, seeds apart."""

from __future__ import annotations

import pickle
from importlib.util import find_spec

import pytest
from raising import raises_code

from treetune import build_taskset
from treetune.tasksets.reasoning_gym import is_plain_expression

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra reasoning-gym is not installed")


def prompts(seed: int, count: int = 60, **keys) -> list[str]:
    taskset = build_taskset({"id": "reasoning-gym", "dataset": "chain_sum", "shuffle": {"seed": seed}, **keys})
    return [task.messages[-1]["content"] for task in taskset.draw(count)]


def test_neighbouring_seeds_share_no_tasks():
    assert not set(prompts(7)) & set(prompts(8))
    assert prompts(7) == prompts(7)


def test_tasks_beyond_one_stretch_are_new_ones():
    taskset = build_taskset({"id": "reasoning-gym", "dataset": "chain_sum"})
    beyond = [taskset[index].uid for index in range(1020, 1030)]
    assert len(set(beyond)) == 10
    assert not set(beyond) & {task.uid for task in taskset.draw(100)}


def test_it_can_be_pickled():
    taskset = build_taskset({"id": "reasoning-gym", "dataset": "chain_sum"})
    assert pickle.loads(pickle.dumps(taskset)).select_tasks(3) == taskset.select_tasks(3)


def test_its_own_scorer_decides():
    taskset = build_taskset({"id": "reasoning-gym", "dataset": "leg_counting"})
    task = taskset[1500]
    assert taskset.reward(task, f"so it is <answer>{task.ground_truth}</answer>").reward == 1.0
    assert taskset.reward(task, "<answer>-1</answer>").reward < 1.0
    assert taskset.reward(task, "no tags").reward < 1.0


def test_names_and_params_are_checked():
    with raises_code("unknown-name", "'chain_sum'"):
        build_taskset({"id": "reasoning-gym", "dataset": "chainsum"})
    with raises_code("config", "taskset.params", "max_terms"):
        build_taskset({"id": "reasoning-gym", "params": {"min_terms": 9, "max_terms": 2}})
    assert all(
        prompt.count("+") + prompt.count("-") <= 2 for prompt in prompts(0, params={"min_terms": 2, "max_terms": 2})
    )


@pytest.mark.parametrize(
    "text", ["(3 + 4) * 5 - 2 / 7", "x**2 + 3*x*y - 7*x**(1/2)", "sin(x)*exp(-x) + C", "[[1, 2], [3, 4]]", "['a', 'b']"]
)
def test_plain_expressions_reach_a_scorer_that_evaluates_them(text):
    assert is_plain_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        *("9**9**9", "(9**99)**99", "9**999", "1e999999999", "1e-999999999", "9" * 60, "exp(exp(99))", "1 << 10**9"),
        *("__import__('os')", "x.y", "print(1)", "open('a')", "lambda: 1", "[i for i in x]", "x if y else z"),
        *("'a' * 10**9", "(" * 9999, "f'{x}'", "range(9)", "x := 1", "sin(x, evaluate=1)"),
    ],
)
def test_anything_else_does_not(text):
    assert not is_plain_expression(text)


def test_an_answer_is_not_run_as_code(tmp_path):
    taskset = build_taskset({"id": "reasoning-gym", "dataset": "binary_matrix"})
    answer = f"<answer>open({str(tmp_path / 'was_run')!r}, 'w')</answer>"
    assert taskset.reward(taskset[0], answer).reward == 0.0
    assert not (tmp_path / "was_run").exists()
    assert taskset.reward(taskset[0], f"<answer>{taskset[0].ground_truth}</answer>").reward == 1.0
