"""reasoning-gym behind a taskset: one line of tasks, seeds apart."""

from __future__ import annotations

import pickle

import pytest

from treetune import build_taskset
from treetune.errors import ConfigError, UnknownNameError

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


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
    with pytest.raises(UnknownNameError, match="did you mean 'chain_sum'"):
        build_taskset({"id": "reasoning-gym", "dataset": "chainsum"})
    with pytest.raises(ConfigError, match="refuses"):
        build_taskset({"id": "reasoning-gym", "params": {"min_terms": 9, "max_terms": 2}})
    assert all(
        prompt.count("+") + prompt.count("-") <= 2 for prompt in prompts(0, params={"min_terms": 2, "max_terms": 2})
    )
