"""Real training steps on a CPU, from one declaration: sampling, rewards, gradients, and the new weights sampled from.

Nothing is a stand-in but what `verl_cpu_platform.py` and `trl_cpu_side.py` name. The figures are not timed, and rewards
of two steps may fall: the tests check that steps were taken on the rollouts. docs/trainers/comparison.md shows curves.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import venvs
from cpu_training import GROUP, PROMPTS, CpuTraining

from treetune.cli.listing import ContractKind, cells
from treetune.runs.discovery import open_run
from treetune.view import RunList

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


def shown_in(run):
    """The mean reward by step of what the viewer shows of a training."""
    found = {}
    for each in RunList([run]):
        with each.open() as opened:
            steps, rewards = opened.columns.numbers("step"), opened.columns.reward
            found[each.path.name] = {step: rewards[steps == step].mean() for step in sorted(set(steps.tolist()))}
    return found


def result_of(run):
    result = json.loads((run / "result.json").read_text())
    return {name: {int(step): mean for step, mean in result[name].items()} for name in ("rewards", "validation")}


def state_of(run):
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def after_a_checkpoint(training, trainer, newest, size, seen):
    """Whether a training of Letters has one, and the viewer shows the first step, of that size: then this is seen."""

    def look():
        run = training.run(trainer, "Letters")
        if run is None or not next(run.glob(newest), None) or not (run / "rollouts").exists():
            return False
        seen.update(shown_in(run))
        return "rollouts" in seen and len(open_run(run / "rollouts")) >= size

    return look


def test_verl_is_killed_and_resumed_to_the_same_curve_and_another_task_is_trained_beside_it(training):
    seen = {}
    newest = "checkpoints/latest_checkpointed_iteration.txt"
    training.verl("Letters", 4, until=after_a_checkpoint(training, "verl", newest, PROMPTS * GROUP, seen))
    assert next(iter(seen["rollouts"])) == 1
    assert list(seen["validation"])[:2] == [0, 1]
    run = training.run("verl", "Letters")
    taken = training.verl("Letters", 4, "--resume")
    assert 0 < len(taken) < 4
    result = result_of(run)
    assert list(result["rewards"]) == [1, 2, 3, 4]
    assert list(result["validation"]) == [0, 1, 2, 3, 4]
    training.verl("Letters", 4, "-o", "whole-verl")
    assert result == result_of(training.work / "whole-verl")
    assert {f"global_step_{step}" for step in (1, 2, 3, 4)} < {path.name for path in (run / "checkpoints").iterdir()}
    for number, step in zip((4, 3, 2), reversed(taken), strict=False):
        assert result["rewards"][number] == pytest.approx(step["reward"])
        check_step_of_verl(step, turns=2)
    before = state_of(run)
    steps = training.verl("Line", 2)
    assert state_of(run) == before
    assert len(steps) == 2
    for step in steps:
        check_step_of_verl(step, turns=1)
    first, second = ({rollout["output"] for rollout in step["rollouts"]} for step in steps)
    assert first != second
    assert open_run(training.run("verl", "Line") / "rollouts").groups().rollouts.tolist() == [GROUP] * PROMPTS * 2


CREDITED = """

from treetune import Contract


class Credited(Letters):
    CONTRACT = Contract(credit="turn")
"""


def test_verl_trains_on_episodes_of_several_rows_with_credit_by_turn(training):
    letters = (training.work / "letters.py").read_text()
    (training.work / "credited.py").write_text(letters.replace("letters.py:", "credited.py:") + CREDITED)
    loss = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    steps = training.verl("Credited", 2, "--model", training.forgetful, loss, file="credited.py")
    assert len(steps) == 2
    for step in steps:
        rows = PROMPTS * GROUP * step["treetune/rows_per_episode"]
        assert PROMPTS * GROUP < rows <= 2 * PROMPTS * GROUP
        assert len([row for row in step["rollouts"] if row["score"] is not None]) >= rows
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < EXACT
        assert step["critic/advantages/max"] > 0 > step["critic/advantages/min"]


def check_step_of_verl(step, turns):
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


def test_trl_is_killed_and_resumed_to_the_same_curve_and_another_task_is_trained_beside_it(training):
    seen = {}
    newest = "checkpoints/checkpoint-2/trainer_state.json"
    training.trl_to_the_end("Letters", 6, until=after_a_checkpoint(training, "trl", newest, 16, seen))
    assert list(seen["rollouts"])[:2] == [1, 2]
    assert list(seen["validation"])[:3] == [0, 1, 2]
    run = training.run("trl", "Letters")
    before = state_of(run)
    training.trl_to_the_end("Line", 1)
    assert state_of(run) == before
    training.trl_to_the_end("Letters", 6, "--resume")
    training.trl_to_the_end("Letters", 6, "-o", "whole")
    resumed, whole = result_of(run), result_of(training.work / "whole")
    assert list(resumed["rewards"]) == [1, 2, 3, 4, 5, 6]
    assert list(resumed["validation"]) == [0, 1, 2, 3, 4, 5, 6]
    assert resumed == whole


def test_trl_takes_steps(training):
    found = training.trl(2)
    assert [log["num_turns"] for log in found["logs"]] == [2, 2]
    assert all(log["grad_norm"] > 0 for log in found["logs"])
    assert found["moved"] > 0
    assert found["finite"]
    run = open_run(found["run"] / "rollouts")
    assert run.groups().rollouts.tolist() == [GROUP] * PROMPTS * 2
    for number, log in enumerate(found["logs"], 1):
        assert run.columns.reward[run.columns.numbers("step") == number].mean() == pytest.approx(log["reward"])


def test_skyrls_jax_backend_takes_steps_on_what_its_generator_plays(training):
    first, second = training.skyrl(2)
    run = open_run(training.folder / "skyrl-rollouts")
    assert run.groups().rollouts.tolist() == [GROUP] * PROMPTS * 2
    assert set(run.columns.numbers("turns").tolist()) == {2}  # a metric that the environment reports
    for number, step in enumerate((first, second), 1):
        assert run.columns.reward[run.columns.numbers("step") == number].tolist() == pytest.approx(step["rewards"])
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


def test_an_episode_whose_history_is_rewritten_is_one_trace_of_verifiers(training, vllm):
    """What prime-rl takes is a trace: a reward for all of its branches, of which each trains other tokens."""
    assert cells()["contract"][ContractKind.ONCE]["verifiers"] is True
    (step,) = training.verifiers(1, vllm, training.forgetful)
    assert len(step["rollouts"]) == PROMPTS * GROUP
    assert {len(rollout["branches"]) for rollout in step["rollouts"]} == {1, 2}
    for rollout in step["rollouts"]:
        assert sum(sum(branch["mask"]) for branch in rollout["branches"]) == rollout["sampled"]
    if "TREETUNE_PRIME_RL" in os.environ:  # a checkout: prime-rl is on no package index
        check_prime_rl(step["rollouts"])


def check_prime_rl(rollouts):
    """prime-rl's own GRPO and its samples."""
    side = Path(venvs.__file__).with_name("prime_rl_credit_side.py")
    episodes = json.dumps([rollout["episode"] for rollout in rollouts])
    printed = subprocess.run(
        [venvs.venv(*venvs.VERIFIERS), side, os.environ["TREETUNE_PRIME_RL"], str(GROUP)],
        input=episodes, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rewards = [rollout["reward"] for rollout in rollouts]
    for number, found in enumerate(json.loads(printed.stdout.splitlines()[-1])):
        first = number - number % GROUP
        advantage = rewards[number] - sum(rewards[first : first + GROUP]) / GROUP
        assert found["samples"] == len(rollouts[number]["branches"])
        assert found["advantages"] == pytest.approx([advantage] * rollouts[number]["sampled"], abs=1e-6)
