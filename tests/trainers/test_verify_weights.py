"""`treetune verify-weights`: an episode counts once in a trainer, whether it is one training row or several."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import slime_runs
import venvs

from treetune.cli.listing import ContractKind, cells
from treetune.errors import CreditError
from treetune.trainers import weights
from treetune.trainers.weights import CUTS, Case, Outcome

ROOT = venvs.ROOT


class Number(float):
    """A gradient of one number."""

    def norm(self):
        return abs(self)

    def __sub__(self, other):
        return Number(float(self) - float(other))


def verified(treetune, monkeypatch, *cases):
    monkeypatch.setitem(weights.CASES, "mine", f"{__name__}:listed")
    monkeypatch.setitem(globals(), "listed", lambda: cases)
    return treetune("verify-weights", "mine", "--json")


def test_a_trainer_passes_if_nothing_depends_on_the_rows(treetune, monkeypatch):
    same = Case("token-mean", "turn", lambda cuts: Outcome({(0, 0): 0.5}, Number(2.0)))

    def refuse(cuts):
        raise CreditError("one ratio for a row")

    done = verified(treetune, monkeypatch, same, Case("gspo", "turn", refuse))
    assert done.code == 0, done.err
    first, second = done.json["losses"]
    assert (first["passed"], first["errors"]) == (True, dict.fromkeys(CUTS, 0.0))
    assert (second["passed"], second["refused"]) == (True, "one ratio for a row")


@pytest.mark.parametrize(
    "outcome",
    [
        lambda rows: Outcome({(0, 0): 0.5}, Number(2.0 + 1e-4 * rows)),
        lambda rows: Outcome({(0, 0): 0.5}, Number(2.0), steps=rows // 9 + 1),
        lambda rows: Outcome({(0, 0): 0.5 / rows}, Number(2.0)),
    ],
    ids=["gradient", "steps", "advantages"],
)
def test_a_trainer_that_counts_rows_fails(treetune, monkeypatch, outcome):
    done = verified(treetune, monkeypatch, Case("token-mean", "turn", lambda cuts: outcome(sum(cuts))))
    assert done.code == 1
    assert not done.json["passed"]


def test_an_unknown_trainer_and_one_that_is_not_installed_are_named(treetune):
    assert "did you mean 'verl'" in treetune("verify-weights", "verll").err
    assert "verl cannot be imported" in treetune("verify-weights", "verl").err


SUPPORT = ROOT / "tests/support"
TRAINERS = {
    "verl": (venvs.VERL, 19, []),
    "areal": (venvs.AREAL, 4, []),
    "skyrl": (venvs.SKYRL, 13, [SUPPORT / "python_311"]),
    # slime is not on PyPI, and its losses import Megatron.
    "slime": (venvs.SKYRL, 10, [slime_runs.SOURCE, SUPPORT / "megatron_stand_in"]),
}
"""The environment, how many losses are verified, and what is on the path besides."""
NAMES = {"areal": "AReaL", "verl": "verl", "skyrl": "SkyRL", "slime": "slime"}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_episode_counts_once_in_a_real_trainer(trainer):
    """The cells of the matrix."""
    contract = cells()["contract"]
    assert all(contract[kind][NAMES[trainer]] is True for kind in (ContractKind.ONCE, ContractKind.TURN_CREDIT))
    if trainer == "slime" and not slime_runs.SOURCE:
        pytest.skip("needs slime's source: TREETUNE_TEST_SLIME")
    environment, losses, path = TRAINERS[trainer]
    command = [venvs.venv(*environment), "-W", "ignore", "-m", "treetune", "verify-weights", trainer, "--json"]
    places = os.pathsep.join(map(str, [ROOT / "src", *path]))
    variables = {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])["losses"]  # SkyRL prints a log
    verified = [each for each in found if each["refused"] is None]
    assert len(verified) == losses
    for each in verified:
        assert list(each["errors"]) == list(CUTS)
        assert max(each["errors"].values()) <= 1e-6, each
        assert set(each["steps"].values()) == {1}, each
