"""The real AReaL takes the trajectories of `TaskServerWorkflow`, and reads the example's config."""

from __future__ import annotations

import pytest
import venvs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python():
    return venvs.venv(*venvs.AREAL)


def test_its_own_classes_take_our_trajectories(python):
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    venvs.run(python, "-m", "pytest", *options, tests / "areal_side.py", PYTHONPATH=str(tests))
