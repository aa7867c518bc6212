"""Runs in a real notebook, whose kernel has an event loop under way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from venvs import LOGGERS, run, venv

pytestmark = pytest.mark.slow
SIDE = Path(__file__).parents[1] / "support" / "notebook_side.py"


def test_a_notebook_evaluates_and_shows_runs_and_groups(tmp_path):
    cache = str(tmp_path / "cache")
    printed = run(venv(*LOGGERS), SIDE, cwd=tmp_path, TREETUNE_TASK_CACHE_DIR=cache)
    silent, shown, groups, awaited, resumed = json.loads(printed.splitlines()[-1])
    assert silent == {}
    assert "mean reward" in shown["text/plain"]
    assert groups["text/plain"].startswith("Groups(10 tasks")
    assert "<table" in groups["text/html"]
    assert awaited["text/plain"] == "True"
    assert resumed["text/plain"] == "6"
