"""The token episode that verl, AReaL, slime and TRL's asynchronous trainer play: what its sampling may give."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import Letters, plain

from treetune import Task, Taskset
from treetune.chat.tokens import ChatTokens
from treetune.errors import PolicyError
from treetune.gateway import AgentPolicy, PythonAgent
from treetune.play.streams import Streams
from treetune.trainers.episodes import LocalEpisodes
from treetune.trainers.token_episode import Hooks, Sampled, play_episode


class Doubles(Taskset):
    def load_tasks(self):
        yield Task(prompt="Double 3.", reward_spec={"ground_truth": "6"})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)


def play(*says: Sampled):
    """The episode in which sampling gives these one after the other, and how many were asked for."""
    left = list(says)

    async def sample(prompt):
        return left.pop(0)

    async def main():
        episodes = LocalEpisodes(Streams(Doubles()))
        chat, hooks = ChatTokens(Letters(plain)), Hooks(max_turns=3, turn_discount=1.0)
        return await play_episode(lambda: episodes.start(0), chat, hooks, sample, longest_prompt=None)

    return asyncio.run(main()), len(says) - len(left)


RIGHT = Letters(plain)("6<end>")["input_ids"]
GOOD = Sampled(RIGHT, [-0.5] * len(RIGHT))
BAD = [
    Sampled(RIGHT, [float("nan")] * len(RIGHT)),
    Sampled(RIGHT, [-float("inf")] * len(RIGHT)),
    Sampled(RIGHT, [4.0] * len(RIGHT)),
    Sampled([-1, *RIGHT[1:]], None),
    Sampled([0.5, *RIGHT[1:]], None),
    Sampled(["6"], None),
]


@pytest.mark.parametrize("bad", BAD)
def test_a_sample_that_is_none_costs_no_zero_and_the_episode_is_played_again(bad):
    played, asked = play(bad, GOOD)
    assert (played.reward, played.failure, asked) == (1.0, None, 2)
    assert [sequence.logprobs[-1] for sequence in played.tokens.sequences] == [-0.5]


@pytest.mark.parametrize("bad", BAD)
def test_an_engine_that_gives_only_such_samples_is_the_failure(bad):
    played, asked = play(bad, bad)
    assert (played.reward, asked) == (None, 2)
    assert isinstance(played.failure, PolicyError)
    assert "sampled token 0 of" in played.failure.message
    assert not played.tokens.sequences


# An agent plays


async def asks_twice(task, client):
    first = await client.chat([{"role": "user", "content": task.problem}], tools=[TOOL])
    await client.chat([{"role": "system", "content": "Count."}, {"role": "user", "content": "3"}], tools=[TOOL])
    again = [{"role": "user", "content": task.problem}, first, {"role": "user", "content": "Sure?"}]
    return (await client.chat(again, tools=[TOOL]))["content"].removesuffix("<end>")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def play_by(agent, *says):
    left = list(says)

    async def sample(prompt):
        await asyncio.sleep(0)
        said = left.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def main():
        policy = AgentPolicy(PythonAgent("mine", agent))
        try:
            episodes = LocalEpisodes(Streams(Doubles()), needs=policy.needs)
            chat, hooks = ChatTokens(Letters(plain), rewrites="keep"), Hooks(turn_discount=0.5)
            how = {"longest_prompt": None, "attempts": 1, "agent": policy}
            return await play_episode(lambda: episodes.start(0), chat, hooks, sample, **how)
        finally:
            await policy.close()

    return asyncio.run(main())


def test_an_agent_plays_with_the_samples_of_the_trainer():
    played = play_by(asks_twice, GOOD, GOOD, GOOD)
    assert (played.failure, played.raw_reward, played.reward, played.turns) == (None, 1.0, 0.5, 1)
    assert len(played.record.calls) == 3
    kinds = [(each.kind, each.calls, each.trained) for each in played.record.lineage]
    assert kinds == [("sub-agent", [1], [1]), ("main", [0, 2], [0, 2])]
    turns = [[span.turn for span in sequence.spans] for sequence in played.tokens.sequences]
    assert turns == [trained for _, _, trained in kinds]
    assert sorted(turn for each in turns for turn in each) == [0, 1, 2]
    for sequence in played.tokens.sequences:
        assert [sequence.ids[span.first : span.end] for span in sequence.spans] == [RIGHT] * len(sequence.spans)
        assert sum(sequence.mask) == len(RIGHT) * len(sequence.spans)
    assert played.rewards == [0.0, 0.0, 1.0]
    assert played.shape_each(played.turns) == [0.0, 0.0, 0.5]


async def asks_nothing(task, client):
    return "6"


async def crashes(task, client):
    await client.chat([{"role": "user", "content": task.problem}])
    raise RuntimeError("no idea")


def test_what_an_agent_does_is_scored_whether_it_asks_or_not():
    silent, crashed = play_by(asks_nothing), play_by(crashes, GOOD)
    assert (silent.reward, silent.tokens.sequences) == (0.5, [])
    assert (crashed.reward, len(crashed.tokens.sequences)) == (0.0, 1)


@pytest.mark.parametrize("bad", BAD)
def test_a_sample_of_an_agent_that_is_none_is_a_failure(bad):
    played = play_by(crashes, bad)
    assert played.reward is None
    assert played.failure is not None


def test_an_error_of_the_engine_is_raised_as_if_the_model_played():
    class EngineGone(Exception): ...

    with pytest.raises(EngineGone):
        play_by(crashes, EngineGone())
