"""What the real W&B, MLflow and TensorBoard have of an evaluation and of a server, read back by their own readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from venvs import LOGGERS, run, venv

pytestmark = pytest.mark.slow
SIDE = Path(__file__).parents[1] / "support" / "loggers_side.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return json.loads(run(venv(*LOGGERS), SIDE, cwd=tmp_path_factory.mktemp("logged")).splitlines()[-1])


def curve(found):
    """The mean of each step, as a trainer would have it."""
    return {str(step): sum(found["serve"][4 * step : 4 * step + 4]) / 4 for step in range(3)}


def test_tensorboard_has_an_evaluation(found):
    logged = found["run: tensorboard"]
    assert logged["scalars"]["mean_reward"] == {"0": pytest.approx(found["eval"]["mean_reward"])}
    assert logged["scalars"]["reward/arithmetic"]["0"] == pytest.approx(found["eval"]["mean_reward"])
    assert "model: scripted:p=0.5" in logged["texts"]["config"]
    assert len(logged["texts"]["samples"].splitlines()) == 2 + 40


def test_mlflow_has_an_evaluation(found):
    logged = found["run: mlflow"]
    assert logged["status"] == "FINISHED"
    assert logged["params"]["model"] == "scripted:p=0.5"
    assert logged["params"]["taskset.id"] == "arithmetic"
    assert logged["metrics"]["pass_at_k/2"] == {"0": found["eval"]["pass_at_k"]["2"]}
    assert len(logged["samples"]["data"]) == 40
    assert "reward" in logged["samples"]["columns"]


def test_wandb_has_an_evaluation(found):
    logged = found["run: wandb"]
    assert logged["project"] == "treetune"
    assert logged["config"]["model"] == "scripted:p=0.5"
    assert logged["summary"]["mean_reward"] == found["eval"]["mean_reward"]
    assert logged["summary"]["reward/arithmetic"] == found["eval"]["mean_reward"]
    (table,) = logged["tables"]
    assert (len(table["data"]), table["columns"][:4]) == (40, ["task", "rollout", "source", "reward"])


def test_the_rewards_of_a_server_are_a_curve_over_the_steps_of_its_trainer(found):
    wanted = curve(found)
    assert found["traces: tensorboard"]["scalars"]["reward/arithmetic"] == pytest.approx(wanted)
    assert found["traces: mlflow"]["metrics"]["reward/arithmetic"] == pytest.approx(wanted)
    points = {str(row["step"]): row["reward/arithmetic"] for row in found["traces: wandb"]["history"] if "step" in row}
    assert points == pytest.approx(wanted)
    assert found["traces: mlflow"]["status"] == "FINISHED"
