"""Comparisons of runs: the figures are those of a computation by hand, and chance is told from change."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from made_runs import make_run, run_in_memory
from packing import MANY

from treetune.evaluation import compare, comparison
from treetune.evaluation.comparison import Paired, shuffled_p_value


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
    figures = []
    for exact, drawn in ((25, 64), (4, 64), (4, 4)):
        monkeypatch.setattr(comparison, "_EXACT", exact)
        monkeypatch.setattr(comparison, "_DRAWN", drawn)
        figures.append(Paired(differences).p_value)
    assert figures[1] == pytest.approx(figures[0], abs=0.01)
    assert figures[2] == pytest.approx(figures[0], abs=0.03)


def play(random, chance, rollouts, failing):
    """The rewards of a run of tasks with these chances; so many of its rollouts fail."""
    won, lost = random.random((2, len(chance), rollouts))
    return np.where(lost < failing, None, (won < chance[:, None]).astype(float)).tolist()


def test_a_planted_difference_is_what_a_paired_bootstrap_says(tmp_path):
    random = np.random.default_rng(5)
    chance = random.uniform(0, 0.7, 80)
    before, after = play(random, chance, 3, 0.1), play(random, chance + 0.3, 5, 0.2)
    found = compare(make_run(tmp_path / "a", before), make_run(tmp_path / "b", after))

    def bootstrap(mean):
        pairs = [(mean(old), mean(new)) for old, new in zip(before, after, strict=True)]
        changes = np.array([new - old for old, new in pairs if not (math.isnan(old) or math.isnan(new))])
        drawn = changes[random.integers(0, len(changes), (20_000, len(changes)))].mean(axis=1)
        return changes.mean(), drawn.std(), np.quantile(drawn, [0.025, 0.975])

    def mean_scored(group):
        scored = [reward for reward in group if reward is not None]
        return sum(scored) / len(scored) if scored else math.nan

    def mean_of_all(group):
        return sum(reward or 0.0 for reward in group) / len(group)

    for told, mean in ((found.scored, mean_scored), (found.over_all, mean_of_all)):
        difference, spread, (low, high) = bootstrap(mean)
        assert told.difference == pytest.approx(difference)
        assert told.stderr == pytest.approx(spread, rel=0.03)
        assert (told.difference - 1.96 * told.stderr, told.difference + 1.96 * told.stderr) == pytest.approx(
            (low, high), abs=0.2 * spread
        )
        assert told.significant
        assert low > 0


SEEDS = 1000 if MANY else 400
EQUAL = [  # tasks, rollouts before and after, the share that fails
    (8, 4, 4, 0.0),
    (40, 3, 3, 0.15),
    *([(100, 2, 8, 0.0), (20, 2, 2, 0.3), (60, 4, 4, 0.5), (30, 8, 2, 0.2), (200, 4, 4, 0.1)] if MANY else []),
]


@pytest.mark.parametrize(("tasks", "before", "after", "failing"), EQUAL)
@pytest.mark.thorough
def test_equal_runs_are_seldom_told_apart(tasks, before, after, failing):
    alarms = 0
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        chance = random.uniform(0, 1, tasks)
        found = compare(
            run_in_memory(play(random, chance, before, failing)), run_in_memory(play(random, chance, after, failing))
        )
        alarms += found.scored.significant or found.over_all.is_loss  # whatever is said of either
    assert alarms <= 0.065 * SEEDS


PLANTED = [(0.05, 100, 4), (0.05, 200, 4), (0.1, 30, 4), *([(0.05, 100, 16), (0.1, 100, 1)] if MANY else [])]


@pytest.mark.parametrize(("lift", "tasks", "rollouts"), PLANTED)
def test_planted_differences_are_found_about_as_often_as_theory_allows(lift, tasks, rollouts):
    # What nobody can beat who knows as much: a test of normal sums whose variance is known, not estimated.
    most = 1 - lift
    variance = 2 * (most / 2 - most**2 / 3) / rollouts  # of chances that are uniform in [0, most], and lifted
    spread, normal = math.sqrt(variance / tasks), statistics.NormalDist()
    theory = normal.cdf(lift / spread - 1.96) + normal.cdf(-lift / spread - 1.96)
    found = []
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        chance = random.uniform(0, most, tasks)
        old, new = (random.binomial(rollouts, each) / rollouts for each in (chance, chance + lift))
        found.append(Paired(new - old))
    power = sum(each.p_value < 0.05 for each in found) / len(found)
    assert theory - 0.1 < power < theory + 0.04  # docs/evaluating.md tells both
    assert statistics.mean(each.stderr for each in found) == pytest.approx(spread, rel=0.02)
    assert statistics.mean(each.detectable for each in found) == pytest.approx(2.8 * spread, rel=0.02)


def test_with_few_tasks_their_rollouts_decide(tmp_path):
    better = compare(make_run(tmp_path / "a", [[0.0] * 8]), make_run(tmp_path / "b", [[1.0] * 8])).scored
    assert (better.by, better.difference) == ("rollouts", 1.0)
    assert better.p_value < 0.01
    random, runs = np.random.default_rng(0), 1000 if MANY else 200
    alarms = sum(shuffled_p_value(*random.random((2, 2, 6)).round()) < 0.05 for _ in range(runs))
    assert alarms <= 0.065 * runs


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
    assert "applies to a run" in treetune("show", "arithmetic", "--failed").err
