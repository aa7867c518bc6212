"""Comparisons of runs: the figures are those of a computation by hand, and chance is told from change."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from made_runs import make_run

from treetune.evaluation import compare
from treetune.evaluation.paired import Paired, shuffled_p_value


def test_a_planted_difference_is_what_a_computation_by_hand_says(tmp_path):
    before = [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.0, 1.0]]
    after = [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.5], [0.0, 1.0], [0.0, 0.0]]
    found = compare(make_run(tmp_path / "a", before), make_run(tmp_path / "b", after)).scored
    differences = [sum(new) / 2 - sum(old) / 2 for old, new in zip(before, after, strict=True)]
    assert found.difference == pytest.approx(statistics.mean(differences))
    assert found.stderr == pytest.approx(statistics.stdev(differences) / 7**0.5)
    flips = [
        sum(d * s for d, s in zip(differences, signs, strict=True)) for signs in itertools.product((1, -1), repeat=7)
    ]
    extreme = sum(abs(flip) >= abs(sum(differences)) - 1e-9 for flip in flips)
    assert found.p_value == pytest.approx(extreme / 2**7)


def test_drawn_and_normal_p_values_are_near_the_exact_one(monkeypatch):
    random = np.random.default_rng(3)
    differences = random.choice([-0.5, 0.0, 0.5, 1.0], 30, p=[0.2, 0.35, 0.25, 0.2])
    from treetune.evaluation import paired

    figures = []
    for exact, drawn in ((25, 64), (4, 64), (4, 4)):
        monkeypatch.setattr(paired, "_EXACT", exact)
        monkeypatch.setattr(paired, "_DRAWN", drawn)
        figures.append(Paired(differences).p_value)
    assert figures[1] == pytest.approx(figures[0], abs=0.01)
    assert figures[2] == pytest.approx(figures[0], abs=0.03)


def simulate(tasks, rollouts, lift, seed):
    """The p-value for two runs of tasks of all difficulties, the second with that much more chance to solve one."""
    random = np.random.default_rng(seed)
    chance = random.uniform(0, 1 - lift, tasks)
    old = random.binomial(rollouts, chance) / rollouts
    new = random.binomial(rollouts, chance + lift) / rollouts
    return Paired(new - old)


def test_equal_runs_are_seldom_told_apart():
    for tasks, rollouts in ((8, 4), (40, 1), (200, 4)):
        alarms = sum(simulate(tasks, rollouts, 0.0, seed).p_value < 0.05 for seed in range(1000))
        assert alarms <= 65, (tasks, rollouts)


def test_planted_differences_are_found_about_as_often_as_theory_allows():
    lift, tasks, rollouts = 0.1, 100, 4
    found = [simulate(tasks, rollouts, lift, seed) for seed in range(400)]
    power = sum(each.p_value < 0.05 for each in found) / len(found)
    spread = statistics.mean(each.stderr for each in found)
    normal = statistics.NormalDist()
    theory = 1 - normal.cdf(1.96 - lift / spread)
    assert power == pytest.approx(theory, abs=0.07)
    detectable = statistics.mean(each.detectable for each in found)
    assert detectable == pytest.approx(2.8 * spread, rel=0.01)


def test_with_few_tasks_their_rollouts_decide(tmp_path):
    better = compare(make_run(tmp_path / "a", [[0.0] * 8]), make_run(tmp_path / "b", [[1.0] * 8])).scored
    assert (better.by, better.difference) == ("rollouts", 1.0)
    assert better.p_value < 0.01
    random = np.random.default_rng(0)
    alarms = sum(shuffled_p_value([random.random(6).round()], [random.random(6).round()]) < 0.05 for _ in range(60))
    assert alarms <= 6


def test_tasks_are_paired_and_told(tmp_path):
    before = make_run(tmp_path / "a", [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    after = make_run(tmp_path / "b", [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], model="other")
    found = compare(before, after)
    assert [task.task for task in found.fixed] == [0]
    assert [task.task for task in found.broken] == [1]
    assert (found.unchanged, found.only_before, found.only_after) == (1, 1, 0)
    assert found.config == ["model: 'made' -> 'other'"]


def test_a_run_that_fails_more_is_worse_although_its_scored_rollouts_are_not(tmp_path, treetune):
    make_run(tmp_path / "a", [[1.0]] * 20)
    make_run(tmp_path / "b", [[1.0]] * 8 + [[None]] * 12)
    done = treetune("compare", "a", "b", "--json", "--fail-on-regression")
    (found,) = done.json["comparisons"]
    assert (found["scored"]["difference"], found["over_all"]["difference"]) == (0.0, -0.6)
    assert (found["is_loss"], done.code) == (True, 1)
    assert "more of them failed" in treetune("compare", "a", "b").out


def test_the_verb_exits_with_1_only_on_a_loss_that_chance_does_not_explain(tmp_path, treetune):
    make_run(tmp_path / "a", [[1.0, 1.0]] * 12)
    make_run(tmp_path / "b", [[0.0, 1.0]] * 12)
    make_run(tmp_path / "c", [[1.0, 1.0]] * 11 + [[0.0, 1.0]])
    assert treetune("compare", "a", "b", "--fail-on-regression").code == 1
    assert treetune("compare", "a", "b").code == 0
    assert treetune("compare", "b", "a", "--fail-on-regression").code == 0
    slight = treetune("compare", "a", "c", "--fail-on-regression")
    assert slight.code == 0
    assert "may be chance" in slight.out
    both = treetune("compare", "a", "c", "b", "--fail-on-regression", "--json")
    assert [each["is_loss"] for each in both.json["comparisons"]] == [False, True]


def test_runs_without_a_common_task_and_folders_without_a_run_are_refused(tmp_path, treetune):
    make_run(tmp_path / "a", [[1.0]])
    assert treetune("compare", "a").code == 2
    assert "there is no run nowhere" in treetune("compare", "a", "nowhere").err


def test_show_lists_the_rollouts_of_a_run_and_prints_one_whole(tmp_path, treetune):
    make_run(tmp_path / "a", [[1.0, 0.0], [None, 0.5]])
    assert treetune("show", "a", "--failed", "--json").json["found"] == 1
    assert [each["reward"] for each in treetune("show", "a", "--reward", "<1", "--json").json["rollouts"]] == [
        0.0,
        0.5,
    ]
    assert treetune("show", "a", "--where", "mixed", "--source", "made", "--json").json["found"] == 2
    whole = treetune("show", "a", "--rollout", "1/0").out
    assert "Problem 1." in whole
    assert "ZeroDivisionError" in whole
    assert "answer 1" in treetune("show", "a", "--rollout", "0/1").out
    assert treetune("show", "a", "--rollout", "9/9").code == 2
    assert "is for a run" in treetune("show", "arithmetic", "--failed").err
