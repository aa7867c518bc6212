"""TRL's own trainers and losses: each episode counts once, and turns have their own advantages."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import groupby
from pathlib import Path

import paid_turns
import pytest
import sides
import venvs

from treetune.trainers.credit import turn_advantages

pytestmark = pytest.mark.slow
OTHERS = [[1.0, 1.0], [0.0, 0.0, 0.5], [0.25], [0.0, 1.0]]
GROUPS = paid_turns.GROUP, OTHERS
FINAL = [[1.0, 0.0, 0.25], [0.5, 0.5, 2.0]]
LOST = -1.0
"""In the place of a reward: the environment breaks there."""
LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo")


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    paid_turns.write(folder)
    with sides.open_side(venvs.TRL, "trl_credit_side.py", folder, TRL_EXPERIMENTAL_SILENCE="1") as ask:
        yield ask


def says(rewards):
    return ["break" if reward == LOST else text for reward, text in zip(rewards, paid_turns.says(rewards), strict=True)]


@pytest.fixture
def play(side):
    def play(target, *groups, says=says, trainer="advantages", **options):
        answers = [[says(episode) for episode in group] for group in groups]
        return side(trainer, target=f"paid_turns_tasks.py:{target}", groups=answers, **options)

    return play


def tokens_of(answer, which=0):
    """The advantages of all tokens, or with 1 their gradients, by group, episode and turn."""
    return {
        (group, episode, turn): run[which]
        for group, episodes in enumerate(answer["turns"])
        for episode, turns in enumerate(episodes)
        for turn, run in enumerate(turns)
    }


def by_turn(answer):
    """The advantage of each turn, which all its tokens have."""
    found = tokens_of(answer)
    assert all(values == [values[0]] * len(values) for values in found.values())
    return {at: values[0] for at, values in found.items()}


def defined(*groups, epsilon=1e-4, **options):
    return {
        (group, episode, turn): value
        for group, rewards in enumerate(groups)
        for episode, values in enumerate(turn_advantages(rewards, epsilon=epsilon, **options))
        for turn, value in enumerate(values)
    }


near = partial(pytest.approx, abs=1e-5)


@pytest.mark.parametrize(("target", "credit"), [("ByTurn", "turn"), ("ByOutcome", "outcome")])
def test_its_advantages_are_those_of_the_definition(play, target, credit):
    found = play(target, *GROUPS)
    assert by_turn(found) == near(defined(*GROUPS, credit=credit))
    assert found["steps"] == 1


def test_credit_by_outcome_is_what_trl_does_alone(play):
    alone, found = (play("ByOutcome", *GROUPS, theirs=theirs) for theirs in (True, False))
    assert found == alone


def test_with_a_final_reward_only_credit_by_turn_equals_outcome(play):
    groups = [[[0.0] * turns + [reward] for turns, reward in zip((0, 4, 2), paid, strict=True)] for paid in FINAL]
    by_outcome, found = (play(target, *groups) for target in ("ByOutcome", "ByTurn"))
    for which in (0, 1):
        for at, values in tokens_of(by_outcome, which).items():
            assert tokens_of(found, which)[at] == pytest.approx(values, abs=1e-6)


def test_with_a_final_reward_only_credit_by_turn_equals_outcome_in_asyncgrpo(play):
    groups = [[[0.0] * turns + [reward] for turns, reward in zip((0, 4, 2), paid, strict=True)] for paid in FINAL]
    by_outcome, found = (play(target, *groups, trainer="async_advantages") for target in ("ByOutcome", "ByTurn"))
    assert by_turn(found) == pytest.approx(by_turn(by_outcome), abs=1e-6)
    assert len(by_turn(found)) == sum(len(rewards) for group in groups for rewards in group)
    assert (by_outcome["steps"], found["steps"]) == (1, 1)


FIRST = [[[0.25, 1.0], [0.25, 0.5, 0.5]]]
SECOND = [[[0.5, 0.25, 1.0], [0.0, 0.25, 0.5, 0.0], [1.0]]]
LAST = [[[0.0] * 8 + [0.25], [0.5, 0.0, 1.0]]]
"""The limit of turns ends the first episode."""


@pytest.mark.parametrize("trainer", ["advantages", "async_advantages"])
@pytest.mark.parametrize(("groups", "silent"), [(FIRST, 0), (SECOND, 1), (LAST, 8)], ids=["first", "second", "last"])
def test_a_turn_without_sampled_tokens_stays_a_turn(play, trainer, groups, silent):
    """It has its place in the baseline of its group, and its reward."""

    def says_nothing_once(rewards):
        texts = enumerate(paid_turns.says(rewards))
        return [paid_turns.WITHOUT_TOKENS * (turn == silent) + text for turn, text in texts]

    found = play("ByTurn", *groups, says=says_nothing_once, trainer=trainer)
    wanted = by_population(groups) if trainer == "async_advantages" else defined(*groups, credit="turn")
    assert list(by_turn(found).values()) == near([value for at, value in wanted.items() if at[2] != silent])
    assert found["steps"] == 1


def by_population(groups):
    """AsyncGRPO divides by the deviation of a population, not of a sample."""
    advantages = defined(*groups, credit="turn", epsilon=1e-8)
    return {at: value * (len(groups[at[0]]) / (len(groups[at[0]]) - 1)) ** 0.5 for at, value in advantages.items()}


def test_a_discount_of_the_credit_and_one_of_the_reward_hold(play):
    """What the reward's discount changes stands on the last turn."""
    shaped = [[[*each[:-1], sum(each) * 0.9 ** len(each) - sum(each[:-1])] for each in group] for group in GROUPS]
    assert by_turn(play("Discounted", *GROUPS)) == near(defined(*shaped, credit="turn", discount=0.5))


def test_equal_totals_of_different_turns_differ_by_turn(play):
    groups = [[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]
    found = by_turn(play("ByTurn", *groups))
    assert found == near(defined(*groups, credit="turn"))
    assert [value for (group, _, _), value in found.items() if group] == [0.0] * 4


def test_adjacent_turns_without_tokens_in_between_stay_two_turns(play):
    groups = [[[0.5, 0.25, 1.0], [0.25, 0.5, 0.0]]]
    found = play("QuietByTurn", *groups)
    values = [value for episode in found["turns"][0] for run, _ in episode for value, _ in groupby(run)]
    assert values == near(list(defined(*groups, credit="turn").values()))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("target", ["ByTurn", "ByOutcome"])
def test_a_lost_episode_leaves_its_group_and_the_divisor_of_the_loss(play, target, loss):
    """The gradient is that of a batch without it."""
    groups = [[*paid_turns.GROUP[:3], [0.5, LOST]], OTHERS]
    found = play(target, *groups, settings={"loss_type": loss, "max_completion_length": 6})
    assert found["turns"][0][3] == []
    played = {at: values for at, values in tokens_of(found, 1).items() if values}
    episodes = {at[:2] for at in played}
    count = {one: sum(len(values) for at, values in played.items() if at[:2] == one) for one in episodes}
    divisors = {
        "dapo": lambda one: sum(count.values()),
        "bnpo": lambda one: sum(count.values()),
        "grpo": lambda one: len(episodes) * count[one],
        "dr_grpo": lambda one: len(episodes) * 6,
    }
    credit = "turn" if target == "ByTurn" else "outcome"
    advantages = defined(groups[0][:3], OTHERS, credit=credit)
    assert len(episodes) == 7
    for at, values in played.items():
        assert values == pytest.approx([-advantages[at] / divisors[loss](at[:2])] * len(values), rel=1e-4)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_scale_rewards_holds(play, scale):
    settings = {"scale_rewards": scale}
    groups = [[[0.0] * turns + [reward] for turns, reward in zip((0, 4, 2), paid, strict=True)] for paid in FINAL]
    by_outcome, found = (by_turn(play(target, *groups, settings=settings)) for target in ("ByOutcome", "ByTurn"))
    assert found == pytest.approx(by_outcome, abs=1e-6)
    if scale == "none":
        centred = defined(*GROUPS, credit="turn", by_deviation=False)
        assert by_turn(play("ByTurn", *GROUPS, settings=settings)) == near(centred)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level=sequence"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold=0.5"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"loss_type": "vespo"}, "vespo"),
        ({"loss_type": "luspo"}, "luspo"),
    ],
)
def test_settings_that_take_an_episode_as_a_whole_are_refused(side, settings, named):
    refused = side("fault", target="paid_turns_tasks.py:ByTurn", settings=settings)
    assert refused.startswith("credit: ")
    assert named in refused
    assert side("fault", target="paid_turns_tasks.py:ByOutcome", settings=settings) == ""


def test_trls_own_trainer_is_refused_by_name(side):
    refused = side("fault", target="paid_turns_tasks.py:ByTurn", theirs=True)
    assert refused.startswith("credit: ")
    assert "EpisodeTrainer" in refused


def test_a_group_in_two_processes_is_compared_as_one(tmp_path):
    paid_turns.write(tmp_path)
    torchrun = venvs.venv(*venvs.TRL).parent / "torchrun"
    program = Path(__file__).parents[1] / "support" / "trl_credit_side.py"
    options = ("--standalone", "--nproc-per-node", 2)
    environment = {"PYTHONPATH": str(program.parent), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    venvs.run(torchrun, *options, program, tmp_path, **environment)
    rows = [row for rank in (0, 1) for row in json.loads((tmp_path / f"{rank}.json").read_text())]
    found = [[value for value, _ in groupby(row)] for row in rows]
    wanted = turn_advantages(paid_turns.GROUP, credit="turn", epsilon=1e-4)
    assert [value for row in found for value in row] == near([value for row in wanted for value, _ in groupby(row)])


@pytest.mark.parametrize("script", ["examples/turn_credit/train.py", "tests/support/trl_luck_side.py"])
def test_where_luck_pays_before_a_question_credit_by_turn_learns_in_fewer_steps(script, tmp_path):
    """One seed of the example, in a quarter of its steps, by GRPOTrainer and by AsyncGRPOTrainer."""
    program = (venvs.ROOT / script, "luck", "--first", 3, "--seeds", 1, "--most", 100)
    environment = {"PYTHONPATH": str(Path(venvs.__file__).parent), "TRL_EXPERIMENTAL_SILENCE": "1"}
    lines = venvs.run(venvs.venv(*venvs.TRL), *program, timeout=1200, cwd=tmp_path, **environment).splitlines()
    by_turn, by_outcome = map(json.loads, lines)
    assert (by_turn["credit"], by_outcome["credit"]) == ("turn", "outcome")
    assert by_turn["steps"] < (by_outcome["steps"] or math.inf)


def test_with_a_final_reward_only_asyncgrpo_learns_the_same_with_both_credits(tmp_path):
    """To the last digit, where the trainer waits for the episodes of its next batch."""
    program = (venvs.ROOT / "tests/support/trl_luck_side.py", "final", "--in-turns", "--seeds", 1, "--most", 10)
    environment = {"PYTHONPATH": str(Path(venvs.__file__).parent), "TRL_EXPERIMENTAL_SILENCE": "1"}
    lines = venvs.run(venvs.venv(*venvs.TRL), *program, timeout=1200, cwd=tmp_path, **environment).splitlines()
    by_turn, by_outcome = map(json.loads, lines)
    assert (by_turn["credit"], by_outcome["credit"]) == ("turn", "outcome")
    assert len(by_turn["right"]) == 10
    assert by_turn["right"] == by_outcome["right"]
