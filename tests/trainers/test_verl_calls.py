"""The parts of verl's agent loop that need no verl: the calls of the model, and the groups of episodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from treetune.chat.tokens import Prompt, TokenSequence
from treetune.serve import ServeError
from treetune.trainers.verl.rollouts import EpisodeScore, ModelCalls, PromptGroups


def engine(asked, *, logprobs=None, seconds=0.0, experts=None, **fields):
    async def generate(**call):
        asked.append(call)
        await asyncio.sleep(seconds)
        told = {key: value + len(asked) for key, value in fields.items()}
        said = {"token_ids": [7, 8], "log_probs": logprobs, "num_preempted": 1, "routed_experts": experts}
        return SimpleNamespace(**said, extra_fields=told)

    return generate


def calls_of(asked, params=None, *, timeout=None, request_id=None, priority=None, **told):
    sizes = {"prompt_length": 4, "response_length": 6}
    further = {"timeout": timeout, "request_id": request_id, "priority": priority}
    return ModelCalls(engine(asked, **told), params or {}, **sizes, **further)


def test_an_episode_is_one_request_that_leaves_room_for_its_answers():
    asked = []
    calls = calls_of(asked, {"temperature": 1.0}, min_global_steps=0, max_global_steps=10)

    async def main():
        assert calls.longest_prompt() == 4
        await calls.sample(Prompt([1, 2, 3]))
        assert calls.longest_prompt() == 8
        await calls.sample(Prompt([1, 2, 3, 7, 8, 5]))
        first = asked[0]["request_id"]
        calls.begin()
        await calls.sample(Prompt([1, 2, 3]))
        return first

    first = asyncio.run(main())
    assert [call["request_id"] == first for call in asked] == [True, True, False]
    assert [call["sampling_params"] for call in asked] == [
        {"temperature": 1.0, "max_tokens": room} for room in (6, 3, 6)
    ]
    assert "priority" not in asked[0]


def test_each_call_has_a_seed_of_its_own_and_an_episode_that_is_played_again_others():
    asked = []
    calls = ModelCalls(engine(asked), {}, prompt_length=4, response_length=6, seed_of=lambda number: 100 + number)

    async def main():
        for _ in range(2):
            calls.begin()
            await calls.sample(Prompt([1]))
            await calls.sample(Prompt([1, 7, 8]))

    asyncio.run(main())
    assert [call["sampling_params"]["seed"] for call in asked] == [100, 101, 102, 103]


def test_the_versions_are_those_of_the_first_token_and_the_last():
    asked = []
    calls = calls_of(asked, min_global_steps=0, max_global_steps=10)

    async def main():
        for _ in range(3):
            await calls.sample(Prompt([1]))

    asyncio.run(main())
    assert calls.fields == {"min_global_steps": 1, "max_global_steps": 13}
    assert calls.preempted == 3


def test_a_first_prompt_is_never_cut():
    asked = []
    said = asyncio.run(calls_of(asked).sample(Prompt([1, 2, 3, 4, 5, 6])))
    assert asked[0]["prompt_ids"] == said.prompt_ids == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("params", "logprobs", "expected"),
    [({}, None, None), ({"logprobs": True}, [-1.0, -2.0], [-1.0, -2.0]), ({"logprobs": True}, None, [])],
)
def test_logprobs_are_there_where_they_were_asked_for(params, logprobs, expected):
    assert asyncio.run(calls_of([], params, logprobs=logprobs).sample(Prompt([1]))).logprobs == expected


def test_a_call_that_takes_too_long_is_a_failure_and_no_answer():
    with pytest.raises(ServeError, match=r"did not answer in 0\.01 seconds"):
        asyncio.run(calls_of([], timeout=0.01, seconds=5).sample(Prompt([1])))


def test_a_run_that_is_to_be_repeatable_names_its_requests():
    asked = []
    asyncio.run(calls_of(asked, request_id="det-3", priority=3).sample(Prompt([1])))
    assert (asked[0]["request_id"], asked[0]["priority"]) == ("det-3", 3)


def test_each_sequence_has_the_experts_of_its_last_turn():
    calls = calls_of([])
    calls._experts = ["one", "two", "three"]
    sequences = [TokenSequence([1, 2, 3, 4], [0, 1, 0, 1]), TokenSequence([1, 2], [0, 1])]
    assert calls.experts_of(sequences) == ["two", "three"]
    calls._experts = [None, None, None]
    assert calls.experts_of(sequences) == [None, None]


# PromptGroups


async def take_part(groups, outcome, seconds=0.0, uid="a"):
    with groups.join(uid) as member:
        await asyncio.sleep(seconds)
        if outcome is None:
            return await member.mean_of_others()
        member.end(EpisodeScore(outcome, float(outcome >= 1)))
        return None


def test_one_that_failed_gets_the_mean_of_the_others_once_they_have_ended():
    async def main():
        groups = PromptGroups()
        parts = [(None, 0.0), (1.0, 0.02), (None, 0.01), (0.5, 0.05)]
        others = [take_part(groups, 0.0, uid="b"), *(take_part(groups, *part) for part in parts)]
        return await asyncio.gather(*others), groups._groups

    found, left = asyncio.run(main())
    assert found == [None, (0.75, 0.5), None, (0.75, 0.5), None]
    assert not left


def test_where_no_other_was_played_there_is_no_mean():
    async def main():
        groups = PromptGroups()
        return await asyncio.gather(take_part(groups, None), take_part(groups, None, 0.01))

    assert asyncio.run(main()) == [None, None]


def test_one_that_is_cancelled_is_not_waited_for():
    async def main():
        groups = PromptGroups()
        slow = asyncio.create_task(take_part(groups, 1.0, 60))
        failed = asyncio.create_task(take_part(groups, None))
        done = asyncio.create_task(take_part(groups, 0.0))
        await done
        slow.cancel()
        return await asyncio.wait_for(failed, 10)

    assert asyncio.run(main()) == (0.0, 0.0)
