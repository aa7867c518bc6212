"""`verifiers:ID` as a TARGET: environments of verifiers, played in the real one, v1 and v0."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import venvs

from treetune.cli.listing import TargetKind, cells

SIDE = Path(venvs.__file__).with_name("verifiers_target_side.py")


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_it_says_what_to_install(treetune):
    result = treetune("eval", "verifiers:my-env", "-m", "scripted:gold")
    assert result.code == 3
    assert "verifiers is not installed" in result.err
    assert "treetune[verifiers]" in result.err


def found(pins, version, folder) -> dict:
    envs, home = str(SIDE.with_name("verifiers_envs")), folder / "home"
    printed = venvs.run(venvs.venv(*pins), SIDE, version, folder, PYTHONPATH=envs, HOME=str(home))
    assert not list(home.glob(".cache/verifiers/runtimes/subprocess/*")), "a runtime of verifiers' was left over"
    return json.loads(printed.splitlines()[-1])


def rewards(cases: dict, *names: str) -> list[float | None]:
    return [cases[name]["reward"] for name in names]


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
def test_tasksets_of_v1_are_played(tmp_path):
    cases = found(venvs.VERIFIERS, "v1", tmp_path)
    assert (cases["count"], cases["fewer"], cases["infinite"]) == (4, 2, [True, None, False])
    # Rewards that need only what was said, as verifiers weighs them.
    assert rewards(cases, "right", "wrong") == [1.5, 0.0]
    assert (cases["answer breaks the reward"]["outcome"], cases["answer breaks the reward"]["reward"]) == (
        "completed",
        0.0,
    )
    assert cases["right"]["metrics"] == {"exact": 1.0, "brief": 0.5, "length": 3.0}
    assert cases["right"]["shown"] == ["Be brief.", "Reverse abc."]
    # verifiers' own `score(trace, None)` leaves out what needs a runtime: here verifiers plays it.
    assert rewards(cases, "needs a runtime", "needs a runtime, wrong", "pickled") == [1.0, 0.0, 1.0]
    assert rewards(cases, "several turns", "several turns, lost") == [1.0, 0.0]
    assert cases["several turns"]["shown"][1:] == ["Lower.", "Higher."]
    assert (cases["tools"]["reward"], cases["tools"]["tools"]) == (1.0, ["math_double"])
    assert cases["tools"]["shown"][1:] == ["error: no such call: nothing", "2"]
    assert cases["rows"] == [1.5, 0.5]
    check_verbs(cases, count=3, reward=1.5)
    check_faults(cases)
    refused = cases["refused"]
    assert "needs a container" in refused["vf-boxed"]
    assert "several models (one, other)" in refused["vf-debate"]
    assert "verifiers==0.1.14" in refused["v0-double"]
    assert "no module 'nothing'" in refused["nothing"]
    assert "not an environment of verifiers" in refused["json"]
    assert "words" in cases["wrong argument"]


@pytest.mark.slow
@pytest.mark.xdist_group("verifiers")
def test_environments_of_v0_are_played(tmp_path):
    cases = found(venvs.VERIFIERS_V0, "v0", tmp_path)
    assert (cases["count"], cases["fewer"], cases["eval"]) == (4, 2, 1)
    assert rewards(cases, "right", "wrong", "several turns", "several turns, lost", "tools", "pickled") == [
        1.0, 0.0, 1.0, 0.0, 1.0, 1.0,
    ]  # fmt: skip
    assert cases["tools"]["tools"] == ["double"]
    assert cases["rows"] == [1.0, 0.0]
    check_verbs(cases, count=3, reward=1.0)
    check_faults(cases)
    assert "has no tasks" in cases["refused"]["empty"]
    assert "together" in cases["refused"]["group"]


def check_verbs(cases: dict, *, count: int, reward: float) -> None:
    """Every cell of its row in the matrix says yes: each verb takes it, and both doors of a server too."""
    assert cases["verbs"].pop("serve") == [count, reward, reward]
    row = cells()["target"][TargetKind.VERIFIERS]
    assert {verb for verb, said in row.items() if said is True} == {*cases["verbs"], "serve"}
    assert set(row) - {*cases["verbs"], "serve"} == {"export"}
    assert cases["verbs"] == dict.fromkeys(cases["verbs"], 0)


def check_faults(cases: dict) -> None:
    """A policy cannot take itself out of the mean; what it cannot help has no reward; nothing is left over."""
    assert (cases["policy breaks the reward"]["outcome"], cases["policy breaks the reward"]["reward"]) == (
        "completed",
        0.0,
    )
    assert (cases["empty"]["outcome"], cases["empty"]["reward"]) == ("completed", 0.0)
    assert "raised" in cases["policy breaks the reward"]["warnings"][0]
    assert (cases["reward is broken"]["outcome"], cases["reward is broken"]["reward"]) == ("environment_error", None)
    assert (cases["policy fails"]["outcome"], cases["policy fails"]["reward"]) == ("policy_error", None)
    assert cases["left after a cancel"] == 0
