"""SkyRL's own generator, trainer and loss: each episode counts once, and turns have their own advantages."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import paid_turns
import pytest
import sides
import venvs

from treetune.trainers.credit import turn_advantages

pytestmark = pytest.mark.slow
STEPS = ["generator.step_wise_trajectories=true", "trainer.algorithm.use_kl_loss=false"]
"""What makes a row of each turn."""
OTHERS = [[1.0, 1.0], [0.0, 0.0, 0.5], [0.25], [0.0, 1.0]]
GROUPS = paid_turns.GROUP, OTHERS
FINAL = [[1.0, 0.0, 0.25], [0.5, 0.5, 2.0]]
NO_LOGPROBS = "generator.sampling_params.logprobs=null"
LOSSES = {
    "token_mean": [],
    "sequence_mean": [],
    "seq_mean_token_sum_norm": ["trainer.algorithm.max_seq_len=512"],
    "prompt_mean": [],
}


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skyrl")
    paid_turns.write(folder)
    with sides.open_side(venvs.SKYRL, "skyrl_credit_side.py", folder) as ask:
        yield ask


@pytest.fixture
def play(side):
    def play(target, *overrides, groups=GROUPS, says=paid_turns.says, **options):
        answers = [[says(episode) for episode in group] for group in groups]
        return side(
            "advantages", target=f"paid_turns_tasks.py:{target}", groups=answers, overrides=overrides, **options
        )

    return play


def tokens_of(answer):
    """The advantages and the gradient of all tokens, by group, episode and turn."""
    flat = {}
    for group, episodes in enumerate(answer["turns"]):
        for episode, turns in enumerate(episodes):
            for turn, (advantages, gradient) in enumerate(turns):
                flat[group, episode, turn] = advantages, gradient
    return flat


def by_turn(answer):
    """The advantage of each turn, which all its tokens have."""
    found = {at: advantages for at, (advantages, _) in tokens_of(answer).items()}
    assert all(advantages == [advantages[0]] * len(advantages) for advantages in found.values())
    return {at: advantages[0] for at, advantages in found.items()}


def defined(*groups, **options):
    return {
        (group, episode, turn): value
        for group, rewards in enumerate(groups)
        for episode, values in enumerate(turn_advantages(rewards, **options))
        for turn, value in enumerate(values)
    }


near = partial(pytest.approx, abs=1e-5)


@pytest.mark.parametrize("steps", [[], STEPS])
@pytest.mark.parametrize(("target", "credit"), [("ByTurn", "turn"), ("ByOutcome", "outcome")])
def test_its_advantages_are_those_of_the_definition(play, target, credit, steps):
    found = play(target, *steps)
    assert by_turn(found) == near(defined(*GROUPS, credit=credit))
    assert found["rows"] == (18 if steps else 8)


def test_alone_it_adds_turns_up_and_takes_the_last_reward_of_several_rows(play):
    sums = defined(*GROUPS)
    last = [[[0.0] * (len(each) - 1) + each[-1:] for each in group] for group in GROUPS]
    assert by_turn(play("ByTurn", theirs=True)) == near(sums)
    assert by_turn(play("ByOutcome", *STEPS, theirs=True)) == near(defined(*last))


@pytest.mark.parametrize("steps", [[], STEPS])
def test_with_a_final_reward_only_credit_by_turn_equals_outcome(play, steps):
    groups = [[[0.0] * turns + [reward] for turns, reward in zip((0, 4, 2), paid, strict=True)] for paid in FINAL]
    by_outcome, found = (tokens_of(play(target, *steps, groups=groups)) for target in ("ByOutcome", "ByTurn"))
    for at, (advantages, gradient) in by_outcome.items():
        assert found[at][0] == pytest.approx(advantages, abs=1e-6)
        assert found[at][1] == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("steps", [[], STEPS])
def test_a_discount_of_the_credit_and_one_of_the_reward_hold(play, steps):
    """What the reward's discount changes stands on the last turn."""
    shaped = [[[*each[:-1], sum(each) * 0.9 ** len(each) - sum(each[:-1])] for each in group] for group in GROUPS]
    assert by_turn(play("Discounted", *steps)) == near(defined(*shaped, credit="turn", discount=0.5))


@pytest.mark.parametrize("steps", [[], STEPS])
def test_equal_totals_of_different_turns_differ_by_turn(play, steps):
    groups = [[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]
    found = by_turn(play("ByTurn", *steps, groups=groups))
    assert found == near(defined(*groups, credit="turn"))
    assert [value for (group, _, _), value in found.items() if group] == [0.0] * 4


@pytest.mark.parametrize(("steps", "silent"), [([], 1), ([], 2), (STEPS, 1)])
def test_a_turn_without_sampled_tokens_stays_a_turn(play, steps, silent):
    """It has its place in the group's baseline, and its reward. SkyRL itself stops at a last row without tokens."""

    def says(episode):
        texts = enumerate(paid_turns.says(episode))
        return [paid_turns.WITHOUT_TOKENS * (turn == silent) + text for turn, text in texts]

    groups = [[[0.5, 0.25, 1.0], [0.0, 0.5, 0.0], [1.0, 0.0, 0.0]]]
    wanted = {at: value for at, value in defined(*groups, credit="turn").items() if at[2] != silent}
    found = by_turn(play("ByTurn", *steps, NO_LOGPROBS, groups=groups, says=says))
    assert list(found.values()) == near(list(wanted.values()))


def test_adjacent_turns_without_tokens_in_between_stay_two_turns(play):
    """In one assistant message, an observation of no text has no tokens."""
    groups = [[[0.5, 0.25, 1.0], [0.25, 0.5, 0.0]]]
    found = play("QuietByTurn", "generator.use_conversation_multi_turn=false", groups=groups)
    values = [value for episode in found["turns"][0] for run, _ in episode for value, _ in groupby(run)]
    assert values == near(list(defined(*groups, credit="turn").values()))


def test_a_reward_on_an_end_that_was_not_sampled_counts(play):
    stops = "generator.sampling_params.stop=['on','end']"
    assert by_turn(play("ByTurn", stops, ends=False)) == near(defined(*GROUPS, credit="turn"))


def test_with_a_chat_template_of_the_users_the_rewards_of_all_turns_count(play):
    template = "generator.chat_template.name_or_path=qwen3_without_thinking"
    found = by_turn(play("ByOutcome", template, NO_LOGPROBS))
    assert list(found.values()) == near(list(defined(*GROUPS).values()))


@pytest.mark.parametrize(
    ("target", "overrides", "named"),
    [
        ("ByTurn", ["trainer.algorithm.advantage_estimator=rloo"], "advantage_estimator=rloo"),
        ("ByTurn", ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=x"], "gae"),
        ("ByTurn", ["generator.chat_template.name_or_path=qwen3_without_thinking"], "chat_template"),
        ("ByTurn", ["generator.zero_reward_on_non_stop=true"], "zero_reward_on_non_stop"),
        ("ByTurn", [*STEPS, "generator.merge_stepwise_output=true"], "merge_stepwise_output"),
        ("ByOutcome", [STEPS[0]], "use_kl_loss"),
        ("ByOutcome", [*STEPS, "trainer.algorithm.policy_loss_type=gspo"], "policy_loss_type=gspo"),
        ("ByOutcome", [*STEPS, "trainer.algorithm.use_entropy_loss=true"], "use_entropy_loss"),
        ("ByOutcome", [*STEPS, "trainer.algorithm.advantage_estimator=mine"], "advantage_estimator=mine"),
        ("ByOutcome", [*STEPS, "trainer.algorithm.loss_reduction=token_mean_legacy"], "token_mean_legacy"),
        ("ByOutcome", [*STEPS, "trainer.algorithm.advantage_batch_normalize=true"], "advantage_batch_normalize"),
        (
            "ByOutcome",
            [*STEPS, "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence"],
            "tis_ratio_type=sequence",
        ),
        ("ByOutcome", [*STEPS, "trainer.critic.model.path=x"], "critic"),
    ],
)
def test_what_would_be_wrong_is_refused_at_the_start_by_name(side, target, overrides, named):
    refused = side("faults", target=f"paid_turns_tasks.py:{target}", overrides=overrides)
    assert refused.startswith("credit: ")
    assert named in refused


@pytest.mark.parametrize("estimator", ["rloo", "maxrl", "gae", "reinforce++"])
def test_credit_by_outcome_in_one_row_is_skyrls_own(side, estimator):
    chosen = [f"trainer.algorithm.advantage_estimator={estimator}", "trainer.algorithm.policy_loss_type=gspo"]
    assert side("faults", target="paid_turns_tasks.py:ByOutcome", overrides=chosen) == ""


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("target", ["ByTurn", "ByOutcome"])
def test_the_gradient_is_the_same_in_one_row_and_in_a_row_for_each_turn(play, target, loss):
    chosen = [f"trainer.algorithm.loss_reduction={loss}", *LOSSES[loss]]
    whole, cut = play(target, *chosen), play(target, *STEPS, *chosen, devices=4)
    assert (cut["rows"], cut["padded"]) == (18, 20)  # two rows pad the batch
    assert cut["steps"] == whole["steps"] == 1
    gradients = [{at: each[1] for at, each in tokens_of(answer).items()} for answer in (whole, cut)]
    assert any(map(any, gradients[0].values()))
    for at, values in gradients[0].items():
        assert gradients[1][at] == pytest.approx(values, rel=1e-6, abs=1e-9), at
