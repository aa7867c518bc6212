"""examples/train_agent: an agent around OpenAI's SDK plays behind a gateway, and the model that it calls is trained."""

from __future__ import annotations

import asyncio

import pytest
from agent_training import EXAMPLE, GROUP, TASKS, AgentTraining, rewards_of
from model_endpoint import endpoint, said

from treetune import open_run, run_rollout
from treetune.gateway import AgentPolicy
from treetune.runs.token_check import TokenCheck
from treetune.tasksets.target import load_taskset

EXACT = 1e-4
"""How far probabilities of an engine and a trainer may be apart: both compute in single precision."""


def test_the_agent_shows_the_model_its_draft_and_hands_in_what_it_says_then():
    pytest.importorskip("openai")
    taskset = load_taskset(f"{EXAMPLE / 'parity.py'}:Parity")
    task = next(iter(taskset.load_tasks()))

    async def play():
        async with endpoint(lambda number, _: said(["odd", "even"][number])) as (policy, requests):
            agent = AgentPolicy(f"{EXAMPLE / 'agent.py'}:solve", policy)
            trace = await run_rollout(taskset, task, agent)
            await agent.close()
            return trace, requests

    trace, requests = asyncio.run(play())
    assert (trace.turns[0].message["content"], trace.reward, trace.warnings) == ("even", 1.0, [])
    shown = [message["content"] for message in requests[1]["body"]["messages"]]
    assert shown == ["Is 100 odd or even?", "odd", "Check it."]
    assert len(requests) == 2


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> AgentTraining:
    return AgentTraining(tmp_path_factory.mktemp("training"))


@pytest.mark.slow
def test_trl_trains_both_answers_of_each_rollout_exactly_once(training):
    run = training.in_trl(2)
    assert len(rewards_of(run)) == 2
    check = TokenCheck()
    for trace in open_run(run / "rollouts").traces():
        check.add(trace)
        assert len(trace.agent.calls) == 2
    assert not check.faults
    episodes = 2 * TASKS * GROUP
    assert (check.counts.rollouts, check.counts.sequences, check.counts.trained) == (episodes, episodes, 2 * episodes)


@pytest.mark.slow
def test_verl_samples_from_the_new_weights_and_trains_both_answers(training):
    steps = training.in_verl(2)
    assert len(steps) == 2
    for step in steps:
        assert len(step["rollouts"]) == TASKS * GROUP
        assert all(rollout["output"].count("user\nCheck it.\nassistant\n") == 1 for rollout in step["rollouts"])
        assert step["treetune/rows_per_episode"] == 1
        assert step["training/rollout_probs_diff_max"] < EXACT
        assert step["actor/grad_norm"] > 0
