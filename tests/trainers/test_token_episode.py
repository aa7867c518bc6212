"""The token episode that verl, AReaL, slime and TRL's asynchronous trainer play: what its sampling may give."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import Letters, plain

from treetune import Task, Taskset
from treetune.chat.tokens import ChatTokens
from treetune.errors import PolicyError
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
