"""The real AReaL takes the trajectories of `TaskServerWorkflow`, and reads the example's config."""

from __future__ import annotations

import pytest
import venvs

pytestmark = pytest.mark.slow

PACKAGES = [
    ["torch==2.13.0"],
    ["--no-deps", "areal==1.0.4"],
    "transformers<=5.3 aiohttp colorlog tenacity flask torchdata lark uvloop hydra-core==1.4.0.dev1 "
    "omegaconf==2.4.0.dev2 ray numba pillow orjson einops aiofiles openai datasets pytest".split(),
    # What its loader of configs imports.
    "swanlab wandb tensorboardX trackio tabulate pybase64".split(),
]


@pytest.fixture(scope="module")
def python():
    return venvs.venv("areal", *PACKAGES)


def test_its_own_classes_take_our_trajectories(python):
    tests = venvs.ROOT / "tests" / "support"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider"]
    venvs.run(python, "-m", "pytest", *options, tests / "areal_side.py", PYTHONPATH=str(tests))
