"""Rollouts of a task that are scored together, where a trainer sees them together; elsewhere it is refused or said.

Also what else a contract promises, in TRL. Other trainers: `test_verl_loop.py`, `test_skyrl_bridge.py`.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from chat_templates import Letters, plain
from kinds import CONTRACTS
from raising import raises_code
from trl_speaker import Speaker, rollout

from treetune import Contract, Environment, Step, Task, Taskset
from treetune.chat.tokens import ChatTokens
from treetune.cli.listing import ContractKind, cells
from treetune.errors import UsageError
from treetune.play.streams import load
from treetune.trainers import token_episode
from treetune.trainers.episodes import LocalEpisodes
from treetune.trainers.group_scores import score_group
from treetune.trainers.token_episode import Hooks, Sampled, play_episode
from treetune.trainers.trl import TrlTasks
from treetune.trainers.verl.rollouts import EpisodeScore, PromptGroups


@pytest.fixture(autouse=True)
def nothing_was_said():
    token_episode._say_once.cache_clear()


class Ranked(Taskset):
    """The longest of the answers earns 1, the others 0."""

    CONTRACT = Contract(turn_discount=0.5)

    def load_tasks(self):
        for number in range(2):
            yield Task(prompt=f"Say much, {number}.")

    def score_group(self, task, traces):
        said = [len(trace.turns[-1].message["content"]) for trace in traces]
        assert all(trace.turns[0].observed == task.messages for trace in traces)
        return [float(length == max(said)) for length in said]


class Also(Ranked):
    def reward(self, task, answer):
        return 0.25


class Whispers(Environment):
    """Two turns, each earns 1 and reports its letters."""

    CONTRACT = Contract(max_turns=2)

    def step(self, action):
        return Step("More.", reward=1.0, info={"metrics": {"letters": len(action.text)}})


class RankedEpisodes(Also):
    CONTRACT = Contract()

    def environment(self, task):
        return Whispers(task)


class Different(Speaker):
    """Says something else in each rollout, all of it in the first turn."""

    num_generations = 2

    def _generate_single_turn(self, prompts, images, fields, num_generations):
        ids = [self.processing_class(self.says[at])["input_ids"] for at in range(len(prompts))]
        return ids, [[-0.5] * len(each) for each in ids]


@pytest.mark.parametrize("taskset", [Ranked, Also])
def test_trls_rollouts_of_a_task_are_scored_together_and_discounted(taskset):
    with TrlTasks(taskset()) as tasks:
        columns = rollout(tasks, Different("ab", "abcd", "abc", "a"), [0, 0, 1, 1])
        assert columns["task_reward"] == [0.0, 0.5, 0.5, 0.0]
        assert [each["raw_reward"] for each in columns["task_metrics"]] == [0.0, 1.0, 1.0, 0.0]


def test_episodes_of_several_turns_are_scored_together_and_their_metrics_are_logged():
    logged = {}
    with TrlTasks(RankedEpisodes()) as tasks:
        columns = rollout(tasks, Different("ab", "abcd"), [0, 0])
        rewards = tasks.reward([None] * 2, [None] * 2, log_metric=logged.__setitem__, **columns)
    assert rewards == [0.0, 1.0]
    assert columns["turn_rewards"] == [[1.0, 1.0], [1.0, 1.0]]
    assert logged == {"task_server_failure": 0.0, **LOGGED}


def test_a_group_that_is_divided_between_processes_is_refused():
    with TrlTasks(Ranked()) as tasks, raises_code("usage", "num_generations"):
        rollout(tasks, Different("ab", "abcd", "a"), [0, 0, 1])


@pytest.mark.parametrize("taskset", [Ranked, Also])
def test_trl_plays_such_tasks_by_rollouts_and_refuses_any_other_way(taskset):
    pytest.importorskip("datasets")
    with TrlTasks(taskset()) as tasks:
        assert tasks.trainer_arguments()["rollout_func"] == tasks.rollout
        with raises_code("usage", "score_group"):
            tasks.trainer_arguments(using="reward_funcs")


def test_answers_that_have_no_reward_alone_are_refused_and_never_worth_zero():
    prompt = [{"role": "user", "content": "?", "task_index": 0}]
    with TrlTasks(Ranked()) as tasks, pytest.raises(UsageError, match="scored with its group"):
        tasks.reward([prompt], ["ab"])


def test_answers_that_trl_scores_alone_are_said_to_be(caplog):
    with TrlTasks(Also()) as tasks, caplog.at_level(logging.WARNING):
        prompt = [{"role": "user", "content": "?", "task_index": 0}]
        assert tasks.reward([prompt] * 2, ["ab", "abcd"]) == [0.125, 0.125]
    assert sum("score_group() is not called" in record.message for record in caplog.records) == 1


LOGGED = {"letters": 3.0, "success": 0.5, "truncated": 1.0, "raw_reward": 0.5, "num_turns": 2.0}


# verl: the members of a prompt's group wait for each other


def played_together(taskset, *answers):
    """The episodes of one task, as verl's loop plays them."""
    tokenizer = Letters(plain)

    async def play(episodes, said):
        async def sample(prompt):
            return Sampled(tokenizer(said)["input_ids"])

        start = lambda: episodes.start(0)  # noqa: E731
        return await play_episode(start, ChatTokens(tokenizer), Hooks(), sample, longest_prompt=None)

    async def play_all():
        episodes = LocalEpisodes(await load(taskset))
        return [await play(episodes, said) for said in answers]

    return asyncio.run(play_all())


def test_members_of_a_group_are_scored_once_all_have_ended_and_a_failed_one_gets_their_mean():
    played = played_together(Ranked(), "ab", "abcd")
    groups = PromptGroups()

    async def join(one):
        with groups.join("a") as member:
            if one is None:
                return await member.mean_of_others()
            await member.score_together(one, (3, 1))
            return EpisodeScore.of(one)

    async def join_all():
        return await asyncio.gather(*map(join, [None, *played]))

    assert asyncio.run(join_all()) == [EpisodeScore(0.25, 0.5), EpisodeScore(0.0, 0.0), EpisodeScore(0.5, 1.0)]


def test_a_group_whose_members_are_in_several_workers_is_refused():
    (played,) = played_together(Ranked(), "ab")

    async def join():
        with PromptGroups().join("a") as member:
            await member.score_together(played, (2,))

    with pytest.raises(UsageError, match="divided between verl's workers"):
        asyncio.run(join())


def test_an_error_of_score_group_is_a_failure_and_no_reward():
    class Broken(Ranked):
        def score_group(self, task, traces):
            raise RuntimeError("no judge")

    played = played_together(Broken(), "ab", "abcd")
    asyncio.run(score_group(played))
    assert [each.reward for each in played] == [None, None]
    assert "no judge" in str(played[0].failure)


def test_a_task_server_that_scores_groups_is_said_not_to_here(caplog):
    Hooks().contract_of(SimpleNamespace(contract=Contract(group_score=True)))
    assert "each episode is scored alone" in caplog.text


# What else a contract promises, in TRL


def test_trl_plays_all_turns_of_a_task_and_says_that_it_sums_their_rewards(tmp_path, monkeypatch, caplog):
    (tmp_path / "contracts_of.py").write_text(CONTRACTS)
    monkeypatch.chdir(tmp_path)
    said = cells()["contract"]
    assert all(said[kind]["TRL"] is True for kind in (ContractKind.MANY_TURNS, ContractKind.DISCOUNT))
    with TrlTasks("contracts_of.py:Climbs") as tasks, caplog.at_level(logging.WARNING):
        columns = rollout(tasks, Speaker(*["up"] * 12), [0])
    assert columns["turn_rewards"] == [[1.0] * 12]
    assert columns["task_reward"] == [12 * 0.5**12]
    own = {"steps": 12.0, "success": 1.0, "truncated": 1.0, "raw_reward": 12.0, "num_turns": 12.0}
    assert (columns["task_metrics"], said[ContractKind.METRICS]["TRL"]) == ([own], True)
    assert said[ContractKind.TURN_REWARDS]["TRL"] in caplog.text


def test_a_reward_of_the_users_own_replaces_the_discount(tmp_path, monkeypatch):
    (tmp_path / "contracts_of.py").write_text(CONTRACTS)
    monkeypatch.chdir(tmp_path)

    class Brief(TrlTasks):
        def postprocess_reward(self, reward, num_turns, info):
            return reward - num_turns / 4

    with Brief("contracts_of.py:Climbs") as tasks:
        assert rollout(tasks, Speaker(*["up"] * 12), [0])["task_reward"] == [9.0]
