"""Several rows of an episode in verl, and credit by turn: what is allowed, and what the trainer makes of traps."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess

import pytest
import venvs
from omegaconf import OmegaConf
from raising import raises_code

from treetune.trainers.verl.several_rows import (
    JOINED,
    MODE,
    MODULES,
    check_rows,
    check_trainer,
    check_turns,
    trainer_settings,
    why_not_joined,
)

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"


def config_of(*keys):
    return OmegaConf.from_dotlist(["algorithm.adv_estimator=grpo", *keys])


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.01"],  # by token, as the loss itself
        [f"{ACTOR}.policy_loss.loss_mode=cispo"],
        [f"{CORRECTION}.rollout_is=token"],
    ],
)
def test_rows_can_be_joined_where_each_token_counts_for_itself(keys):
    assert why_not_joined(config_of(*keys)) is None
    assert trainer_settings(config_of(*keys))[MODE] == "treetune_sync"


@pytest.mark.parametrize(
    ("named", "keys"),
    [
        ("gspo", [f"{ACTOR}.policy_loss.loss_mode=gspo"]),
        ("geo_mean", [f"{ACTOR}.policy_loss.loss_mode=geo_mean"]),
        ("clip_cov", [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
        ("sapo", [f"{ACTOR}.policy_loss.loss_mode=sapo"]),
        ("sequence-level importance sampling", [f"{CORRECTION}.rollout_is=sequence"]),
        ("sequence-level importance sampling", [f"{CORRECTION}.rollout_rs=seq_mean_k1"]),
        ("bypass_mode", [f"{CORRECTION}.bypass_mode=true"]),
        ("entropy", [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"]),
        ("KL loss", [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]),
        ("use_kl_in_reward", ["algorithm.use_kl_in_reward=true"]),
        ("gae", ["algorithm.adv_estimator=gae"]),
        ("rloo", ["algorithm.adv_estimator=rloo"]),
        ("shuffle", [f"{ACTOR}.shuffle=true"]),
    ],
)
def test_what_cannot_join_rows_is_refused_by_name(named, keys):
    config = config_of(*keys)
    assert named in why_not_joined(config)
    assert trainer_settings(config) == {}
    check_rows(config)  # an episode stays one row
    with raises_code("credit", named):
        check_rows(config, rewrites="split")
    with raises_code("credit", named):
        check_rows(config_of(*keys, f"{MODE}=treetune_sync"))
    if named != "gae":
        with raises_code("credit", named):
            check_rows(config, [("turn", 1.0)])


def test_gae_gives_credit_to_turns_by_itself():
    config = config_of("algorithm.adv_estimator=gae")
    check_rows(config, [("turn", 1.0), ("outcome", 1.0)])
    check_trainer(config, "turn")
    with raises_code("credit", "credit_discount"):
        check_rows(config, [("turn", 0.9)])


def test_turns_need_the_v1_trainer_and_ours():
    with raises_code("credit", "v0"):
        check_rows(config_of("trainer.use_v1=false"), [("turn", 1.0)])
    with raises_code("credit", "v0"):
        check_turns(config_of(), "turn", 1.0, v1=False)
    with raises_code("credit", "treetune_sync"):
        check_trainer(config_of(), "turn")
    check_trainer(config_of(f"{JOINED}=true"), "turn")
    check_trainer(config_of(), "outcome")
    assert trainer_settings(config_of("trainer.use_v1=false")) == {}


def test_our_trainer_takes_the_place_of_the_one_that_the_user_chose(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "theirs")
    found = trainer_settings(config_of(f"{MODE}=separate_async", f"{MODULES}=mine"))
    assert found == {MODE: "treetune_separate_async", MODULES: "mine,theirs,treetune.trainers.verl.trainer"}
    assert trainer_settings(OmegaConf.merge(config_of(), config_of(*(f"{k}={v}" for k, v in found.items())))) == found


def run_side(name, *arguments):
    side = venvs.ROOT / "tests" / "support" / name
    path = os.pathsep.join([str(venvs.ROOT / "src"), str(side.parent)])
    done = subprocess.run(
        [venvs.venv(*venvs.VERL), "-W", "ignore", side, *arguments],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def tried():
    return json.loads(run_side("verl_rows_side.py")[-1])


@pytest.mark.slow
def test_all_rows_of_an_episode_are_in_one_optimizer_step_of_as_many_as_before(tried):
    for steps in tried["steps"].values():
        assert len(steps) == 2
        assert sorted(itertools.chain(*steps)) == list(range(8))


@pytest.mark.slow
def test_each_process_has_whole_micro_batches(tried):
    assert tried["rows"] == 20  # of 9 rows: two processes, micro-batches of 5, and a multiple of 4 rollouts


@pytest.mark.slow
def test_groups_that_are_spread_over_processes_have_the_same_gradient(tried):
    assert tried["processes"] <= 1e-6


@pytest.mark.slow
def test_a_last_row_without_sampled_tokens_leaves_the_advantages_of_the_others(tried):
    """verl reads the advantage of an episode from its last row, where it finds 0."""
    assert tried["whole"] != 0
    assert tried["without"] == pytest.approx(tried["whole"], abs=1e-6)


@pytest.mark.slow
def test_rows_that_other_agent_loops_played_have_the_credit_of_their_outcome(tried):
    assert tried["others"] == pytest.approx(tried["whole"], abs=1e-6)


@pytest.mark.slow
def test_verls_padding_trains_nothing_though_it_copies_our_fields(tried):
    assert tried["padding"]
    assert set(tried["padding"]) == {0.0}


@pytest.mark.slow
def test_a_lost_episode_leaves_its_group_and_the_divisor(tried):
    assert tried["lost"] == pytest.approx(tried["expected"], abs=1e-6)


@pytest.mark.slow
def test_a_final_reward_only_is_credited_as_verl_itself_does(tried):
    """With one row for each episode, credit by outcome is verl's own advantage."""
    assert tried["final"] <= 1e-6


@pytest.mark.slow
def test_with_luck_before_a_question_credit_by_turn_takes_half_of_the_steps_or_fewer():
    """examples/turn_credit: 100 steps are the most, and outcome takes them all."""
    steps = {"turn": [], "outcome": []}
    for line in run_side("verl_luck_side.py", "luck", "--first", "100", "--seeds", "3", "--most", "100"):
        if line.startswith("{"):
            training = json.loads(line)
            steps[training["credit"]].append(training["steps"])
    assert len(steps["turn"]) == len(steps["outcome"]) == 3
    assert 2 * statistics.median(steps["turn"]) <= statistics.median(steps["outcome"])
