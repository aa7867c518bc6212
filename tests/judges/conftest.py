"""Verdicts of one test are not those of another."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
