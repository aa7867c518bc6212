"""What each turn of an episode is worth, and what each of its training rows weighs."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from raising import raises_code

from treetune import Contract, Environment, Task, Taskset
from treetune.chat.tokens import Prompt, Tokens
from treetune.core.environment import Step
from treetune.trainers.credit import BY_ROW_MEAN, BY_ROW_SUM, BY_TOKEN, Row, row_advantages, row_weight, turn_advantages
from treetune.trainers.token_episode import Hooks, PlayedEpisode


def draw_group(seed, *, final_only):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(draw.randint(2, 8))]
    paid = [[draw.choice([0.0, 0.25, 1.0, draw.gauss(0, 3)]) for _ in range(length)] for length in lengths]
    return [[0.0] * (len(each) - 1) + each[-1:] for each in paid] if final_only else paid


def near(one, other, most=1e-6):
    flat = [zip(a, b, strict=True) for a, b in zip(one, other, strict=True)]
    return all(abs(a - b) <= most for a, b in itertools.chain(*flat))


@pytest.mark.parametrize("seed", range(40))
def test_credit_by_outcome_is_the_advantage_of_grpo(seed):
    group = draw_group(seed, final_only=False)
    rewards = [sum(each) for each in group]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)  # n - 1, as in all trainers
    grpo = [[(reward - mean) / (deviation + 1e-4)] * len(each) for reward, each in zip(rewards, group, strict=True)]
    assert near(turn_advantages(group, epsilon=1e-4), grpo)
    centred = [[reward - mean] * len(each) for reward, each in zip(rewards, group, strict=True)]
    assert near(turn_advantages(group, by_deviation=False), centred)


@pytest.mark.parametrize("seed", range(40))
def test_with_a_final_reward_only_credit_by_turn_equals_outcome(seed):
    group = draw_group(seed, final_only=True)
    for options in ({}, {"epsilon": 1e-4}, {"by_deviation": False}):
        assert near(turn_advantages(group, credit="turn", **options), turn_advantages(group, **options))


def test_equal_totals_that_were_earned_at_different_turns_differ_by_turn_only():
    group = [[1.0, 0.0], [0.0, 1.0]]
    assert turn_advantages(group) == [[0.0, 0.0], [0.0, 0.0]]
    (first, second), (third, fourth) = turn_advantages(group, credit="turn", by_deviation=False)
    assert (first, second, third, fourth) == (0.0, -0.5, 0.0, 0.5)


def test_an_episode_that_is_over_stays_in_the_baseline_with_its_last_return():
    assert turn_advantages([[1.0], [0.0, 0.0, 4.0]], credit="turn", by_deviation=False) == [[-1.5], [1.5, 1.5, 1.5]]
    assert turn_advantages([[4.0], [2.0, 0.0, 0.0]], credit="turn", by_deviation=False)[1] == [-1.0, -2.0, -2.0]


def test_what_cannot_be_compared_has_no_advantage():
    for credit in ("outcome", "turn"):
        assert turn_advantages([[3.0, 1.0]], credit=credit) == [[0.0, 0.0]]
        assert turn_advantages([[3.0, 1.0], []], credit=credit) == [[0.0, 0.0], []]
        assert turn_advantages([], credit=credit) == []
        assert near(turn_advantages([[0.1, 0.2]] * 3, credit=credit), [[0.0, 0.0]] * 3, 1e-9)
        assert turn_advantages([[1.0], [], [0.0]], credit=credit)[1] == []


def test_a_discount_counts_later_turns_less():
    group = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    own = turn_advantages(group, credit="turn", discount=0.5, by_deviation=False)[0]
    assert own == [0.125, 0.25, 0.5]
    with raises_code("credit", "outcome"):
        turn_advantages(group, discount=0.5)


def episodes_of_a_policy(stop, right, bonus):
    """All episodes of a policy that goes on (paid) or stops at each turn and then answers: probability, rewards, and
    the gradient of its log by logit and turn."""
    turns = len(stop)
    for last, answer in itertools.product(range(turns), (0, 1)):
        chance, gradient = 1.0, [[0.0] * (2 * turns) for _ in range(last + 1)]
        for turn in range(last):
            chance *= 1 - stop[turn]
            gradient[turn][turn] = -stop[turn]
        if last < turns - 1:
            chance *= stop[last]
            gradient[last][last] = 1 - stop[last]
        chance *= right[last] if answer else 1 - right[last]
        gradient[last][turns + last] = answer - right[last]
        yield chance, [bonus] * last + [float(answer)], gradient


@pytest.mark.parametrize("credit", ["outcome", "turn"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_update_is_the_true_gradient(credit, size):
    """By enumeration of all groups, before the division by the deviation."""
    draw = random.Random(3)
    stop, right = ([1 / (1 + math.exp(-draw.gauss(0, 1))) for _ in range(4)] for _ in range(2))
    played = list(episodes_of_a_policy(stop, right, 0.3))
    assert sum(chance for chance, _, _ in played) == pytest.approx(1, abs=1e-12)
    truth, update = [0.0] * 8, [0.0] * 8
    for chance, rewards, gradient in played:
        for at in range(8):
            truth[at] += chance * sum(rewards) * sum(turn[at] for turn in gradient)
    for group in itertools.product(played, repeat=size):
        chance = math.prod(each[0] for each in group)
        found = turn_advantages([each[1] for each in group], credit=credit, by_deviation=False)
        for (_, _, gradient), advantages in zip(group, found, strict=True):
            for at in range(8):
                update[at] += chance * sum(a * turn[at] for a, turn in zip(advantages, gradient, strict=True)) / size
    # A member is part of its own baseline, which scales the gradient by (n - 1) / n and does not turn it.
    error = math.dist([each * size / (size - 1) for each in update], truth) / math.hypot(*truth)
    assert error <= 1e-9


def cut(tokens_by_turn, pieces):
    """An episode's turns as rows: each continues the whole history, and trains only its own stretch of turns."""
    bounds = [round(at * len(tokens_by_turn) / pieces) for at in range(pieces + 1)]
    for first, end in itertools.pairwise(bounds):
        places = list(itertools.accumulate(tokens_by_turn[:end], initial=0))
        yield [(turn, places[turn], places[turn + 1]) for turn in range(first, end)], places[-1]


def batch_of(pieces, *, credit="turn", lengths=((3, 1, 4, 1, 5), (2, 0, 6), (5,), (2, 2))):
    paid = [[0.5, 0.0, 0.25, 0.0, 1.0], [0.0, 0.5, 0.0], [1.0], [0.0, 0.25]]
    return [
        Row("task", episode, rewards, spans, length, credit)
        for episode, (tokens, rewards, count) in enumerate(zip(lengths, paid, pieces, strict=True))
        for spans, length in cut(tokens, count)
    ]


def loss_of(batch, advantages, loss):
    """The loss by turn of each episode, for a policy whose every token adds 1."""
    found = {}
    for row, values in zip(batch, advantages, strict=True):
        divisor = {True: sum(each.tokens for each in batch), False: len(batch)}[loss in BY_TOKEN]
        divisor *= max(1, row.tokens) if loss in BY_ROW_MEAN else 1
        for turn, first, end in row.spans:
            found[row.episode, turn] = sum(values[first:end]) / divisor
    return found


@pytest.mark.parametrize("loss", BY_TOKEN + BY_ROW_SUM + BY_ROW_MEAN)
@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_an_episode_weighs_the_same_in_one_row_and_in_several(loss, credit):
    whole = batch_of((1, 1, 1, 1), credit=credit)
    aim = loss_of(whole, row_advantages(whole, loss), loss)
    assert any(aim.values())
    for pieces in ((2, 1, 1, 1), (5, 1, 1, 1), (5, 3, 1, 2), (1, 2, 1, 2)):
        rows = batch_of(pieces, credit=credit)
        assert loss_of(rows, row_advantages(rows, loss), loss) == pytest.approx(aim, rel=1e-12)


def test_neither_lost_episodes_nor_padding_change_the_others():
    rows = batch_of((2, 1, 1, 1))
    alone = row_advantages(rows, "seq-mean-token-mean")
    lost = Row("task", "lost", [], [(0, 0, 4)], 6)
    padding = Row("pad", None, [1.0], [(0, 0, 1)], 6)
    more = row_advantages([*rows, lost, padding], "seq-mean-token-mean")
    assert more[len(rows) :] == [[0.0] * 6] * 2
    # The loss divides by two rows more, and the weights make up for that.
    for before, after in zip(alone, more, strict=False):
        assert after == pytest.approx([value * (len(rows) + 2) / len(rows) for value in before])
    # The loss would divide by 8 episodes also if each were one row, of which the lost one is no more.
    fixed = row_advantages([*rows, lost, padding], "seq-mean-token-mean", rows=10, episodes=8)
    for before, after in zip(alone, fixed, strict=False):
        assert after == pytest.approx([value * 4 / len(rows) * 10 / (8 * 4 / 5) for value in before])


def test_each_group_has_its_own_baseline_and_its_own_credit():
    rows = batch_of((1, 1, 1, 1))
    other = [row._replace(group="other", episode=("other", row.episode), credit="outcome") for row in rows]
    mixed = row_advantages([*rows, *other], "token-mean")
    assert mixed == row_advantages(rows, "token-mean") + row_advantages(other, "token-mean")


def test_tokens_beyond_the_length_of_a_row_are_left_out():
    rows = [
        Row("task", 0, [1.0, 0.0], [(0, 0, 2), (1, 3, 9)], 5, "turn"),
        Row("task", 1, [0.0], [(0, 1, 3)], 3, "turn"),
    ]
    assert [row.tokens for row in rows] == [4, 2]
    first, second = row_advantages(rows, "token-mean")
    assert [len(first), len(second)] == [5, 3]
    assert [value != 0 for value in first + second] == [True, True, False, False, False, False, True, True]


def test_a_row_weighs_by_the_tokens_that_the_trainer_left_in():
    spans, rewards = ([(0, 0, 4)], [(1, 0, 4)]), [[0.0, 1.0], [0.0]]
    rows = [Row("task", 0, rewards[0], spans[0], 4, trained=1), Row("task", 0, rewards[0], spans[1], 4, trained=3)]
    first, second, _ = row_advantages([*rows, Row("task", 1, rewards[1], [(0, 0, 2)], 2)], "seq-mean-token-mean")
    assert second[0] == pytest.approx(3 * first[0])


def test_a_loss_that_cannot_join_rows_is_refused_by_name():
    for loss in ("gspo", "geo_mean", "token_mean_legacy"):
        with raises_code("credit", loss):
            row_weight(loss, 1, 2, 2, 1)
    with raises_code("credit", "seq-mean-token-men", "seq-mean-token-mean"):
        row_weight("seq-mean-token-men", 1, 2, 2, 1)


def test_sequences_know_the_turns_that_were_sampled_in_them():
    tokens = Tokens()
    tokens.add_turn(Prompt([1, 2]), [3, 4])
    tokens.add_turn(Prompt([1, 2, 3, 4]), [5])  # no observation in between
    tokens.add_turn(Prompt([1, 2, 3, 4, 5, 6]), [])  # nothing was sampled
    tokens.add_turn(Prompt([1, 6]), [7, 8])  # the history was rewritten
    assert [sequence.spans for sequence in tokens.sequences] == [[(0, 2, 4), (1, 4, 5), (2, 6, 6)], [(3, 2, 4)]]


class Paid(Environment):
    CONTRACT = Contract(max_turns=3, turn_discount=0.5, credit="turn", credit_discount=0.9)

    def step(self, action):
        return Step("go on", reward=1.0)


class Paying(Taskset):
    def load_tasks(self):
        yield Task(prompt="?")

    def environment(self, task):
        return Paid(task)


def test_what_is_not_earned_in_a_turn_stands_on_the_last_one():
    class Scored(Hooks):
        def postprocess_reward(self, reward, num_turns, info):
            return 10 * super().postprocess_reward(reward, num_turns, info)

    def rewards_of(hooks, group_reward=None):
        played = PlayedEpisode(hooks, None)
        played.group_reward = group_reward
        for reward in (1.0, 0.0, 2.0):
            played.observe(Step("go on", reward=reward))
        return played.shape_each(3)

    assert rewards_of(Hooks()) == [1.0, 0.0, 2.0]
    assert rewards_of(Hooks(turn_discount=0.5)) == [1.0, 0.0, 3 * 0.5**3 - 1]
    assert rewards_of(Scored()) == [1.0, 0.0, 29.0]
    assert rewards_of(Hooks(), group_reward=0.25) == [1.0, 0.0, -0.75]


def test_the_credit_is_part_of_the_contract():
    task = next(iter(Paying()))
    contract = Paying().contract_of(task, Paid)
    assert contract.turn_credit == ("turn", 0.9)
    assert contract.resolved.credit == "turn"
    assert (Contract().turn_credit, Contract().resolved.credit) == (("outcome", 1.0), "outcome")

    class Halved(Paying):
        CONTRACT = Contract(credit_discount=0.5)

    class Whole(Paying):
        CONTRACT = Contract(credit="outcome")

    assert Halved().contract_of(task, Paid).turn_credit == ("turn", 0.5)
    with raises_code("credit", "credit_discount", "0.9"):
        Whole().contract_of(task, Paid)
