"""What the tests of the viewer share: a run of every kind of rollout, and its server."""

from __future__ import annotations

import pytest
from viewed_run import make_viewed_run
from viewing import viewing


@pytest.fixture(scope="session")
def viewed(tmp_path_factory):
    """A folder with two runs of the same tasks, the second a little better; read only."""
    folder = tmp_path_factory.mktemp("viewed") / "runs"
    for name, seed, shift in (("a", 0, 0.0), ("b", 1, 0.15)):
        make_viewed_run(folder / name, tasks=30, rollouts=4, seed=seed, shift=shift, model=f"model-{name}")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What a server keeps of one test is not for another."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def server(viewed):
    with viewing(viewed) as opened:
        yield opened
