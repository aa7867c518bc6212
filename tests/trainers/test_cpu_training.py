"""Real training steps on a CPU, from one declaration: sampling, rewards, gradients, and the new weights sampled from.

Nothing is a stand-in but what `verl_cpu_platform.py` and `trl_cpu_side.py` name. The figures are not timed, and rewards
of two steps may fall: the tests check that steps were taken on the rollouts. docs/trainers/comparison.md shows curves.
"""

from __future__ import annotations

import pytest
from cpu_training import GROUP, PROMPTS, CpuTraining

from treetune.runs.discovery import open_run

pytestmark = pytest.mark.slow

SMALL = set("abcdefghijklmnopqrstuvwxyz")
EXACT = 1e-4
"""How far probabilities of an engine and a trainer may be apart: both compute in single precision."""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> CpuTraining:
    return CpuTraining(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """For the traces of what trainers wrote."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def vllm(training: CpuTraining):
    """One engine for all that need a server. It comes after verl, which has its own."""
    with training.vllm() as server:
        yield server


def share_of_small(text: str) -> float:
    return sum(letter in SMALL for letter in text) / max(1, len(text))


def said_in(rollout: dict) -> list[str]:
    """The answers in verl's text of an episode, which has the whole chat after the first prompt."""
    turns = rollout["output"].split("assistant\n")
    return [turn.partition("\nuser")[0] for turn in turns]


@pytest.mark.parametrize(("task", "turns"), [("Letters", 2), ("Line", 1)])
def test_verl_takes_steps(training, task, turns):
    steps = training.verl(task, 2)
    assert len(steps) == 2
    for step in steps:
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < EXACT  # after an update too: the engine has the new weights
        assert len(step["rollouts"]) == PROMPTS * GROUP
        for rollout in step["rollouts"]:
            answers = said_in(rollout)
            assert len(answers) == turns
            expected = sum(map(share_of_small, answers)) / turns
            assert rollout["score"] == pytest.approx(expected)
        scores = [rollout["score"] for rollout in step["rollouts"]]
        assert step["reward"] == pytest.approx(sum(scores) / len(scores))
    first, second = ({rollout["output"] for rollout in step["rollouts"]} for step in steps)
    assert first != second
    run = open_run(training.folder / f"verl-{task}" / "rollouts")
    assert run.groups().rollouts.tolist() == [GROUP] * PROMPTS * 2
    for number, step in enumerate(steps, 1):
        assert run.columns.reward[run.columns.numbers("step") == number].mean() == pytest.approx(step["reward"])


def test_trl_takes_steps(training):
    found = training.trl(2)
    assert [log["num_turns"] for log in found["logs"]] == [2, 2]
    assert all(log["grad_norm"] > 0 for log in found["logs"])
    assert found["moved"] > 0
    assert found["finite"]
    run = open_run(training.folder / "trl")
    assert run.groups().rollouts.tolist() == [GROUP] * PROMPTS * 2
    for number, log in enumerate(found["logs"], 1):
        assert run.columns.reward[run.columns.numbers("step") == number].mean() == pytest.approx(log["reward"])


def test_skyrls_jax_backend_takes_steps_on_what_its_generator_plays(training):
    first, second = training.skyrl(2)
    for step in (first, second):
        assert step["logprob_difference"] < EXACT
        assert len(set(step["rewards"])) > 1
        for text, trained, reward in zip(step["texts"], step["trained"], step["rewards"], strict=False):
            assert "Again." in text
            assert "Again." not in trained  # what the environment says is masked
            answers = trained.removesuffix("<|im_end|>").split("<|im_end|>")
            assert reward == pytest.approx(sum(map(share_of_small, answers)) / 2)
    assert first["texts"] != second["texts"]


def test_trl_takes_asynchronous_steps_against_vllm(training, vllm):
    found = training.trl(2, vllm)
    assert found["difference"] < EXACT
    # TRL's loader has the second step's batch before the first is taken: it is one update behind, and its KL shows it.
    assert found["sampled_by"] == [[1], [1]]
    assert found["logs"][0]["kl"] < EXACT
    assert all(log["grad_norm"] > 0 for log in found["logs"])
    assert len(found["versions"]) > 1  # sampled from weights of several steps
    assert len(set(found["rewards"])) > 1
    assert found["moved"] > 0
    assert found["finite"]


def test_steps_are_taken_on_what_verifiers_client_records_of_an_exported_package(training, vllm):
    steps = training.verifiers(2, vllm)
    for step in steps:
        assert step["difference"] < EXACT  # of the second step: sampled from the weights of the first
        assert step["moved"] > 0
        assert {rollout["turns"] for rollout in step["rollouts"]} == {2}
        assert len({rollout["reward"] for rollout in step["rollouts"]}) > 1
